"""Costs without running anything: exact bytes of weights and their state, rough activations.

For the check at the start of a run: no seconds, and activations rather too small than too large, so
that nothing is refused that would have fitted. `measure` knows better.
"""

from dataclasses import replace

from stageline.pipeline.cost import Cost, ModelCosts
from stageline.pipeline.outline import Outline

BYTES_OF_SCORES = 4  # the loss is computed in float32


def estimate(outline: Outline, *, shape: tuple[int, int]) -> ModelCosts:
    """The costs for micro-batches of `shape` (rows, tokens)."""
    rows, tokens = shape
    example = outline.example
    border = example.border(rows, tokens)
    # weights and hidden states have one type: bytes of an element of either
    item_size = _item_size(outline)
    last_item = outline.num_layers + 1
    saved_last = rows * tokens * example.last_width * BYTES_OF_SCORES
    layers = tuple(
        replace(facts, saved=border + rows * tokens * width * item_size)
        if outline.computes(index + 1)
        else facts
        for index, (facts, width) in enumerate(zip(outline.layers, example.widths, strict=True))
    )
    return ModelCosts(
        overhead=Cost(),
        first=outline.first,
        layers=layers,
        last=replace(outline.last, saved=saved_last if outline.computes(last_item) else 0),
        tied=outline.tied,
        border=border,
        batch=0,
        shape=shape,
        is_measured=False,
        front=outline.front,
    )


def _item_size(outline: Outline) -> int:
    total = sum((*outline.layers, outline.first), Cost())
    return max(1, total.weights // max(1, total.num_parameters))
