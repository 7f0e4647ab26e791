"""Puts the Chinese words that answers are made of into English ones, so that one reader does both.

Not a translation: what is no word of an answer stays as it is.
"""

import re

_DIGITS = {
    **{"十二": "12", "十一": "11", "十": "10", "一": "1", "二": "2", "两": "2", "三": "3"},
    **{"四": "4", "五": "5", "六": "6", "七": "7", "八": "8", "九": "9"},
}
_HOURS = "|".join(_DIGITS)
_ANGLES = {
    "一百八十": "180",
    "二百七十": "270",
    "两百七十": "270",
    "九十": "90",
    "四十五": "45",
    "零": "0",
}
_END = r"(?=的?\s*(?:[,.。!;]|$))"

# in this order: longer words and those that hold others come first
_WORDS: tuple[tuple[str, str], ...] = (
    (r"以上|以下|然后|最后|之后|目前|上述|如下|综上|东西|前提|之前|对面|对于|面对", " "),
    (
        r"无法(?:判断|确定|回答|看出|辨别|得知)|不确定|不知道|不清楚|看不出来?|难以判断",
        " cannot tell ",
    ),
    (r"正确答案|最终答案|答案|结论", " answer "),
    (r"(?<=answer )\s*(?:应该|应当)?(?:是|为)", " is "),
    (r"(?:应该|正确的?)?(?:选择|选项|选)\s*(?=\(?[a-z]\b)", " option "),
    (r"(?<=[a-z])\s*选项", " is correct "),
    (r"(?:哦|啊|等等|等一下|更正|纠正一下|准确地?说)[,:,。.]?", ". wait, "),
    (r"(?<=[,.。;])\s*(?:不对|不,)[,.。]?\s*(?:应该)?(?:是|在)?", " . wait, "),
    (r"所以|因此|综上所述|总之|由此可见", " . therefore "),
    (r"因为|由于", " because "),
    (r"既不|既非", " neither "),
    (r"也不", " nor "),
    (r"而是|但是|但|不过", " but "),
    (r"还是|或者|或", " or "),
    (r"和|与|以及", " and "),
    (r"逆时针", " counterclockwise "),
    (r"顺时针", " clockwise "),
    (r"上下颠倒|颠倒|倒置|倒过来", " upside down "),
    (r"正立|正放", " upright "),
    (r"旋转|转动", " rotated "),
    (r"是不是|对不对|是否", " yes or no "),
    (r"没错|不错", " correct "),
    (r"不正确|不对|不成立|不属实|不准确", " incorrect "),
    (r"错误|错的|错了|错|假的|假", " false "),
    (r"正确|属实|成立|准确|真的|真|对的|对(?=[,.。!\s]|$)", " true "),
    (rf"^\s*(?:不是|不在|没有|不|否|没有?){_END}", " no "),
    (r"并不是|并非|不是|不在|并不|没有|不", " not "),
    (rf"^\s*是{_END}", " yes "),
    (r"^\s*否", " no "),
    (r"左", " left "),
    (r"右", " right "),
    (r"上|顶部?", " above "),
    (r"下|底部?", " below "),
    (r"前", " front "),
    (r"[后後]", " behind "),
    (r"正?中[间央心]|中部", " middle "),
    (r"东", " east "),
    (r"西", " west "),
    (r"南", " south "),
    (r"北", " north "),
)
_RULES = tuple((re.compile(pattern, re.M), word) for pattern, word in _WORDS)
_IS_CHINESE = re.compile(r"[\u4e00-\u9fff]")


def to_english(text: str) -> str:
    """Chinese directions, clock positions, angles, verdicts and connectives in English."""
    if not _IS_CHINESE.search(text):
        return text
    text = re.sub(rf"({_HOURS}|\d+)\s*点半", r" half past \1 ", text)
    text = re.sub(rf"({_HOURS}|\d+)\s*点(?:钟|整)?", lambda f: f" {_number(f[1])} o'clock ", text)
    angles = "|".join(_ANGLES)
    text = re.sub(rf"({angles}|\d+)\s*度", lambda f: f" {_ANGLES.get(f[1], f[1])} degrees ", text)
    text = text.replace("、", " and ")
    for pattern, word in _RULES:
        text = pattern.sub(word, text)
    text = text.replace("。", ". ")
    return re.sub(r"[\u4e00-\u9fff]+", lambda found: f" {found[0]} ", text)


def _number(word: str) -> str:
    return _DIGITS.get(word, word)
