"""Scores rows: log-probabilities of their last tokens, by a model here or by a decoding engine.

Shapes: B rows of a forward, T tokens of the longest one.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stageline.data.batch import add_image_inputs, pad_rows
from stageline.data.encode import Encoded
from stageline.data.processor import get_pad_token_id
from stageline.inference.decoding.request import Failed, ScoreRequest
from stageline.inference.generation import batch_together
from stageline.inference.likelihood import ScoredRow


@dataclass(frozen=True)
class RowScore:
    """What a row's targets have.

    Attributes:
        logprobs: natural logarithms, one a target.
        is_greedy: whether each target was the likeliest token in its place.
    """

    logprobs: tuple[float, ...]
    is_greedy: bool


Scores = Iterator[tuple[int, RowScore | Exception]]


def score_rows(
    model: Any, processor: Any, rows: Sequence[ScoredRow], *, num_together: int
) -> Scores:
    """Scores each row.

    Args:
        model: a model, or a decoding engine, which orders and batches rows itself.
        num_together: rows of one forward of a model.

    Yields:
        (place of the row, its score, or why it has none), in any order.
    """
    if not isinstance(model, torch.nn.Module):
        yield from _by_engine(model, processor, rows)
        return
    for places in _batches(rows, processor, num_together):
        scores = _forward(model, processor, [rows[place] for place in places])
        yield from zip(places, scores, strict=True)


def longest_row(model: Any) -> int | None:
    """So many tokens the model reads at most; None where it does not say."""
    if not isinstance(model, torch.nn.Module):
        # vLLM makes one token more than it scores
        return getattr(model, "max_scored", model.max_length)
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None)


def _batches(rows: Sequence[ScoredRow], processor: Any, num_together: int) -> Iterator[list[int]]:
    """Rows of like length together, the longest first: if memory is short it shows at once."""
    for group in batch_together([row.images for row in rows], processor=processor):
        by_length = sorted(group, key=lambda place: -len(rows[place].input_ids))
        for start in range(0, len(by_length), num_together):
            yield by_length[start : start + num_together]


@torch.no_grad()
def _forward(model: torch.nn.Module, processor: Any, rows: Sequence[ScoredRow]) -> list[RowScore]:
    """One forward of rows that are padded on the right, where no token sees the padding."""
    batch = encode_rows(rows, processor, side="right", without_last=True)
    device = model.get_input_embeddings().weight.device
    inputs = {
        name: value.to(device, model.dtype if value.is_floating_point() else None)
        for name, value in batch.items()
    }
    lengths = [len(row.input_ids) - 1 for row in rows]
    starts = [length - row.num_targets for length, row in zip(lengths, rows, strict=True)]
    first = min(starts)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        # the head is applied to places that are asked for alone: vocabularies are large
        inputs["logits_to_keep"] = torch.arange(first, max(lengths), device=device)
    logits_BTV = model(**inputs, use_cache=False).logits
    if logits_BTV.shape[1] != max(lengths) - first:  # it gave all of them
        logits_BTV = logits_BTV[:, first:]
    return [
        _score(logits_BTV[index, start - first : length - first], row)
        for index, (row, start, length) in enumerate(zip(rows, starts, lengths, strict=True))
    ]


def _score(logits_NV: torch.Tensor, row: ScoredRow) -> RowScore:
    """Scores N targets by the logits of the places before them, in float32 at least."""
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    logprobs_NV = torch.log_softmax(logits_NV.to(wide), dim=-1)
    targets_N = torch.tensor(row.input_ids[-row.num_targets :], device=logits_NV.device)
    found_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
    is_greedy = bool((logprobs_NV.argmax(-1) == targets_N).all())
    return RowScore(tuple(found_N.tolist()), is_greedy)


def encode_rows(
    rows: Sequence[ScoredRow], processor: Any, *, side: Any, without_last: bool
) -> dict[str, torch.Tensor]:
    """Ids and mask [B, T] with pixels.

    Args:
        without_last: leave out the last token, which only is to be foretold.
    """
    lists = [row.input_ids[:-1] if without_last else row.input_ids for row in rows]
    encoded = [Encoded(ids, [False] * len(ids), [False] * len(ids)) for ids in lists]
    pad_token_id = get_pad_token_id(processor)
    batch = pad_rows(encoded, pad_token_id=pad_token_id, side=side, with_labels=False)
    images, names = [row.images for row in rows], [row.name for row in rows]
    add_image_inputs(batch, images, processor=processor, names=names, with_pixels=True)
    return batch


def _by_engine(engine: Any, processor: Any, rows: Sequence[ScoredRow]) -> Scores:
    requests = (
        ScoreRequest(
            str(place),
            encode_rows([row], processor, side="left", without_last=False),
            row.num_targets,
        )
        for place, row in enumerate(rows)
    )
    for found in engine.score(requests):
        if isinstance(found, Failed):
            yield int(found.key), found.error
        else:
            yield int(found.key), RowScore(tuple(found.logprobs), found.is_greedy)
