"""Takes out what a text says not to be the case: "not left but right" leaves right (rule 8)."""

import re

_STOP = r"(?=[,.;:!?\n]|\bbut\b|\bit(?:'s| is)\b|\bhowever\b|\bit must\b|$)"
_LONG_STOP = r"(?=[.;!?\n]|\bbut\b|\bit(?:'s| is)\b|\bhowever\b|$)"
_CLAUSE = r"(?:(?<=[,.;:!?\n])|^|\bbut\b|\band\b)[^,.;:!?\n]*?"
_RULES = tuple(
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
    """Leaves of a cleaned text what it does not deny."""
    for rule in _RULES:
        text = rule.sub(" ", text)
    return text
