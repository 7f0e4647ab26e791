"""Cleans a model's text and says where in it the answer is looked for, most telling place first."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import TypeVar

from stageline.data.answers.chinese import to_english

Said = TypeVar("Said")

MOST = 4000  # characters that are read of an answer, half of them from its end
SHORT = 4  # words of a first or last sentence that is an answer by itself

_QUOTES = str.maketrans(
    {**dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'"), "º": "°", "\u00bd": " half "}
)
_QUOTES |= str.maketrans(dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d", '"'))
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)|\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}", re.S)
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\s*\{([^{}]*)\}")
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
_HAS_NO_SPACES = re.compile(r"[\u4e00-\u9fff]")
_REASON = re.compile(r"\b(?:because|since|given that|due to)\b[^.;!?\n]*")
_QUESTION = re.compile(r"(?:^|(?<=[.!?;\n]))[^.!?;\n]*\?+")
_CANNOT = (
    r"(?:cannot|can't|can not|couldn't|could not|unable to|not able to|impossible to|hard to|"
    r"difficult to|not possible to|don't|do not)"
)
_REFUSAL = re.compile(
    r"(?:\b(?:it|this|that|i|we)(?:'s|'m| is| am| are)?\s+)?"
    rf"(?:\b{_CANNOT}\s+(?:\w+ly\s+)?(?:determine|tell|say|see|know|answer|identify|be determined|"
    r"be sure|decide|assist|help|provide|view|process|judge)\b|"
    r"\b(?:not|isn't|aren't) (?:sure|certain|clear|visible|enough)\b|\bas an ai\b|\bunsure\b|"
    r"\bunclear\b|\bi refuse\b|\bundetermined\b|\bno idea\b|\bunknown\b)[^,.;!?\n]*"
)


def plain(text: str) -> str:
    """Lower case, plain quotes and widths, no markup; lines are kept.

    What a model thought aloud is left out; a thought without an end says nothing.
    """
    text = unicodedata.normalize("NFKC", _without_thoughts(text.translate(_QUOTES)))
    if "\\" in text:
        text = _LATEX_TEXT.sub(r"\1", text.replace("$", " "))
    text = _TAGGED.sub(lambda found: f"\nanswer is {found[1] or found[2]}\n", text).lower()
    text = re.sub(r"[*_]+|^#+", " ", text, flags=re.M)
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r" ?\n[ \n]*", "\n", text).strip()


def clean(text: str) -> str:
    """`plain` with the Chinese words of answers in English, and "[b]" as "(b)"."""
    text = re.sub(r"\[([a-z])\]", r"(\1)", to_english(plain(text)))
    return re.sub(r"[^\S\n]+", " ", text).strip()


def normalize(text: str) -> str:
    """`plain` on one line and without outer punctuation."""
    return tidy(plain(text))


def tidy(text: str) -> str:
    """On one line and without outer punctuation."""
    return re.sub(r"\s+", " ", text).strip(" .,;:!?\"'。，！？")


def contains_words(text: str, words: str) -> bool:
    """Whether normalized `words` stand in normalized `text` as whole words."""
    if _HAS_NO_SPACES.search(words):
        return words in text
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def says_nothing(text: str) -> bool:
    """Whether a text is empty or only says that it does not know."""
    return re.search(r"\w", _REFUSAL.sub(" ", clean(text)).replace("but", "")) is None


def without_question(text: str, question: str | None) -> str:
    """The cleaned text without the question that it begins with, said again word by word.

    Of a very long text the beginning and the end are kept.
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
    """What the first telling place of a cleaned text says (rules 3 to 7).

    Args:
        read: a place -> what it says, or None.
        is_verdict: it reads yes and no: then "no" corrects nothing, and `read` itself knows what
            the first and the last word count.
    """
    text = _without_questions(text)
    for rest in _marked(text, is_verdict):
        for place in (first_segment(rest), rest):
            said = read(without_refusals(place))
            if said is not None:
                return said
        if _REFUSAL.search(rest):
            return None  # "left... actually, I can't tell"
    text = _REASON.sub(" ", without_refusals(text))
    found = [] if is_verdict else [said for said in map(read, _ends(text)) if said is not None]
    if found:
        return found[0] if all(said == found[0] for said in found) else None
    return read(text)


def _ends(text: str) -> list[str]:
    """The first and the last sentence, where they are short."""
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if re.search(r"\w", part)]
    return [part for part in sentences[:1] + sentences[1:][-1:] if len(part.split()) <= SHORT]


def first_segment(text: str) -> str:
    """Up to the end of the first sentence or line, or to "because"."""
    return _SEGMENT_END.split(text.lstrip(" \n:"), maxsplit=1)[0]


def without_refusals(text: str) -> str:
    """Takes out "I can't tell whether ...", up to the next comma."""
    return _REFUSAL.sub(" ", text)


def _marked(text: str, is_verdict: bool) -> Iterator[str]:
    """What follows "the answer is" or "actually", the last one first; then "therefore"."""
    strong = [*_ANSWER.finditer(text), *_CORRECTION.finditer(text)]
    strong += [] if is_verdict else _NO_FIRST.finditer(text)
    places = sorted((found.end() for found in strong if _is_meant(text, found)), reverse=True)
    places += [found.end() for found in [*_CONCLUSION.finditer(text)][-1:]]
    for place in places:
        if re.search(r"\w", text[place:]):
            yield text[place:]


def _is_meant(text: str, found: re.Match[str]) -> bool:
    """Whether it isn't denied: "I don't think the answer is ..."."""
    return found.re is not _ANSWER or not _NEGATED_BEFORE.search(text[: found.start()])


def _without_questions(text: str) -> str:
    rest = _QUESTION.sub(" ", text)
    return rest if re.search(r"\w", rest) else text


def _without_thoughts(text: str) -> str:
    text = re.sub(r"<think>.*?</think>", " ", text, flags=re.S)
    text = text.rpartition("</think>")[2]
    return text.partition("<think>")[0]
