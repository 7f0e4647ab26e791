"""Micro-batches for a check: random token ids of several lengths, and changed copies of a batch.

Made of seeds alone, so that every rank makes the same. Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from stageline.data.batches.batch import IGNORE
from stageline.data.images.images import CROSS_MASK, grow_cross_mask
from stageline.pipeline.plan import Kind
from stageline.pipeline.stage_passes import (
    MicroBatch,
    StagePasses,
    Tensors,
    batch_input,
    batch_output,
    model_inputs,
)

if TYPE_CHECKING:
    from stageline.stages.base import StageModel

LENGTHS = (14, 11, 19, 12, 17)
ROWS = 2
PADDED = 3  # tokens of padding at the end of the last row
IMAGE_WORDS = ("image", "video", "vision", "audio")


def special_ids(config: PretrainedConfig, words: Iterable[str] = ("",)) -> set[int]:
    """Token ids that the config names, such as `image_token_id`.

    Args:
        words: only those whose name has one of them in it.
    """
    found: set[int] = set()
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in part.to_dict().items():
            is_id = name.endswith(("_token_id", "_token_index"))
            if is_id and any(word in name for word in words):
                values = value if isinstance(value, list) else [value]
                found.update(item for item in values if isinstance(item, int))
    return found


def random_batches(
    config: PretrainedConfig, *, num_micro_batches: int, seed: int
) -> list[MicroBatch]:
    """Micro-batches of random ids, each of another length; the last row of each is padded."""
    text = config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(seed)
    special = special_ids(config)
    ordinary = [i for i in range(text.vocab_size) if i not in special]
    choice = torch.tensor(ordinary or [0])
    pad = getattr(text, "pad_token_id", None)
    longest = getattr(text, "max_position_embeddings", None) or max(LENGTHS)
    batches = []
    for index in range(num_micro_batches):
        shape = (ROWS, min(LENGTHS[(index + seed) % len(LENGTHS)], longest))
        picked = torch.randint(len(choice), shape, generator=generator)
        ids, mask = choice[picked], torch.ones(shape, dtype=torch.long)
        mask[-1, shape[1] - PADDED :] = 0
        # shares differ widely: a mean of micro-batches' means would be another number
        is_target = torch.rand(shape, generator=generator) < 0.2 + 0.6 * (index % 2)
        is_target[:, shape[1] // 2] = True
        labels = torch.where(is_target & mask.bool(), ids, IGNORE)
        ids = ids.masked_fill(mask == 0, pad if isinstance(pad, int) else 0)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def change_first_token(
    micro_batches: Sequence[MicroBatch], config: PretrainedConfig
) -> list[MicroBatch]:
    """Copies with another first token in each row; image tokens are passed over."""
    of_images = special_ids(config, IMAGE_WORDS)
    special = special_ids(config)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    changed = []
    for batch in micro_batches:
        ids = batch["input_ids"].clone()
        for row in ids:
            place = next((i for i, value in enumerate(row) if int(value) not in of_images), 0)
            others = ((int(row[place]) + 1 + k) % vocab_size for k in range(vocab_size))
            row[place] = next((i for i in others if i not in special), int(row[place]))
        changed.append({**batch, "input_ids": ids})
    return changed


def change_images(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Copies with other pixels, on the ranks that have any; zeros are padding, and stay."""

    def other(name: str, value: torch.Tensor) -> torch.Tensor:
        return torch.where(value == 0, value, 0.5 - value) if name == "pixel_values" else value

    return [{name: other(name, value) for name, value in batch.items()} for batch in micro_batches]


def has_pixels(micro_batches: Sequence[MicroBatch]) -> bool:
    """Whether there is an image anywhere."""
    return any(batch.get("pixel_values", torch.empty(0)).numel() for batch in micro_batches)


def add_padding(micro_batches: Sequence[MicroBatch], *, count: int = 2) -> list[MicroBatch]:
    """Copies with `count` more tokens at the end that are masked out."""
    fill = {"labels": IGNORE}
    padded = []
    for batch in micro_batches:
        shape = batch["input_ids"].shape
        if CROSS_MASK in batch:
            batch = {**batch, CROSS_MASK: grow_cross_mask(batch[CROSS_MASK], count)}
        padded.append(
            {
                name: functional.pad(value, (0, count), value=fill.get(name, 0))
                if value.shape == shape and not value.is_floating_point()
                else value
                for name, value in batch.items()
            }
        )
    return padded


class RandomPictures:
    """A dataset of random pictures of two sizes with a question and an answer.

    Args:
        size: pixels of the longer edge.
    """

    def __init__(self, *, size: int, seed: int = 0, length: int = 64) -> None:
        self.size = size
        self.seed = seed
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from PIL import Image  # a text model's check needs no pictures

        if index >= self.length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.seed * self.length + index)
        edges = (self.size, self.size if index % 2 else max(1, self.size * 3 // 4), 3)
        pixels = torch.randint(256, edges, generator=generator, dtype=torch.uint8)
        words = torch.randint(1000, (1 + index % 4,), generator=generator).tolist()
        question = " ".join(str(word) for word in words)
        sample = {"id": f"random-{index}", "question": question, "answer": str(index * 37 % 100)}
        return (Image.fromarray(pixels.numpy()),), sample


# -- runs all stages of a model one after the other in one process, as a pipeline would -----------
# Each stage has its own graph; only what the stage model declares crosses a border, and only the
# first one sees pixels. For the proof at the start of a run, and for parity tests over many splits,
# where processes would take too long.

LossFn = Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor]
# (stage, what it sends on of a micro-batch)
Watch = Callable[[int, Tensors], None]


def run_chain(
    stages: Sequence["StageModel"],
    micro_batches: Sequence[MicroBatch],
    *,
    loss_fn: LossFn,
    splits_backward: bool = False,
    watch: Watch | None = None,
) -> list[torch.Tensor]:
    """Forward and backward passes of all micro-batches; gradients add up in `.grad`.

    Args:
        loss_fn: (output of the last stage, micro-batch) -> its share of the loss.
        splits_backward: gradients of inputs first, those of weights later, as zero-bubble
            schedules do.
        watch: sees what crosses each border.

    Returns:
        The loss of each micro-batch.
    """
    chain = _passes(stages)
    losses = []
    for index, batch in enumerate(micro_batches):
        losses.append(_forward(chain, index, batch, loss_fn, watch))
    for index in range(len(micro_batches)):
        _backward(chain, index, splits_backward)
    return losses


@torch.no_grad()
def evaluate_chain(
    stages: Sequence["StageModel"], micro_batches: Sequence[MicroBatch], *, loss_fn: LossFn
) -> list[torch.Tensor]:
    """The loss of each micro-batch without gradients; modes stay as they are."""
    chain = _passes(stages)
    return [_forward(chain, index, batch, loss_fn) for index, batch in enumerate(micro_batches)]


def _passes(stages: Sequence["StageModel"]) -> list[StagePasses]:
    chain, is_trained = [], False
    for model in stages:
        sends = is_trained
        is_trained = is_trained or any(p.requires_grad for p in model.parameters())
        chain.append(
            StagePasses(model, computes_grad=is_trained, sends_grad=sends, saving=nullcontext)
        )
    return chain


def drop_pixels(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch as a later stage gets it."""
    return {name: value for name, value in micro_batch.items() if not name.startswith("pixel")}


def _forward(
    chain: Sequence[StagePasses],
    index: int,
    batch: MicroBatch,
    loss_fn: LossFn,
    watch: Watch | None = None,
) -> torch.Tensor:
    tensors: Tensors = (batch["input_ids"],)
    for number, passes in enumerate(chain):
        own = batch if passes.model.stage == 0 else drop_pixels(batch)
        is_last = passes.model.is_last
        loss_of = (lambda output, own=own: loss_fn(output, own)) if is_last else None
        _check(tensors, batch_input(passes.model, own))
        made = passes.forward(index, tensors, model_inputs(own), loss_of=loss_of)
        if not is_last:
            _check(made, batch_output(passes.model, own))
            if watch is not None:
                watch(number, made)
        # a network copies; here a view of one stage's output is not to be another's input
        tensors = tuple(value.detach().clone() for value in made)
    return tensors[0]


def _backward(chain: Sequence[StagePasses], index: int, splits_backward: bool) -> None:
    grads: Tensors | None = None
    for passes in reversed(chain):
        if not passes.computes_grad:
            break
        kind = Kind.INPUT_GRAD if splits_backward and passes.sends_grad else Kind.BACKWARD
        grads = passes.backward(index, kind, grads)
    if splits_backward:
        for passes in chain:
            if passes.sends_grad:
                passes.backward(index, Kind.WEIGHT_GRAD, None)


def _check(came: Tensors, metas: Sequence[torch.Tensor]) -> None:
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in came]
    declared = [(tuple(meta.shape), meta.dtype) for meta in metas]
    assert found == declared, f"{found} crossed a border, {declared} was declared"
