"""Micro-batches for a check, changed copies of them, and all stages run in one process on them.

Only seeds determine the batches, so every rank makes the same. Shapes: B rows, T tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers import PretrainedConfig

from stageline.contracts import IGNORE
from stageline.data.images.images import CROSS_MASK, grow_cross_mask
from stageline.model_folder import special_tokens
from stageline.pipeline.plan import Kind
from stageline.pipeline.stage_passes import (
    MicroBatch,
    StagePasses,
    Tensors,
    batch_input,
    batch_output,
    model_inputs,
)
from stageline.stages.example_batch import picture_batch

if TYPE_CHECKING:
    from stageline.stages.base import StageModel

TEXT_LENGTHS = ((11, 4), (7, 0))  # tokens, padding of the last row
PICTURES = ((2, 0, 1), (0, 0), (1, 1))  # pictures of each row of each micro-batch
ROWS = 2


def ordinary_ids(config: PretrainedConfig) -> torch.Tensor:
    """The token ids that stand for text."""
    text, special = config.get_text_config(decoder=True), special_tokens(config)
    most = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    return torch.tensor([one for one in range(3, most) if one not in special] or [0])


def draw_ids(
    config: PretrainedConfig, *shape: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Draw token ids of text; without a generator always the same."""
    ordinary = ordinary_ids(config)
    generator = generator or torch.Generator().manual_seed(0)
    return ordinary[torch.randint(len(ordinary), shape, generator=generator)]


def draw_text(
    config: PretrainedConfig, length: int, padding: int, *, generator: torch.Generator
) -> MicroBatch:
    """Random ids [2, T] and their mask; `padding` tokens at the end of the last row are masked."""
    ids = draw_ids(config, ROWS, length, generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
        ids[-1, -padding:] = pad if isinstance(pad, int) and pad >= 0 else 0
        mask[-1, -padding:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def probe_batches(
    config: PretrainedConfig,
    dtype: torch.dtype,
    *,
    tower: Any = None,
    num_micro_batches: int | None = None,
    seed: int = 0,
) -> list[MicroBatch]:
    """Micro-batches of different lengths: padded and full; of pictures many, none and some.

    Args:
        dtype: of pictures.
        tower: the whole model that looks at the pictures; None: there are none.
        num_micro_batches: None: one of each kind.
    """
    ends = torch.tensor(sorted(special_tokens(config)), dtype=torch.long)
    made = []
    for index in range(num_micro_batches or len(PICTURES if tower else TEXT_LENGTHS)):
        own = seed + index
        if tower:
            rows = PICTURES[index % len(PICTURES)]
            batch = picture_batch(config, tower, rows=rows, dtype=dtype, seed=own, longer=index)
        else:
            size = TEXT_LENGTHS[index % len(TEXT_LENGTHS)]
            batch = draw_text(config, *size, generator=torch.Generator().manual_seed(own))
        ids, mask = batch["input_ids"], batch["attention_mask"]
        batch["labels"] = ids.masked_fill((mask == 0) | torch.isin(ids, ends), IGNORE)
        made.append(batch)
    return made


def change_first_token(
    micro_batches: Sequence[MicroBatch], config: PretrainedConfig
) -> list[MicroBatch]:
    """Copies with another first token of text in each row."""
    ordinary, changed = ordinary_ids(config), []
    for batch in micro_batches:
        ids = batch["input_ids"].clone()
        for row in ids:
            place = int(torch.isin(row, ordinary).int().argmax())
            others = ordinary[ordinary != row[place]]
            if len(others):
                row[place] = others[int((others > row[place]).int().argmax())]
        changed.append({**batch, "input_ids": ids})
    return changed


def change_images(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Copies with other pixels, on the ranks that have any; zeros are padding, and stay."""
    return [
        {**batch, "pixel_values": torch.where(pixels == 0, pixels, 0.5 - pixels)}
        if (pixels := batch.get("pixel_values")) is not None
        else batch
        for batch in micro_batches
    ]


def add_padding(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Copies with two more tokens at the end that are masked out."""
    count, padded = 2, []
    for batch in micro_batches:
        shape, batch = batch["input_ids"].shape, dict(batch)
        for name, value in batch.items():
            if name == CROSS_MASK:
                batch[name] = grow_cross_mask(value, count)
            elif value.shape == shape and not value.is_floating_point():
                fill = IGNORE if name == "labels" else 0
                batch[name] = functional.pad(value, (0, count), value=fill)
        padded.append(batch)
    return padded


LossFn = Callable[[torch.Tensor | Tensors, MicroBatch], torch.Tensor]


def loss_of(output: torch.Tensor | Tensors, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of logits [B, T, V] and, of a mixture of experts, the weighted router loss.

    Scores [B, T, 1] of a reward model are squared.
    """
    logits, extra = output if isinstance(output, tuple) else (output, 0.0)
    labels = batch["labels"][:, 1:]
    if logits.shape[-1] == 1:
        return (logits[:, 1:, 0].square() * (labels != IGNORE)).mean() + extra
    total = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / 8 + extra


def run_chain(
    stages: Sequence["StageModel"],
    micro_batches: Sequence[MicroBatch],
    *,
    loss_fn: LossFn,
    splits_backward: bool = False,
    borders: dict[tuple[int, int], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Runs all stages one after the other in one process, as a pipeline would.

    Each stage has its own graph; only what it declares crosses a border, and only the first one
    sees pixels. Gradients of all micro-batches add up in `.grad`; without gradients, forward only.

    Args:
        loss_fn: (output of the last stage, micro-batch) -> its share of the loss.
        splits_backward: gradients of inputs first, those of weights later, as zero-bubble
            schedules do.
        borders: filled with (stage, number of a micro-batch) -> the first tensor that it sends.

    Returns:
        The loss of each micro-batch.
    """
    chain, is_trained, losses = [], False, []
    for model in stages:
        sends = is_trained
        is_trained = is_trained or any(p.requires_grad for p in model.parameters())
        chain.append(
            StagePasses(model, computes_grad=is_trained, sends_grad=sends, saving=nullcontext)
        )
    for index, batch in enumerate(micro_batches):
        tensors: Tensors = (batch["input_ids"],)
        for number, passes in enumerate(chain):
            stage = passes.model
            own = batch if stage.stage == 0 else drop_pixels(batch)
            loss_of = (lambda output, own=own: loss_fn(output, own)) if stage.is_last else None
            crossing = [(tensors, batch_input(stage, own))]
            made = passes.forward(index, tensors, model_inputs(own), loss_of=loss_of)
            if not stage.is_last:
                crossing.append((made, batch_output(stage, own)))
                if borders is not None:
                    borders[number, index] = made[0].detach().clone()
            for found, metas in crossing:
                crossed = [(tensor.shape, tensor.dtype) for tensor in found]
                declared = [(meta.shape, meta.dtype) for meta in metas]
                assert crossed == declared, f"{crossed} crossed a border, {declared} was declared"
            # a network copies; here a view of one stage's output is not to be another's input
            tensors = tuple(value.detach().clone() for value in made)
        losses.append(tensors[0])
    for index in range(len(micro_batches) if torch.is_grad_enabled() else 0):
        grads: Tensors | None = None
        for passes in reversed([passes for passes in chain if passes.computes_grad]):
            kind = Kind.INPUT_GRAD if splits_backward and passes.sends_grad else Kind.BACKWARD
            grads = passes.backward(index, kind, grads)
        for passes in chain if splits_backward else ():
            if passes.sends_grad:
                passes.backward(index, Kind.WEIGHT_GRAD, None)
    return losses


def with_facts(
    stages: Sequence["StageModel"], micro_batches: Sequence[MicroBatch]
) -> list[MicroBatch]:
    """Return micro-batches with the host's facts for stages, as in a run.

    What padding comes to is then another number than in the whole model with its mask.
    """
    return [{**batch, **stages[0].host_facts(batch)} for batch in micro_batches]


def drop_pixels(micro_batch: MicroBatch) -> MicroBatch:
    """The micro-batch as a later stage gets it."""
    return {name: value for name, value in micro_batch.items() if not name.startswith("pixel")}
