"""Templates such as "[IMAGE]\\n[QUESTION]\\n[ANSWER]": cut up once, then filled.

Filling is one pass over the template's own text, so a placeholder in text from the data stays
text. A pair of double brackets is literal: "[[INST]]" means "[INST]".
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stageline.data.rendered import Piece
from stageline.errors import DataError, UserError

_PATTERN = re.compile(r"\[\[([A-Z][A-Z0-9_]*)\]\]|\[([A-Z][A-Z0-9_]*)\]")
# the answer; where a template has none, what it ends with
_TARGETS = ("ANSWER", "CAPTION", "TEXT")
IMAGE = "IMAGE"


@dataclass(frozen=True)
class Part:
    """Literal text of a template, or a slot to fill.

    Attributes:
        text: the literal text; "" for a slot.
        slot: the placeholder's name; "" for text.
        is_target: what fills the slot is learnt.
    """

    text: str = ""
    slot: str = ""
    is_target: bool = False


def parse_template(prompt: str) -> list[Part]:
    """Cuts a template into text and slots.

    Raises:
        UserError: it has no slot to learn, or [ANSWER] twice.
    """
    parts: list[Part] = []
    end = 0
    for match in _PATTERN.finditer(prompt):
        parts.append(Part(text=prompt[end : match.start()]))
        end = match.end()
        parts.append(Part(text=f"[{match[1]}]") if match[1] else Part(slot=match[2]))
    parts.append(Part(text=prompt[end:]))
    target = _target_slot(prompt, [part.slot for part in parts if part.slot])
    return [
        Part(part.text, part.slot, bool(part.slot) and part.slot == target)
        for part in parts
        if part.text or part.slot
    ]


def _target_slot(prompt: str, slots: list[str]) -> str:
    filled = [slot for slot in slots if slot != IMAGE]
    if slots.count("ANSWER") > 1:
        raise UserError(
            f"the template {prompt!r} has [ANSWER] {slots.count('ANSWER')} times. It was expected "
            "once, because it is what the model learns to write: leave one."
        )
    if "ANSWER" in filled:
        return "ANSWER"
    if filled and filled[-1] in _TARGETS and filled.count(filled[-1]) == 1:
        return filled[-1]
    raise UserError(
        f"the template {prompt!r} has nothing to learn. [ANSWER] was expected, or [CAPTION] or "
        f"[TEXT] at its end, because training needs supervised text: add it to the --prompt."
    )


def count_images(parts: list[Part], num_images: int | None) -> list[int]:
    """How many images stand at each [IMAGE] of the template, in order.

    One [IMAGE] stands for all images of a sample; several for one each.

    Args:
        num_images: of the sample; None if it is not known: one for each [IMAGE].
    """
    num_places = sum(part.slot == IMAGE for part in parts)
    if num_places == 1 and num_images is not None:
        return [num_images]
    if num_images == 0:
        return [0] * num_places
    return [1] * num_places


def fill_parts(
    parts: list[Part], sample: Mapping[str, Any], *, for_generation: bool = False
) -> Iterator[Piece]:
    """The pieces of one sample.

    An image place without an image goes, together with one line break after it. Text of the
    template after the answer is learnt too, so that the model gets through it to the end.

    Args:
        for_generation: stop before the answer; spaces before it go too, since tokenizers put a
            space and the word after it into one token.
    """
    counts = iter(count_images(parts, sample.get("num_images")))
    is_after_target = skips_break = False
    for index, part in enumerate(parts):
        if part.is_target and for_generation:
            return
        if part.slot == IMAGE:
            count = next(counts)
            yield from [Piece("", is_image=True)] * count
            skips_break = count == 0
            continue
        text = part.text or slot_value(sample, part.slot)
        if not part.slot:
            text = text.removeprefix("\n") if skips_break else text
            lead = _trailing_spaces(text) if _is_target(parts, index + 1) else ""
            yield Piece(text.removesuffix(lead), is_target=is_after_target)
            if lead and not for_generation:
                yield Piece(lead, is_target=True)
        else:
            yield Piece(text, is_user=True, is_target=part.is_target)
        skips_break = False
        is_after_target = is_after_target or part.is_target


def _is_target(parts: list[Part], index: int) -> bool:
    return index < len(parts) and parts[index].is_target


def _trailing_spaces(text: str) -> str:
    return text[len(text.rstrip(" ")) :]


def slot_value(sample: Mapping[str, Any], slot: str) -> str:
    """The sample's text for a slot; choices become lines "A. ...".

    Raises:
        DataError: the sample has no such field, or it is empty of text.
    """
    value = sample.get(slot.lower())
    if isinstance(value, list | tuple) and slot == "CHOICES":
        return "\n".join(f"{chr(ord('A') + i)}. {choice}" for i, choice in enumerate(value))
    if isinstance(value, str | int | float):
        return str(value)
    name = sample.get("source") or sample.get("id", "?")
    fields = ", ".join(sorted(sample)) or "none"
    raise DataError(
        f"sample {name}: the template's [{slot}] needs text in the field {slot.lower()!r}, which "
        f"{'is missing' if value is None else f'is a {type(value).__name__}'}; the fields are: "
        f"{fields}. Correct the row or the template; [[{slot}]] is the literal text [{slot}]."
    )
