"""What the stages of a training hold while they answer: keys and values, and a pass's own tensors.

Nothing runs on a device. How many places for keys and values there are follows from the way in
which `AnswerGroups` reads and steps; what a place takes in each layer, and what a pass needs beside
it, is seen on the meta device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stageline.inference.decoding.cache import GroupCache, whole_columns
from stageline.inference.decoding.stage_decoder import answering, can_keep_logits
from stageline.inference.model_bytes import LOGIT_COPIES, on_meta
from stageline.pipeline.live_bytes import PeakBytes
from stageline.stage import Stage

META = torch.device("meta")


@dataclass(frozen=True)
class AnswerLoad:
    """What a pipeline is asked to answer.

    Attributes:
        num_prompts: that wait together.
        copies: answers to each.
        lot_size: prompts that are answered together.
        lots_at_once: that are on their way through the stages.
        prompt_tokens, answer_tokens: of the longest prompt and answer.
    """

    num_prompts: int
    copies: int
    lot_size: int
    lots_at_once: int
    prompt_tokens: int
    answer_tokens: int

    @property
    def rows(self) -> int:
        """Answers of a lot, which one step brings forward together."""
        return min(self.num_prompts, self.lot_size) * self.copies

    @property
    def columns(self) -> int:
        """Tokens of a row in the last step; what that step draws is in no cache."""
        return self.prompt_tokens + self.answer_tokens - 1

    @property
    def cells(self) -> int:
        """Places for the keys and values of a token that buffers have at once, used or not.

        Those of rows that are as long as they may be, in lots that are all as far; and while a lot
        reads, those of the last prompt, before they are in its own.
        """
        num_full, rest = divmod(self.num_prompts, self.lot_size)
        num_rows = min(num_full, self.lots_at_once) * self.lot_size
        if num_full < self.lots_at_once:
            num_rows += rest
        width = whole_columns(self.columns)
        grown = self.prompt_tokens + max(1, self.prompt_tokens // 4)
        read = whole_columns(min(grown, self.columns))
        joining = self.copies * whole_columns(self.prompt_tokens) if self.rows > self.copies else 0
        beyond = max(0, self.rows * read + joining - self.rows * width)
        return num_rows * self.copies * width + beyond

    @property
    def moved_cells(self) -> int:
        """Places of a buffer that is there twice while its lot grows, at most."""
        return self.rows * whole_columns(self.columns)


@dataclass(frozen=True)
class AnswerBytes:
    """Of one stage, or of a piece of one.

    Attributes:
        cache: of all lots when it is largest.
        workspace: the fullest moment beside weights and caches: of the pass over a prompt, of a
            step with the choice of its tokens, or of a buffer that moves.
    """

    cache: int
    workspace: int


def answer_bytes(stage: Stage, loads: Sequence[AnswerLoad]) -> AnswerBytes:
    """What a stage on the meta device needs for the largest of some loads.

    Keys and values of images that layers look at themselves are not counted, nor is a tower.
    """
    rows, columns = max(load.rows for load in loads), max(load.columns for load in loads)
    width = max(load.prompt_tokens for load in loads)
    with answering([stage]), torch.no_grad():
        prompt, _ = _pass(stage, _cache(stage, rows=1, columns=0, room=width), width)
        steps = _cache(stage, rows=rows, columns=columns - 1, room=columns)
        step, output = _pass(stage, steps, 1)
    num_cells = steps.window.row_capacity * steps.window.column_capacity
    buffers = steps.buffer_bytes()
    if stage.is_last:  # float32 copies of the logits, when what led to them is gone
        step = max(step, output.nbytes + output.numel() * 4 * LOGIT_COPIES)
    moved = max(buffers, default=0) // num_cells * max(load.moved_cells for load in loads)
    return AnswerBytes(
        cache=sum(buffers) // num_cells * max(load.cells for load in loads),
        workspace=max(prompt, step, moved),
    )


def _cache(stage: Stage, *, rows: int, columns: int, room: int) -> GroupCache:
    """With so many columns in use, which nobody wrote, and room for as many as that."""
    cache = GroupCache(stage.num_layers(), rows, fixed_layers=stage.fixed_layers())
    cache.begin(room, lengths=[room] * rows)
    cache.window.first_columns = [0] * rows
    cache.advance(columns)
    return cache


def _pass(stage: Stage, cache: GroupCache, num_new: int) -> tuple[int, torch.Tensor]:
    """The most that a pass makes beside the cache, with what comes in; and what it gives."""
    rows = cache.window.num_rows
    inputs = stage.get_example_input(rows, num_new)
    batch: dict[str, object] = {
        "position_ids": torch.empty(rows, num_new, dtype=torch.long, device=META),
        "past_key_values": cache,
    }
    if stage.is_last and can_keep_logits(stage):
        batch["logits_to_keep"] = 1
    watch = PeakBytes(META)
    with on_meta(watch, stage):
        inputs = tuple(torch.empty_like(value) for value in inputs)
        # one that has all its dimensions: the library would look into any other. Prompts of several
        # lengths are told apart by it; kernels for one alone do without
        kind = torch.bool if rows > 1 else _float_type(stage)
        mask = torch.empty(rows, 1, num_new, cache.window.width + num_new, dtype=kind)
        output = stage(*inputs, attention_mask=mask, **batch)
    output = output[0] if isinstance(output, tuple) else output
    return max(0, watch.peak - cache.num_bytes()), output


def _float_type(stage: Stage) -> torch.dtype:
    kinds = (p.dtype for p in stage.parameters() if p.is_floating_point())
    return next(kinds, torch.get_default_dtype())
