"""Reads yes or no, true or false (rules 10 to 13)."""

import re

from stageline.data.answers.text import (
    clean,
    contains_words,
    read_answer,
    tidy,
    without_question,
    without_refusals,
)

_YES = (
    r"(?:true|yes|correct|accurate|yep|yeah|yup|affirmative|indeed|certainly|absolutely|definitely|"
    r"of course|right)"
)
_NO = r"(?:false|no|incorrect|inaccurate|untrue|wrong|nope|negative|nah|the opposite)"
_NEGATION = r"(?:not|never|hardly)"
_BETWEEN = r"(?:(?:at all|really|quite|entirely|completely|exactly|actually|necessarily|a|the)\s+)*"
# "not true", "isn't really correct", "not at all accurate"
_VERDICT = re.compile(
    rf"(?P<negation>(?:\b{_NEGATION}|n't|cannot)\s+(?:be\s+)?)?{_BETWEEN}\b(?P<verdict>{_YES}|{_NO})\b"
    r"(?P<denied>\s+not\b)?"
)
_NOT_THE_CASE = re.compile(r"\b(?:is|'s)(?P<negation> not|n't) the case\b|\bis the case\b")
# words that are verdicts only when they stand at the beginning, or alone
_LEADING = re.compile(
    r"no|right|wrong|negative|indeed|certainly|absolutely|definitely|of course|the opposite"
)
_BOTH = re.compile(
    r"\b(?:true|yes|correct)\s*(?:or|and|/|nor)\s*(?:false|no|incorrect|not)\b|"
    r"\b(?:false|no|incorrect)\s*(?:or|and|/|nor)\s*(?:true|yes|correct)\b|"
    r"^\W*yes\W+no\W*$|^\W*no\W+yes\W*$"
)
_IS_RIGHT = re.compile(
    r"\b((?:that|this|it|you|statement|caption)(?:'s|'re| is| are)(?: not|n't)?) right\b"
    r"(?=[.,;!]|$)"
)
_THINK_SO = re.compile(r"\bi (?:do(?P<negation>n't| not) )?(?:think|believe) so\b")
_NO_DOUBT = re.compile(r"\bno doubt\b|\bwithout (?:a )?doubt\b|\bno (?:problem|question)\b")
_ALONE = {"1": True, "0": False, "y": True, "n": False, "t": True, "f": False}
_SHORT = re.compile(
    r"(?:(?:it|they|he|she|this|that|there|the [\w-]+|this [\w-]+)\s+)?"
    r"(?:is|are|does|do|was|were|has|have|can|did)(?P<negation>\s*not|n't)?"
)
_NOT_ONLY = re.compile(r"not(?: at all| really| quite| exactly)?")


def parse_truth(
    text: str, *, statement: str | None = None, question: str | None = None
) -> bool | None:
    """What an answer says about a statement: true or false.

    A verdict at the beginning counts, else the last one: "It looks true, but it is false".
    "Not" turns a verdict round. Without a verdict, the statement said again counts as true, and
    with a "not" in it as false.

    Args:
        statement: what was asked about.
        question: left out where the answer begins with it.
    """
    said = without_question(text, question)
    found = read_answer(said, _read, is_verdict=True)
    if found is not None or statement is None:
        return found
    return _compare_statement(tidy(without_refusals(said)), tidy(clean(statement)))


def _read(place: str) -> bool | None:
    place = _THINK_SO.sub(lambda found: "no" if found["negation"] else "yes", place)
    words = _IS_RIGHT.sub(r"\1 correct", _NO_DOUBT.sub(" ", _BOTH.sub(" ", place)))
    words = re.sub(r"\s+", " ", words).strip(" .,;:!?\"'()-")
    if words in _ALONE:
        return _ALONE[words]
    if _NOT_ONLY.fullmatch(words):
        return False
    short = _SHORT.fullmatch(words)
    if short:
        return short["negation"] is None
    case = _NOT_THE_CASE.search(words)
    if case:
        return case["negation"] is None
    return _verdict(words)


def _verdict(words: str) -> bool | None:
    found = list(_VERDICT.finditer(words))
    if not found:
        return None
    starts = not re.search(r"\w", words[: found[0].start()])
    if not starts:
        found = [item for item in found if not _LEADING.fullmatch(item["verdict"])] or found
        found = [item for item in found if item["verdict"] != "right" or item["negation"]]
    if not found:
        return None
    verdict = found[0] if starts else found[-1]
    if starts and _contradicts(verdict, words):
        return None
    return _is_yes(verdict)


def _is_yes(verdict: re.Match[str]) -> bool:
    is_yes = re.fullmatch(_YES, verdict["verdict"]) is not None
    return is_yes != (verdict["negation"] is not None or verdict["denied"] is not None)


def _contradicts(first: re.Match[str], words: str) -> bool:
    """Whether a later verdict on the statement says the other: "yes, the claim is false"."""
    later = re.search(
        r"\b(?:statement|caption|claim|sentence|description)\s+is(?P<rest>n't.*|\s.*)", words
    )
    if later is None or first["verdict"] not in ("yes", "no"):
        return False
    verdict = _VERDICT.search(f"is{later['rest']}")
    return verdict is not None and _is_yes(verdict) != _is_yes(first)


def _compare_statement(answer: str, statement: str) -> bool | None:
    plain, num_negations = re.subn(r"\s*(?:\bnot\b|n't\b)", "", answer)
    if contains_words(plain, statement):
        return num_negations % 2 == 0
    return None
