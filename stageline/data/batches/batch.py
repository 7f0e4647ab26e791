"""From samples to one micro-batch: render, tokenize, limit the length, pad, add image inputs.

What the `sft` collate part and the model parts of inference share. Knows no register.
Shapes: B samples, T tokens of the longest one.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy
import torch

from stageline.contracts import IGNORE, ROW_LENGTHS, broken, call, mismatch, shown
from stageline.data.images.images import ImageExpander, by_rows, expand_images, image_size
from stageline.data.text.encode import Encoded, encode_rendered
from stageline.data.text.processor import get_image_token
from stageline.data.text.rendered import Piece, Rendered
from stageline.data.text.template import TemplatePart, fill_parts

Sample = dict[str, Any]
Images = Sequence[Any] | None
MicroBatch = dict[str, torch.Tensor]
NO_SAMPLE = -1
# These values are computed from the token ids and stored with them; new ids need new values.
READ_OFF_IDS = (ROW_LENGTHS, "position_ids")
_EMPTY_ROW = 2  # one token has no next one to predict, which not every loss allows for


def sample_name(sample: Sample) -> str:
    """Return the name of a sample in errors: its source (file and line) and its id."""
    name = f"sample {sample.get('id', '?')}"
    return f"{sample['source']}: {name}" if sample.get("source") else name


def render_sample(
    images: Images,
    sample: Sample,
    *,
    prompt: str,
    prompt_fn: Callable[..., Any],
    image_token: Callable[..., Any],
    processor: Any,
    for_generation: bool = False,
) -> Rendered:
    """Fill the template and put the model's image text where the images belong.

    The prompt_fn finds the number of images in `sample["num_images"]`. Parts that handle strings,
    `prompt_fn(sample, prompt)` and `image_token(prompt, images)`, are taken too: the latter then
    changes the template before it is filled.
    """
    counted = {**sample, "num_images": len(images or ())}
    given = {"processor": processor, "for_generation": for_generation}
    if mismatch(prompt_fn, counted, prompt, **given) and not mismatch(prompt_fn, counted, prompt):
        given = {}
    is_on_text = mismatch(image_token, prompt, images, processor=processor)
    if is_on_text and not mismatch(image_token, prompt, images):
        prompt, image_token = image_token(prompt, list(images or ())), _image_places
    rendered: Any = call("prompt_fn", prompt_fn, counted, prompt, **given)
    if isinstance(rendered, str):
        rendered = _pieces_of_text(
            rendered,
            counted,
            lambda marked: prompt_fn(marked, prompt, **given),
            for_generation=for_generation,
        )
    _check_rendered("prompt_fn", prompt_fn, rendered)
    placed = call("image_token", image_token, rendered, images, processor=processor)
    if placed is not rendered:
        _check_rendered("image_token", image_token, placed)
    return replace(placed, name=sample_name(sample))


def _image_places(rendered: Rendered, images: Images, *, processor: Any) -> Rendered:
    """Make image tokens in the text of a template, not of the data, the places of images."""
    token = get_image_token(processor) if images and processor is not None else None
    if token is None:
        return rendered
    pieces = []
    for piece in rendered:
        is_own = piece.is_user or piece.is_image
        parts = [piece.text] if is_own else re.split(f"({re.escape(token)})", piece.text)
        is_image = [piece.is_image or (not is_own and part == token) for part in parts]
        pieces += [
            replace(piece, text=part, is_image=is_it)
            for part, is_it in zip(parts, is_image, strict=True)
        ]
    return rendered.with_pieces(pieces)


def _pieces_of_text(
    text: str, sample: Sample, fill: Callable[[Sample], str], *, for_generation: bool
) -> Rendered | str:
    """Return the string of a prompt_fn as pieces; or as it is, where the answer is not found.

    The part runs again with marks in place of the sample's texts: so the pieces are known by their
    origin, and no text is searched for. A part that does more than place its texts is asked for
    the answer only. The answer is added to a string that has none.
    """
    texts = {name: value for name, value in sample.items() if isinstance(value, str) and value}
    for names in (list(texts), ["answer"] if "answer" in texts else []):
        marks = {f"\ue000{number}\ue001": name for number, name in enumerate(names)}
        try:
            marked = fill({**sample, **{name: mark for mark, name in marks.items()}})
        except Exception:  # it reads a choice or a number from a text
            continue
        parts = [
            TemplatePart(slot=marks[part].upper(), is_target=marks[part] == "answer")
            if part in marks
            else TemplatePart(text=part)
            for part in re.split("(\ue000\\d+\ue001)", marked)
            if part
        ]
        values = {name.lower(): value for name, value in texts.items()}
        if "".join(values[part.slot.lower()] if part.slot else part.text for part in parts) != text:
            continue
        if "answer" in texts and not any(part.is_target for part in parts):
            parts.append(TemplatePart(slot="ANSWER", is_target=True))
        if for_generation or "answer" in texts:
            pieces = fill_parts(parts, values, for_generation=for_generation)
            return Rendered(tuple(pieces), for_generation=for_generation)
    return text


def _check_rendered(register: str, part: Callable[..., Any], found: object) -> None:
    pieces: Sequence[object] = found.pieces if isinstance(found, Rendered) else ()
    wrong = [piece for piece in pieces if not isinstance(piece, Piece)]
    if not isinstance(found, Rendered) or wrong:
        raise broken(
            register,
            part,
            f"returned {'a Rendered that holds ' if wrong else ''}{shown((wrong or [found])[0])}",
            why="A Rendered marks the answer and the text from the data",
            cure="return Rendered((Piece(question, is_user=True), Piece(answer, is_target=True))) "
            "of stageline.data.text.rendered, or what `prompt_fn` fill makes",
        )


def encode_sample(rendered: Rendered, images: Images, *, processor: Any, name: str) -> Encoded:
    """Return token ids of a rendered sample, image tokens written out; decodes no pixels."""
    return encode_rendered(expand_images(rendered, images, processor, name=name), processor)


def row_width(longest: int, *, multiple_of: int = 1, max_width: int | None = None) -> int:
    """Return the width of rows: the longest, rounded up to a multiple within `max_width`.

    Kernels are fastest at multiples of 8 to 128, and few widths make few compiled versions.
    """
    rounded = -(-longest // multiple_of) * multiple_of
    return rounded if max_width is None else max(longest, min(rounded, max_width))


def pad_rows(
    rows: Sequence[Encoded],
    *,
    pad_token_id: int,
    side: Literal["right", "left"] = "right",
    with_labels: bool = True,
    multiple_of: int = 1,
    min_width: int = 1,
    max_width: int | None = None,
) -> MicroBatch:
    """Return input_ids, attention_mask and labels, each [B, T] long, of a `row_width`."""
    longest = max(min_width, *map(len, rows))
    width = row_width(longest, multiple_of=multiple_of, max_width=max_width)
    shape = (len(rows), width)
    ids_BT = torch.full(shape, pad_token_id, dtype=torch.long)
    mask_BT = torch.zeros(shape, dtype=torch.long)
    labels_BT = torch.full(shape, IGNORE, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        row_ids = torch.tensor(row.input_ids, dtype=torch.long)
        ids_BT[index, place] = row_ids
        mask_BT[index, place] = 1
        is_target = torch.tensor(row.is_target, dtype=torch.bool)
        labels_BT[index, place] = torch.where(is_target, row_ids, IGNORE)
    batch = {"input_ids": ids_BT, "attention_mask": mask_BT}
    return {**batch, "labels": labels_BT} if with_labels else batch


def add_image_inputs(
    batch: MicroBatch,
    images: Sequence[Images],
    *,
    processor: Any,
    names: Sequence[str],
    with_pixels: bool,
) -> None:
    """Add a model's inputs besides token ids, in place; `images` and `names` are of each row.

    Images are decoded with `with_pixels`; only the first stage needs that.
    """
    expander = ImageExpander.of(processor)
    if expander is None:
        return
    batch.update(expander.token_types(batch["input_ids"]))
    sizes = [image_size(image) for row in images for image in row or ()]
    batch.update(expander.side_inputs(sizes))
    if with_pixels:
        pixels = expander.decode_pixels([row or () for row in images], names)
        for key, value in pixels.items():
            # the other ranks believe the sizes: make sure that they may
            is_same = key not in batch or torch.equal(batch[key], value)
            assert is_same, f"{key} depends on pixels, not on sizes alone"
        batch.update(pixels)
    if expander.lies_in_rows:
        counts = [len(row or ()) for row in images]
        batch.update(by_rows(batch, counts, processor=processor))


def pack_rows(rows: Sequence[Sequence[Encoded]], **widths: Any) -> MicroBatch:
    """Return input_ids, attention_mask, labels, position_ids and sample_ids, each [B, T] long.

    The samples of a row follow each other and none sees another: positions restart at each, and
    each stage builds its block-diagonal mask from them. `sample_ids` counts the samples of a row,
    -1 is padding; their presence tells a stage that the batch is packed. Padding has position 0
    throughout: each such token is a sample of its own. `widths` are as for `pad_rows`.
    """
    joined = []
    for row in rows:
        parts: list[Any] = [(sample.input_ids, sample.is_target) for sample in row] or [([], [])]
        ids, targets = (numpy.concatenate(part) for part in zip(*parts, strict=True))
        joined.append(Encoded(ids, targets, []))  # type: ignore[arg-type]  # arrays, not lists
    batch = pad_rows(joined, min_width=_EMPTY_ROW, **widths)
    labels_BT = batch["labels"]
    positions_BT = torch.zeros_like(labels_BT)
    samples_BT = torch.full_like(labels_BT, NO_SAMPLE)
    for index, row in enumerate(rows):
        end = 0
        for number, sample in enumerate(row):
            place, end = slice(end, end + len(sample)), end + len(sample)
            labels_BT[index, place.start] = IGNORE  # the token before it is of another sample
            positions_BT[index, place] = torch.arange(len(sample))
            samples_BT[index, place] = number
    return {**batch, "position_ids": positions_BT, "sample_ids": samples_BT}


def count_samples(micro_batch: MicroBatch) -> int:
    """Count samples with a label: rows, pairs of them, or the samples in packed ones."""
    is_target_BT = micro_batch["labels"] != IGNORE
    if "loss_pairs" in micro_batch or "loss_margins" in micro_batch:
        is_target_BT = is_target_BT[::2]
    if "sample_ids" not in micro_batch:
        return int(is_target_BT.any(dim=1).sum())
    samples_BT = micro_batch["sample_ids"]
    rows_BT = torch.arange(len(samples_BT), device=samples_BT.device)[:, None].expand_as(samples_BT)
    pairs = torch.stack((rows_BT[is_target_BT], samples_BT[is_target_BT]))
    return pairs.unique(dim=1).shape[1]
