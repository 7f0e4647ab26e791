"""Several answers to each prompt, for training on them: seeds determine which are drawn.

A server puts together what came when. Here a lot of
prompts is answered together, whatever the number of stages or replicas, so that each pass has the
shape that it would have in any other split, and a run that is resumed draws the same answers. A
prompt is read once: its answers share what was kept of it, and images are looked at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch

from stageline.errors import UserError
from stageline.inference.decoding.answer import AnswerText
from stageline.inference.decoding.cache import GroupCache, take_out, whole_columns
from stageline.inference.decoding.chain import Chain
from stageline.inference.decoding.request import (
    PassOrder,
    Prompt,
    Sampling,
    error_of,
    is_alone,
    length_of,
    together,
)
from stageline.inference.decoding.sampler import choice_bytes
from stageline.inference.decoding.stage_decoder import answering, can_keep_logits
from stageline.pipeline.live_bytes import PeakBytes, tensor_bytes
from stageline.planner.estimate import META, Cost, on_meta
from stageline.stage import Stage


@dataclass(frozen=True)
class PromptToAnswer:
    """A prompt with a seed for each answer.

    Attributes:
        inputs: what `encode_prompts` makes of one prompt.
    """

    inputs: Prompt
    seeds: tuple[int, ...]


@dataclass
class SampledAnswer:
    """One answer as it was drawn.

    Attributes:
        token_ids: with the token that ended it, which was drawn as well as the others.
        log_probs: of each of them, of the distribution that it was drawn from.
        text: without what ended it.
        is_cut: nothing ended it: there was no room for more.
        is_own: of several turns: whether the model drew a token, or it is an environment's, whose
            log-probability is 0; `text` is of the last turn.
        turns, reward: texts of both sides, and the environment's reward.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    is_cut: bool = False
    is_own: list[bool] | None = None
    turns: list[str] = field(default_factory=list)
    reward: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the model drew."""
        return len(self.token_ids) if self.is_own is None else sum(self.is_own)


@dataclass(eq=False)
class _Row:
    """An answer that is still being drawn."""

    number: int
    answer: SampledAnswer
    words: AnswerText


@dataclass(eq=False)
class _Lot:
    """Prompts that are answered together: one group of the stages.

    Attributes:
        unread: first passes that have not come back.
        rows: that are unfinished, in the order in which the stages have them.
        left: (group, row) of rows that have ended and not been told of.
    """

    number: int
    unread: int
    rows: list[_Row] = field(default_factory=list)
    left: list[tuple[int, int]] = field(default_factory=list)


# the number of the lot's first prompt, and the answers to each of its prompts
OnLot = Callable[[int, Sequence[Sequence[SampledAnswer]]], None]


@dataclass(frozen=True, eq=False)
class AnswerGroups:
    """Draws groups of answers; the first rank of a pipeline has it, the others follow.

    Args:
        chain: the stages, which answer meanwhile.
        stop_ids: tokens that end an answer.
        lots_at_once: lots on their way at a time; more fill the pipeline, and take memory.
        most_on_way: passes that may be on their way.
    """

    chain: Chain
    _: KW_ONLY
    tokenizer: Any
    stop_ids: tuple[int, ...]
    device: torch.device
    lots_at_once: int
    most_on_way: int

    def draw(
        self,
        prompts: Sequence[PromptToAnswer],
        sampling: Sampling,
        *,
        lot_size: int,
        on_lot: OnLot | None = None,
    ) -> list[list[SampledAnswer]]:
        """The answers to each prompt, one for each of its seeds.

        Args:
            sampling: how all tokens are drawn; its seed is not looked at.
            lot_size: prompts that are answered together. Roundings depend on it, and so may tokens.
            on_lot: told the answers of a lot that is whole, while others are drawn.

        Raises:
            EngineError, UserError: a stage failed, or a token could not be drawn.
        """
        wanted = replace(sampling, stop_token_ids=self.stop_ids, logprobs=0, tempers_logprobs=True)
        drawing = _Drawing(self, wanted)
        waiting = deque(
            prompts[start : start + lot_size] for start in range(0, len(prompts), lot_size)
        )
        while waiting or drawing.is_busy:
            while waiting and len(drawing.lots) < self.lots_at_once:
                drawing.begin(waiting.popleft())
            drawing.go_on()
            while on_lot is not None and drawing.has_whole_lot:
                first = drawing.num_told * lot_size
                on_lot(first, drawing.answers[first : first + lot_size])
                drawing.num_told += 1
        return drawing.answers

    def close(self) -> None:
        """Lets the other ranks go on to something else."""
        if self.chain.num_stages > 1:
            self.chain.start(PassOrder("stop"), {})
            self.chain.result()


class _Drawing:
    """One call of `AnswerGroups.draw`.

    Attributes:
        num_told: lots that were handed on.
    """

    def __init__(self, groups: AnswerGroups, sampling: Sampling) -> None:
        self.groups, self.sampling = groups, sampling
        self.answers: list[list[SampledAnswer]] = []
        self.lots: dict[int, _Lot] = {}
        self.num_told = 0
        self._ready: deque[tuple[PassOrder, dict[str, torch.Tensor]]] = deque()
        self._rows: dict[int, _Row] = {}
        self._num_lots = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._ready or self.groups.chain.num_in_flight)

    @property
    def has_whole_lot(self) -> bool:
        """Whether the next lot is whole; one that ended before it waits: their order is given."""
        return self.num_told < self._num_lots and self.num_told not in self.lots

    def begin(self, prompts: Sequence[PromptToAnswer]) -> None:
        """Queue the first passes of a lot: each prompt is read once, short ones together."""
        groups, longest = self.groups, max(length_of(prompt.inputs) for prompt in prompts)
        # the last token of an answer is kept nowhere
        columns = longest + self.sampling.max_new_tokens - 1
        room = sum(len(prompt.seeds) for prompt in prompts), columns
        size = prompts_of_a_pass(longest)
        if any(is_alone(p.inputs) or len(p.seeds) != len(prompts[0].seeds) for p in prompts):
            size = 1
        passes = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        lot = self.lots[self._num_lots] = _Lot(self._num_lots, unread=len(passes))
        self._num_lots += 1
        for read in passes:
            rows = []
            for _ in (seed for prompt in read for seed in prompt.seeds):
                ends = self.sampling.stop, groups.stop_ids
                words = AnswerText(groups.tokenizer, *ends, grows=False)
                row = self._rows[len(self._rows)] = _Row(len(self._rows), SampledAnswer(), words)
                rows.append(row)
            copies = len(read[0].seeds)
            answers = [row.answer for row in rows]
            self.answers += [
                answers[first : first + copies] for first in range(0, len(rows), copies)
            ]
            lot.rows += rows
            order = PassOrder(
                "prefill",
                group=lot.number,
                rows=[row.number for row in rows],
                lengths=[length_of(prompt.inputs) for prompt in read],
                copies=copies,
                room=list(room),
                settings=[
                    replace(self.sampling, seed=seed) for prompt in read for seed in prompt.seeds
                ],
            )
            self._ready.append((order, together([prompt.inputs for prompt in read])))

    def go_on(self) -> None:
        """Start what is in line, then take the oldest result."""
        groups = self.groups
        while self._ready and groups.chain.num_in_flight < groups.most_on_way:
            order, tensors = self._ready.popleft()
            on_device = {name: value.to(groups.device) for name, value in tensors.items()}
            groups.chain.start(order, on_device)
        order = groups.chain.result()
        if order.kind == "tidy":
            return
        lot = self.lots[order.group]
        lot.unread -= order.kind == "prefill"
        for place, number in enumerate(order.rows):
            row, error = self._rows[number], error_of(order, place)
            if error is not None:
                raise error
            logprob = order.logprobs[place]
            assert logprob is not None  # they were asked for
            row.answer.token_ids.append(order.tokens[place])
            row.answer.log_probs.append(logprob.logprob)
            row.words.add(order.tokens[place])
            if row.words.is_stopped or len(row.answer.token_ids) == self.sampling.max_new_tokens:
                row.words.finish()  # its rest may end in a stop string
                row.answer.is_cut = not row.words.is_stopped
                row.answer.text = row.words.text
                # the stages take a row out in the same way, so no other row moves
                take_out(lot.rows, lot.rows.index(row))
                lot.left.append((lot.number, number))
        if lot.unread:
            return
        if lot.rows:
            step = PassOrder("decode", group=lot.number, rows=[row.number for row in lot.rows])
            step.leave, lot.left = lot.left, []
            ids = torch.tensor([[row.answer.token_ids[-1]] for row in lot.rows])
            self._ready.append((step, {"input_ids": ids}))
        else:
            del self.lots[lot.number]
            self._ready.append((PassOrder("tidy", leave=lot.left), {}))


def prompts_of_a_pass(length: int) -> int:
    """Return how many prompts of up to `length` tokens, without images, are read in one pass."""
    return max(1, 256 // length)  # fewer tokens take a pass hardly less time


def check_room(
    prompt_tokens: int,
    answer_tokens: int,
    positions: int | None,
    *,
    short_length: int | None = None,
) -> None:
    """Refuses answers that the model has no positions for, or not of one kind; see `Stage`.

    Raises:
        UserError: says how many there are.
    """
    room = min((count for count in (positions, short_length) if count is not None), default=None)
    if room is not None and prompt_tokens + answer_tokens > room:
        kind = "" if room == positions else ", before longer rows change those of all (LongRoPE)"
        raise UserError(
            f"A prompt of {prompt_tokens} tokens and an answer of up to {answer_tokens} "
            f"(`max_completion_length`) do not fit: the model has {room} positions{kind}. Lower "
            "`max_completion_length`, or shorten the prompts."
        )


@dataclass(frozen=True)
class AnswerLoad:
    """Number and size of the prompts and answers of a step.

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
        reads, those of the last pass over prompts, before they are in its own.
        """
        num_full, rest = divmod(self.num_prompts, self.lot_size)
        num_rows = min(num_full, self.lots_at_once) * self.lot_size
        if num_full < self.lots_at_once:
            num_rows += rest
        width = whole_columns(self.columns)
        grown = self.prompt_tokens + max(1, self.prompt_tokens // 4)
        read = whole_columns(min(grown, self.columns))
        size, num_read = prompts_of_a_pass(self.prompt_tokens), self.rows // self.copies
        # prompts that join those of the first pass; those with images are read one by one
        joined = max(min(1, num_read - 1), min(size, num_read - size))
        joining = joined * self.copies * whole_columns(self.prompt_tokens)
        beyond = max(0, self.rows * read + joining - self.rows * width)
        return num_rows * self.copies * width + beyond

    @property
    def moved_cells(self) -> int:
        """Return the largest number of places of a buffer that is copied while its lot grows."""
        return self.rows * whole_columns(self.columns)


def answer_cost(stage: Stage, loads: Sequence[AnswerLoad]) -> Cost:
    """The `cache` and `answering` of a stage on the meta device, or of a piece of one.

    Takes the largest of some loads: the caches of all lots at their fullest, and in addition
    the fullest moment of the pass over a prompt, of a step with the choice of its tokens, or of
    moving a buffer.

    Keys and values of images that layers look at themselves are not counted, nor is a tower.
    """
    rows, columns = max(load.rows for load in loads), max(load.columns for load in loads)
    width = max(load.prompt_tokens for load in loads)
    _ = stage.can_decode  # tried here, not while tensors without values are measured
    with answering([stage]), torch.no_grad():
        read = min(max(load.rows // load.copies for load in loads), prompts_of_a_pass(width))
        prompt, _ = _pass(stage, _cache(stage, rows=read, columns=0, room=width), width)
        steps = _cache(stage, rows=rows, columns=columns - 1, room=columns)
        step, output = _pass(stage, steps, 1)
    num_cells = steps.window.row_capacity * steps.window.column_capacity
    buffers = steps.buffer_bytes()
    if stage.is_last:  # tokens are chosen when all between what came and the logits is gone
        # with ids and positions of this step and the next, which the group keeps
        came = tensor_bytes(stage.get_example_input(rows, 1)) + 4 * 8 * rows
        step = max(step, came + output.nbytes + choice_bytes(rows, output.shape[-1]))
    moved = max(buffers, default=0) // num_cells * max(load.moved_cells for load in loads)
    return Cost(
        cache=sum(buffers) // num_cells * max(load.cells for load in loads),
        answering=max(prompt, step, moved),
    )


def _cache(stage: Stage, *, rows: int, columns: int, room: int) -> GroupCache:
    """Make a cache with `columns` columns in use, uninitialized, and room for more."""
    cache = GroupCache(stage.num_cache_layers(), rows, fixed_layers=stage.fixed_layers())
    cache.begin(room, lengths=[room] * rows)
    cache.window.first_columns = [0] * rows
    cache.advance(columns)
    return cache


def _pass(stage: Stage, cache: GroupCache, num_new: int) -> tuple[int, torch.Tensor]:
    """Return the peak of a pass, with its input but without the cache, and its output."""
    rows = cache.window.num_rows
    batch: dict[str, object] = {
        "position_ids": torch.empty(rows, num_new, dtype=torch.long, device=META),
        "past_key_values": cache,
    }
    if stage.is_last and can_keep_logits(stage):
        batch["logits_to_keep"] = 1
    floats = (p.dtype for p in stage.parameters() if p.is_floating_point())
    inputs = stage.get_example_input(rows, num_new)
    watch = PeakBytes(META)
    with on_meta(watch, stage):
        inputs = tuple(torch.empty_like(value) for value in inputs)
        # transformers would inspect a mask that lacks dimensions. Several rows need a boolean
        # mask, whose copy in numbers counts; a single row needs none, and floats are not copied
        kind = torch.bool if rows > 1 else next(floats, torch.get_default_dtype())
        mask = torch.empty(rows, 1, num_new, cache.window.width + num_new, dtype=kind)
        output = stage(*inputs, attention_mask=mask, **batch)
    output = output[0] if isinstance(output, tuple) else output
    return max(0, watch.peak - cache.num_bytes()), output
