"""Clean a model's text, see whether it says anything, and read which option it names."""

import re
import unicodedata
from collections.abc import Sequence

import regex  # transformers brings it; its \w knows the vowel signs of Hindi as parts of a word

_QUOTES = str.maketrans(
    {**dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'"), "º": "°", "\u00bd": " half "}
)
_QUOTES |= str.maketrans(dict.fromkeys("\u2010\u2011\u2212", "-"))  # the last one is a minus
_QUOTES |= str.maketrans(dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d", '"'))
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)|\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", re.S)
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
_HAS_NO_SPACES = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
)
_CANNOT = (
    r"(?:cannot|can't|can not|couldn't|could not|unable to|not able to|impossible to|hard to|"
    r"difficult to|not possible to|don't|do not)"
)
REFUSAL = re.compile(
    r"(?:\b(?:it|this|that|i|we)(?:'s|'m| is| am| are)?\s+)?"
    rf"(?:\b{_CANNOT}\s+(?:\w+ly\s+)?(?:determine|tell|say|see|know|answer|identify|be determined|"
    r"be sure|decide|assist|help|provide|view|process|judge)\b|"
    r"\b(?:not|isn't|aren't) (?:sure|certain|clear|visible|enough)\b|\bas an ai\b|\bunsure\b|"
    r"\bunclear\b|\bi refuse\b|\bundetermined\b|\bno idea\b|\bunknown\b)[^,.;!?\n]*"
)
_CHINESE_REFUSAL = re.compile(
    r"无法(?:判断|确定|回答|看出|辨别|得知)|不确定|不知道|不清楚|看不出来?|难以判断"
)
# "the answer is a cat" has an article: "a" counts only where nothing follows it
_LETTER = re.compile(
    r"(?:^|\n)([a-z])(?=[.):]|\n|$)|[(\[]([a-z])[)\]]"
    r"|\b(?:answer|option|choice)(?: is)?:? ?\"?([a-z])(?=[.,;:)!\"\n]|$)"
)
_DENIAL = re.compile(r"\b(?:not|never|neither|nor|cannot|wrong|incorrect)\b|n't\b|不|没")


def plain(text: str) -> str:
    """Return lower case with plain quotes and widths, without markup and thoughts; keep lines."""
    text = unicodedata.normalize("NFKC", _without_thoughts(text.translate(_QUOTES)))
    if "\\" in text:
        text = _LATEX_TEXT.sub(r"\1", text.replace("$", " "))
    text = _TAGGED.sub(lambda found: f"\nanswer is {found[1] or found[2]}\n", text).lower()
    text = re.sub(r"[*_]+|^#+", " ", text, flags=re.M)
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r" ?\n[ \n]*", "\n", text).strip()


def normalize(text: str) -> str:
    """Return `plain` on one line, without outer punctuation or an answer tag around all of it."""
    for _ in range(2):  # a box in a tag; a model may repeat tags without an end
        alone = _without_thoughts(text).strip("$. \n")
        tagged = _TAGGED.search(alone)
        if tagged and tagged[0] == alone:
            text = tagged[1] or tagged[2] or ""
    return tidy(plain(text))


def tidy(text: str) -> str:
    """Return the text on one line and without outer punctuation; .5 keeps its point."""
    text = re.sub(r"\s+", " ", text).rstrip(" .,;:!?\"'。，！？")
    return re.sub(r"^(?:[ ,;:!?\"'。，！？]|\.{2,}|\.(?!\d))+", "", text)


def contains_words(text: str, words: str) -> bool:
    """Return whether normalized `words` are in normalized `text` as whole words and numbers.

    So 3 is not in 3.14, 200 not in 1,200, 5 not in -5.
    """
    if _HAS_NO_SPACES.search(words):
        return words in text
    before, after = r"(?<!\w)", r"(?!\w)"
    if words[:1].isdigit():
        before += r"(?<!\d\.)(?<!(?<!\w)-)" + r"(?<!\d,)" * bool(re.match(r"\d{3}(?!\d)", words))
    if words[-1:].isdigit():
        after += r"(?!\.\d*[1-9])(?!,\d{3}(?!\d))"
    return bool(words) and regex.search(before + regex.escape(words) + after, text) is not None


def says_nothing(text: str) -> bool:
    """Return whether a text is empty or only says that it does not know."""
    text = _CHINESE_REFUSAL.sub(" cannot tell ", plain(text)).replace("。", ". ")
    return re.search(r"\w", REFUSAL.sub(" ", text).replace("but", "")) is None


def parse_choice(text: str, choices: Sequence[str]) -> int | None:
    """Return the place of the one option that an answer names, by its letter or else by its text.

    An option's text may hold that of another one ("top left"). Denials are not searched.
    """
    said, options = plain(text), [normalize(choice) for choice in choices]
    if tidy(said) in options:
        return options.index(tidy(said))
    letters = {letter for found in _LETTER.findall(said) for letter in found if letter}
    if letters:
        place = ord(min(letters)) - ord("a")
        return place if len(letters) == 1 and place < len(options) else None
    if _DENIAL.search(said):
        return None
    named = [option for option in options if contains_words(said, option)]
    longest = max(named, key=len, default="")
    is_one = all(contains_words(longest, option) for option in named)
    return options.index(longest) if named and is_one else None


def _without_thoughts(text: str) -> str:
    text = re.sub(r"<think>.*?</think>", " ", text, flags=re.S).rpartition("</think>")[2]
    return text.partition("<think>")[0]
