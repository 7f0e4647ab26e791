"""Puts the hidden texts of a conversation back where a template wrote their sentinels.

What comes out is the text that the template writes for the conversation itself, character by
character; each text may be trimmed there, or escaped as in JSON.
"""

import json
from collections.abc import Iterator, Sequence

from stageline.data.chat_layout import Layout, Segment
from stageline.data.chat_masking import Slot
from stageline.data.rendered import Piece


def fill(layout: Layout, slots: Sequence[Slot], official: str) -> list[Piece] | None:
    """The pieces of a conversation; None where the layout is not that of `official`."""
    texts = _likely(layout.segments, slots, official)
    if texts is None:
        texts = _match(layout.segments, slots, official)
    if texts is None:
        return None
    pieces = [
        Piece(
            text,
            is_user=part.slot >= 0,
            is_target=part.is_target,
            is_image=part.is_image,
            is_answer=part.slot >= 0 and slots[part.slot].is_answer,
        )
        for part, text in zip(layout.segments, texts, strict=True)
    ]
    if layout.end:
        _add_end(pieces, layout.end)
    return [piece for piece in pieces if piece.text or piece.is_image]


def _likely(segments: Sequence[Segment], slots: Sequence[Slot], official: str) -> list[str] | None:
    """The texts as they are, or all of them trimmed; nearly all templates do one of the two."""
    texts = [slots[part.slot].text if part.slot >= 0 else part.text for part in segments]
    if "".join(texts) == official:
        return texts
    pairs = zip(segments, texts, strict=True)
    texts = [text.strip() if part.slot >= 0 else text for part, text in pairs]
    return texts if "".join(texts) == official else None


def _match(
    segments: Sequence[Segment], slots: Sequence[Slot], official: str
) -> list[str] | None:  # fmt: skip
    """The text of each segment, so that together they are the official one."""
    chosen: list[str] = []
    ends = [0]
    tries = [_choices(segments[0], slots, official, 0)]
    budget = 1000 + 20 * len(segments)
    while tries and budget:
        budget -= 1
        text = next(tries[-1], None)
        if text is None:
            tries.pop()
            ends.pop()
            if chosen:
                chosen.pop()
            continue
        end = ends[-1] + len(text)
        if len(chosen) + 1 < len(segments):
            chosen.append(text)
            ends.append(end)
            tries.append(_choices(segments[len(chosen)], slots, official, end))
        elif end == len(official):
            return [*chosen, text]
    return None


def _choices(
    segment: Segment, slots: Sequence[Slot], official: str, start: int
) -> Iterator[str]:  # fmt: skip
    """The ways to write a segment that fit there, the likeliest first."""
    texts = [segment.text] if segment.slot < 0 else _ways(slots[segment.slot].text)
    return (text for text in texts if official.startswith(text, start))


def _ways(text: str) -> Iterator[str]:
    seen = set()
    for cut in (text, text.strip(), text.strip("\n"), text.rstrip(), text.lstrip(),
                text.rstrip("\n"), text.lstrip("\n")):  # fmt: skip
        if cut not in seen:
            seen.add(cut)
            yield cut
    for cut in (text, text.strip()):
        for is_ascii in (False, True):
            escaped = json.dumps(cut, ensure_ascii=is_ascii)[1:-1]
            twice = json.dumps(escaped, ensure_ascii=is_ascii)[1:-1]
            for way in (escaped, twice):
                if way not in seen:
                    seen.add(way)
                    yield way


def _add_end(pieces: list[Piece], end: str) -> None:
    """Adds a supervised end behind the last piece that is learnt, for blanks behind it if any."""
    last = max(place for place, piece in enumerate(pieces) if piece.is_target)
    if not "".join(piece.text for piece in pieces[last + 1 :]).strip():
        del pieces[last + 1 :]
    pieces.insert(last + 1, Piece(end, is_target=True))
