"""Find in a model's text where the answer stands, and read which option it names.

Chinese words of answers are replaced with English ones, so that one reader does both. Other words
stay as they are.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from stageline.inference.answer_text import REFUSAL, contains_words, plain, tidy

_DIGITS = {
    **{"十二": "12", "十一": "11", "十": "10", "一": "1", "二": "2", "两": "2", "三": "3"},
    **{"四": "4", "五": "5", "六": "6", "七": "7", "八": "8", "九": "9"},
}
_ANGLES = {"一百八十": "180", "二百七十": "270", "两百七十": "270"}
_ANGLES |= {"九十": "90", "四十五": "45", "零": "0"}
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
_CHINESE = r"[\u4e00-\u9fff]"


def to_english(text: str) -> str:
    """Chinese directions, clock positions, angles, verdicts and connectives in English."""
    if not re.search(_CHINESE, text):
        return text
    hours, angles = "|".join(_DIGITS), "|".join(_ANGLES)
    text = re.sub(rf"({hours}|\d+)\s*点半", r" half past \1 ", text)
    text = re.sub(
        rf"({hours}|\d+)\s*点(?:钟|整)?", lambda f: f" {_DIGITS.get(f[1], f[1])} o'clock ", text
    )
    text = re.sub(rf"({angles}|\d+)\s*度", lambda f: f" {_ANGLES.get(f[1], f[1])} degrees ", text)
    text = text.replace("、", " and ")
    for pattern, word in _WORDS:
        text = re.sub(pattern, word, text, flags=re.M)
    return re.sub(rf"{_CHINESE}+", lambda found: f" {found[0]} ", text.replace("。", ". "))


Said = TypeVar("Said")

MOST = 4000  # characters that are read of an answer, half of them from its end
SHORT = 4  # words of a first or last sentence that is an answer by itself

# "the answer is", "answer:", "the correct option would be", "the answer to ... is:"
_ANSWER = re.compile(
    r"\b(?:answer|conclusion|(?:correct|right|best|final|my) (?:option|choice|caption))\b"
    r"(?: to [^.?!;\n]*?| here)?\s*(?:(?:is|was|would be|should be|must be)\b\s*:?|:|=)"
)
# only where a clause begins: "it isn't actually true" corrects nothing
_CORRECTION = re.compile(
    r"(?:^|[.,;:!?)\n\u2014\u2013-])\s*(?:(?:oh|but|or|no|hmm|well),?\s+)*"
    r"(?:actually|wait|hold on|correction|sorry|i mean|scratch that|on second thoughts?|rather|"
    r"let me correct (?:myself|that))\b(?!\s+than)[\s,:.!\u2014\u2013-]*"
)
_NO_FIRST = re.compile(r"(?:^|[.;!?\n])\s*no\s*[,.;:!\u2014\u2013-]+\s*(?=\w)")
_CONCLUSION = re.compile(
    r"\b(?:therefore|thus|hence|so(?!\s+(?:that|far|on|much|many|as)\b)|in conclusion|"
    r"in summary|to conclude|overall)\b[\s,:]*"
)
_NEGATED_BEFORE = re.compile(r"(?:\bnot\b|n't\b|\bnever\b|\bdoubt\b)[^.;!?\n]*$")
_SEGMENT_END = re.compile(r"[.;!](?=\s|$)|\n|\b(?:because|since|as it|given that|due to)\b")
_SENTENCE_END = re.compile(r"[.;!](?=\s|$)|\n")
_REASON = re.compile(r"\b(?:because|since|given that|due to)\b[^.;!?\n]*")
_QUESTION = re.compile(r"(?:^|(?<=[.!?;\n]))[^.!?;\n]*\?+")


def clean(text: str) -> str:
    """`plain` with the Chinese words of answers in English, and "[b]" as "(b)"."""
    text = re.sub(r"\[([a-z])\]", r"(\1)", to_english(plain(text)))
    return re.sub(r"[^\S\n]+", " ", text).strip()


def without_question(text: str, question: str | None) -> str:
    """Return the cleaned text without a verbatim repetition of the question at its beginning.

    A very long text is reduced to its beginning and its end.
    """
    if len(text) > MOST:
        text = f"{text[: MOST // 2]}\n{text[-MOST // 2 :]}"
    said, asked = clean(text), clean(question or "")
    if asked and said.startswith(asked):
        return said[len(asked) :].strip()
    return said


def read_answer(
    text: str, read: Callable[[str], Said | None], *, is_verdict: bool = False
) -> Said | None:
    """Return the answer at the first telling place of a cleaned text (rules 3 to 7).

    Args:
        read: a place -> what it says, or None.
        is_verdict: it reads yes and no: then "no" corrects nothing, and `read` itself knows what
            the first and the last word count.
    """
    without = _QUESTION.sub(" ", text)
    text = without if re.search(r"\w", without) else text
    for rest in _marked(text, is_verdict):
        for place in (first_segment(rest), rest):
            said = read(without_refusals(place))
            if said is not None:
                return said
        if REFUSAL.search(rest):
            return None  # "left... actually, I can't tell"
    text = _REASON.sub(" ", without_refusals(text))
    if not is_verdict:  # the first and the last sentence, where they are short
        parts = [part.strip() for part in _SENTENCE_END.split(text) if re.search(r"\w", part)]
        ends = [part for part in parts[:1] + parts[1:][-1:] if len(part.split()) <= SHORT]
        found = [said for said in map(read, ends) if said is not None]
        if found:
            return found[0] if all(said == found[0] for said in found) else None
    return read(text)


def first_segment(text: str) -> str:
    """Up to the end of the first sentence or line, or to "because"."""
    return _SEGMENT_END.split(text.lstrip(" \n:"), maxsplit=1)[0]


def without_refusals(text: str) -> str:
    """Remove "I can't tell whether ...", up to the next comma."""
    return REFUSAL.sub(" ", text)


def _marked(text: str, is_verdict: bool) -> Iterator[str]:
    """Yield the text after "the answer is" or "actually", last one first; then "therefore"."""
    strong = [
        found
        for found in _ANSWER.finditer(text)
        # not "I don't think the answer is ..."
        if not _NEGATED_BEFORE.search(text[: found.start()])
    ]
    strong += _CORRECTION.finditer(text)
    strong += [] if is_verdict else _NO_FIRST.finditer(text)
    places = sorted((found.end() for found in strong), reverse=True)
    places += [found.end() for found in [*_CONCLUSION.finditer(text)][-1:]]
    for place in places:
        if re.search(r"\w", text[place:]):
            yield text[place:]


_STOP = r"(?=[,.;:!?\n]|\bbut\b|\bit(?:'s| is)\b|\bhowever\b|\bit must\b|$)"
_LONG_STOP = r"(?=[.;!?\n]|\bbut\b|\bit(?:'s| is)\b|\bhowever\b|$)"
_CLAUSE = r"(?:(?<=[,.;:!?\n])|^|\bbut\b|\band\b)[^,.;:!?\n]*?"
_DENIED = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b(?:not only|not just)\b",
        r"\bno doubt\b|\bwithout (?:a )?doubt\b",
        rf"{_CLAUSE}\b(?:is|are|would be|seems)\s+(?:wrong|incorrect|false|impossible)\b",
        rf"{_CLAUSE}(?:isn't|is not|aren't|are not|can't be|cannot be)\s+"
        r"(?:correct|possible|the (?:correct |right )?(?:answer|option|choice|one))\b",
        r"\b(?:do|does|did|would|wouldn)(?:n't| not|'t)\s+(?:think|believe|say|call)\b"
        r"[^,.;!?\n]*?(?=[,.;!?\n]|\bbut\b|$)",
        rf"\bneither\b.*?{_LONG_STOP}",
        rf"(?:\b(?:not|never|cannot|nor|without|unlike)\b|\w+n't\b|\brather than\b|"
        rf"\binstead of\b|\bas opposed to\b|\bother than\b|\bexcept(?: for)?\b|"
        rf"\brul(?:es?|ing) out\b).*?{_STOP}",
    )
)


def without_negated(text: str) -> str:
    """Return a cleaned text without what it denies: "not left but right" gives right."""
    for rule in _DENIED:
        text = rule.sub(" ", text)
    return text


# (what a place does not deny, the place, the options) -> the option that it means
ReadOption = Callable[[str, str, Sequence[str]], int | None]
_OUTSIDE = -1  # an option was named that is none
_ONLY = re.compile(r"\(?([a-z])\)?[.):]?")
_FIRST = re.compile(r"(?:^|\n)\s*(?:\(([a-z])\)|([a-z])[.):])(?=\s|$)")
_IN_BRACKETS = re.compile(r"(?<!\w)\(([a-z])\)")
# "the answer is a cat" has an article: "a" counts only where nothing follows it
_AFTER = r"(?=\s*(?:[.,:;)!\n]|$|\b(?:is|as|because|since|and|or)\b)|(?<!a)\s)"
_NAMED = re.compile(
    r"\b(?:answer|option|choice|letter|caption|choose|select|pick|go with|it's|it is)"
    rf"(?:\s+is)?\s*:?\s*[\"'(]?([a-z])\b[\"')]?{_AFTER}"
)
_SAID_RIGHT = re.compile(
    r"(?<!\w)\(?([a-z])\)?\s+(?:is|seems|looks|would be)\s+(?:the\s+)?"
    r"(?:correct|right|true|best|answer)\b"
)
_SEVERAL = re.compile(r"(?<!\w)\(?([a-z])\)?\s*(?:or|and|/|&|,|nor)\s*\(?([a-z])\)?(?=[\s.,;!)]|$)")
_LETTERED = re.compile(r"(^|\n|\b(?:is|option|choice|answer)\s*:?\s*)\(?([a-z])[.):][^\S\n]+(?=\w)")
_SMALL_WORDS = re.compile(r"\b(?:a|an|the|is|are|there)\b")


def parse_choice(
    text: str,
    choices: Sequence[str],
    *,
    question: str | None = None,
    read: ReadOption | None = None,
) -> int | None:
    """Return the place of the option that an answer names, by its letter or by its text.

    A letter counts where it can't be a word: alone, "B.", "(B)", "answer is B". It wins over a
    text that contradicts it. An option in the text that contains the others there wins ("top left"
    contains "left"); options after "not" don't count.

    Args:
        read: (what a place does not deny, the place, the options) -> the option that it means
            without a letter; default: the one whose text stands there.
    """
    options = [tidy(clean(choice)) for choice in choices]
    said = _without_list(without_question(text, question), options)
    if tidy(said) in options:
        return options.index(tidy(said))

    def read_place(place: str) -> int | None:
        told = without_negated(place)
        letters = _letters(told, len(options))
        if len(letters) != 1:
            return None if letters else (read or by_text)(told, place, options)
        index = ord(letters.pop()) - ord("a")
        return index if index < len(options) else _OUTSIDE

    found = read_answer(said, read_place)
    return None if found == _OUTSIDE else found


def _letters(said: str, num_options: int) -> set[str]:
    alone = _ONLY.fullmatch(said.strip(" .,;:!?\"'"))
    if alone:
        return {alone[1]}
    pairs = [pair for pair in _SEVERAL.findall(said) if max(pair) < chr(ord("a") + num_options)]
    found = {letter for pair in pairs for letter in pair}
    first = {one or other for one, other in _FIRST.findall(said)}
    if len(first) == 1 and not found:
        return first
    return found.union(first, *(p.findall(said) for p in (_IN_BRACKETS, _NAMED, _SAID_RIGHT)))


def by_text(said: str, place: str, options: Sequence[str]) -> int | None:
    """Return the place of the one option whose text is said."""
    found = named_options(said, options)
    return found[0] if len(found) == 1 else None


def named_options(said: str, options: Sequence[str]) -> list[int]:
    """Return the options whose text is all that is said, or stands in it."""
    plain = said.strip(" .,;:!?\"'()\n")
    if plain in options:
        return [options.index(plain)]

    def essence(text: str) -> str:
        """Without articles and "is": "the mug is on a table" says "A mug on the table"."""
        return re.sub(r"\s+", " ", _SMALL_WORDS.sub(" ", text)).strip()

    return _named(said, options) or _named(essence(said), [essence(o) for o in options])


def _named(said: str, options: Sequence[str]) -> list[int]:
    """Return the options in the text that are not part of another option in it."""
    found = [i for i, option in enumerate(options) if contains_words(said, option)]
    return [
        i
        for i in found
        if not any(j != i and contains_words(options[j], options[i]) for j in found)
    ]


def _without_list(said: str, options: Sequence[str]) -> str:
    """Remove the list of options with their letters, where an answer repeats all of it."""
    patterns = [
        rf"\(?\b{chr(ord('a') + i)}[.):]\s*{re.escape(option)}(?!\w)[.,;]?"
        for i, option in enumerate(options)
    ]
    if len(options) > 1 and all(re.search(pattern, said) for pattern in patterns):
        for pattern in patterns:
            said = re.sub(pattern, "\n", said, count=1)
    # "b. left" is one sentence
    return _LETTERED.sub(r"\1(\2) ", said.strip())
