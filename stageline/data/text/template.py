"""Templates such as "[IMAGE]
[QUESTION]
[ANSWER]": cut up once, then filled.

Filling is one pass over the template's own text, so a placeholder in text from the data stays
text. A pair of double brackets is literal: "[[INST]]" means "[INST]".
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any, Literal

from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import DataError, UserError

_PATTERN = re.compile(r"\[\[([A-Z][A-Z0-9_]*)\]\]|\[([A-Z][A-Z0-9_]*)\]")
# the answer; where a template has none, what it ends with
_TARGETS = ("ANSWER", "CAPTION", "TEXT")
IMAGE = "IMAGE"


@dataclass(frozen=True)
class TemplatePart:
    """Literal text of a template, or a slot to fill."""

    text: str = ""  # "" for a slot
    slot: str = ""  # the placeholder's name; "" for text
    is_target: bool = False  # the slot is filled with the answer


def parse_template(prompt: str) -> list[TemplatePart]:
    """Cut a template into text and slots.

    Raises:
        UserError: it has no slot to learn, or [ANSWER] twice.
    """
    parts: list[TemplatePart] = []
    end = 0
    for match in _PATTERN.finditer(prompt):
        parts.append(TemplatePart(text=prompt[end : match.start()]))
        parts.append(TemplatePart(text=f"[{match[1]}]" if match[1] else "", slot=match[2] or ""))
        end = match.end()
    parts.append(TemplatePart(text=prompt[end:]))
    slots = [part.slot for part in parts if part.slot not in ("", IMAGE)]
    target = "ANSWER" if "ANSWER" in slots else slots[-1] if slots else ""
    if target not in _TARGETS or slots.count(target) > 1:
        raise UserError(
            f"the template {prompt!r} needs one place for the answer. Write [ANSWER] once into "
            "the `prompt`, or [CAPTION] or [TEXT] at its end."
        )
    return [
        replace(part, is_target=part.slot == target) for part in parts if part.text or part.slot
    ]


def fill_parts(
    parts: list[TemplatePart], sample: Mapping[str, Any], *, for_generation: bool = False
) -> Iterator[Piece]:
    """Yield the pieces of one sample.

    An image place without an image is removed, with one line break after it. Text of the template
    after the answer is in the loss too, so that the model gets through it to the end. For
    generation spaces before the answer go too: tokenizers put a space and the word after it into
    one token.
    """
    num_images, num_places = sample.get("num_images"), sum(part.slot == IMAGE for part in parts)
    # one [IMAGE] stands for all images of a sample; several for one each
    count = num_images if num_places == 1 and num_images is not None else int(num_images != 0)
    is_after_target = skips_break = False
    for index, part in enumerate(parts):
        if part.is_target and for_generation:
            return
        if part.slot == IMAGE:
            yield from [Piece("", is_image=True)] * count
            skips_break = count == 0
            continue
        text = part.text or slot_value(sample, part.slot)
        if not part.slot:
            text = text.removeprefix("\n") if skips_break else text
            is_lead = index + 1 < len(parts) and parts[index + 1].is_target
            lead = text[len(text.rstrip(" ")) :] if is_lead else ""
            yield Piece(text.removesuffix(lead), is_target=is_after_target)
            if lead and not for_generation:
                yield Piece(lead, is_target=True)
        else:
            yield Piece(text, is_user=True, is_target=part.is_target)
        skips_break = False
        is_after_target = is_after_target or part.is_target


def slot_value(sample: Mapping[str, Any], slot: str) -> str:
    """Return the sample's text for a slot; choices become lines "A. ..."."""
    value = sample.get(slot.lower())
    if isinstance(value, list | tuple) and slot == "CHOICES":
        return "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(value))
    if isinstance(value, str | int | float):
        return str(value)
    state = "is missing" if value is None else f"is a {type(value).__name__}"
    raise DataError(
        f"sample {sample.get('source') or sample.get('id', '?')}: the template's [{slot}] needs "
        f"text in the field {slot.lower()!r}, which {state}; the fields are "
        f"{', '.join(sorted(sample)) or 'none'}. Correct the row, or write [[{slot}]] for the text."
    )


BuiltIn = Literal["directions", "clock", "none"]

_FIRST = "upper lower top bottom front back rear".split()
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
BUILT_IN: dict[str, list[str]] = {
    "directions": [
        *"left right front back rear behind ahead above below under over beneath".split(),
        *"underneath up down top bottom upper lower middle center centre".split(),
        *"forward forwards backward backwards upward upwards downward downwards".split(),
        *"leftward leftwards rightward rightwards leftmost rightmost".split(),
        *"north south east west northeast northwest southeast southwest".split(),
        *(f"{first} {side}" for first in _FIRST for side in ("left", "right")),
        *(f"{side} {first}" for first in _FIRST for side in ("left", "right")),
        *(f"{ns} {ew}" for ns in ("north", "south") for ew in ("east", "west")),
        "in front",
    ],
    "clock": [
        f"{number} {hour}"
        for number in [*map(str, range(1, 13)), *(f"0{n}" for n in range(1, 10)), *_NUMBERS]
        for hour in ("o'clock", "oclock", "o clock")
    ],
    "none": [],
}

# scripts that write no space between words, or hang endings on them: no boundary is asked there
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"  # kana, Han, Hangul
    "\U00020000-\U0003ffff"  # further Han
)
# A letter of a word in a script with spaces. The group turns off IGNORECASE, with which `re` would
# fold the case of 175,000 letters.
_SPACED_LETTER = rf"(?-i:[^\W{_UNSPACED}])"
_APOSTROPHES = "['\u2018\u2019\u02bc\uff07]"
_GAP = r"[\s\-\u2010-\u2013]+"


class MarkedWords:
    """A list of words and phrases.

    Letters match in either case. A space or hyphen in a phrase matches any run of spaces and
    hyphens, so "upper left" finds "upper-left". A word that begins or ends with a letter of a
    script with spaces has to be a whole word there; a Chinese one is found anywhere.

    Args:
        words: a name of `BUILT_IN`, or words; names among them stand for their lists.
    """

    def __init__(self, words: BuiltIn | Sequence[str]) -> None:
        given = [words] if isinstance(words, str) else list(words)
        self.words = [word for name in given for word in BUILT_IN.get(name, [name])]
        for word in self.words:
            if not any(character.isalnum() for character in word):
                raise UserError(
                    f"`collate_fn.marked` has the word {word!r}. Give words with a letter or a "
                    f"digit, or {', '.join(BUILT_IN)}."
                )
        longest_first = sorted(set(self.words), key=lambda word: (-len(word), word))
        self._pattern = re.compile("|".join(map(_pattern, longest_first)) or "(?!)", re.IGNORECASE)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the character spans of all matches, from left to right; none overlaps another."""
        return (match.span() for match in self._pattern.finditer(text))

    def mark(self, rendered: Rendered) -> Rendered:
        """Return the same text; matches in the answer are pieces of their own, and marked.

        Neighbouring pieces in the loss are read as one text, so a match may cross from one to the
        next, never from the prompt into the answer.
        """
        matches: list[tuple[int, int]] = []
        for is_target, group in groupby(rendered.spans(), key=lambda span: span[2].is_target):
            run = list(group)
            if is_target:
                text, start = "".join(piece.text for _, _, piece in run), run[0][0]
                matches += [(start + first, start + last) for first, last in self.spans(text)]
        if not matches:
            return rendered
        borders = sorted({border for match in matches for border in match})
        pieces = []
        for start, end, piece in rendered.spans():
            for first, last in pairwise([start, *(b for b in borders if start < b < end), end]):
                is_marked = first < last and any(low <= first < high for low, high in matches)
                text = piece.text[first - start : last - start]
                pieces.append(replace(piece, text=text, is_marked=is_marked))
        return rendered.with_pieces(pieces)


def _pattern(word: str) -> str:
    """Return one word as a pattern, with boundaries where its own edge has them."""
    parts = [part for part in re.split(_GAP, word) if part]
    body = re.sub(_APOSTROPHES, _APOSTROPHES, _GAP.join(map(re.escape, parts)))
    before = f"(?<!{_SPACED_LETTER})" if re.match(_SPACED_LETTER, parts[0]) else ""
    if parts[0][0].isdigit():  # 1.3 o'clock and 12:3 o'clock are no 3 o'clock
        before += r"(?<!\d[.,:])"
    after = f"(?!{_SPACED_LETTER})" if re.match(_SPACED_LETTER, parts[-1][-1]) else ""
    return before + body + after
