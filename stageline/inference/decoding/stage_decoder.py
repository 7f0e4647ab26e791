"""One stage's part of answering: its layers, and the caches of all groups for these layers.

Shapes: B rows, T tokens or new columns, H hidden size, V vocabulary.
"""

import contextlib
import functools
import inspect
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stageline import progress
from stageline.device import is_accelerator, sent
from stageline.errors import UserError
from stageline.inference.decoding.cache import GroupCache, Window, take_out
from stageline.inference.decoding.grammars import Matchers
from stageline.inference.decoding.request import PassOrder, Score
from stageline.inference.decoding.sampler import SampledRow, choose
from stageline.stage import Stage

# Log-probabilities of given tokens from the logits in their places.
# Shapes: T places, V vocabulary.

# numbers that are made float32 at a time: a long row times a vocabulary would take gigabytes
PIECE = 2**25


def score_row(logits_TV: torch.Tensor, targets: list[int], *, num_top: int) -> Score:
    """Return each target's log-probability, whether all are the likeliest, the likeliest tokens.

    Computes in float32 or wider.
    """
    num_together = max(1, PIECE // logits_TV.shape[-1])
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    ids_T = torch.tensor(targets, device=logits_TV.device)
    values: list[float] = []
    tops: list[list[tuple[int, float]]] = []
    is_greedy = True
    for logits, ids in zip(logits_TV.split(num_together), ids_T.split(num_together), strict=True):
        logprobs = logits.to(wide).log_softmax(-1)
        values += logprobs.gather(-1, ids[:, None])[:, 0].tolist()
        is_greedy &= bool((logprobs.argmax(-1) == ids).all())
        if num_top:
            best = logprobs.topk(min(num_top, logprobs.shape[-1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            tops += [list(zip(*pair, strict=True)) for pair in pairs]
    return values, is_greedy, tops


Tensors = dict[str, torch.Tensor]


@dataclass
class Group:
    """The rows of a group on this stage.

    Attributes:
        positions: of each row, the position of its next token.
        kept: of each row, what its steps read of its prompt.
        position_ids: `positions` on the device [B, 1]; None: the rows have changed since.
        read: ids [B, T] of the pieces of a prompt that is not read to its end.
    """

    cache: GroupCache
    rows: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    kept: list[Tensors] = field(default_factory=list)
    position_ids: torch.Tensor | None = None
    read: list[torch.Tensor] = field(default_factory=list)

    @property
    def _of_rows(self) -> tuple[list[Any], ...]:
        return (self.rows, self.positions, self.kept)

    def join(self, new: "Group") -> None:
        """Take the rows of another group."""
        self.cache.join(new.cache)
        self.position_ids = None
        for own, others in zip(self._of_rows, new._of_rows, strict=True):
            own += others

    def remove(self, row: int) -> None:
        """Forgets a row; the last one takes its place."""
        index = self.rows.index(row)
        self.cache.remove(index)
        self.position_ids = None
        for values in self._of_rows:
            take_out(values, index)

    def arrange(self, rows: list[int]) -> None:
        """Puts the rows into an order; after a pass that failed stages may differ in it."""
        if self.rows == rows:
            return
        assert sorted(self.rows) == sorted(rows), f"rows {self.rows} here, {rows} ordered"
        for place, row in enumerate(rows):
            other = self.rows.index(row)
            if other != place:
                self.cache.swap(place, other)
                self.position_ids = None
                for values in self._of_rows:
                    values[place], values[other] = values[other], values[place]


HIDDEN, EXTRA = "hidden", "extra"


@contextlib.contextmanager
def answering(stages: Iterable[Stage]) -> Iterator[None]:
    """Stages of a training answer meanwhile; afterwards they are as they were.

    Compiled layers run in eager mode: each length of a cache would be compiled again.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for stage in stages:
            modes = [(module, module.training) for module in stage.modules()]
            for module, is_training in modes:
                stack.callback(setattr, module, "training", is_training)
            stack.callback(stage.train, stage.training)  # a stage may override `train`
            before = dict(vars(stage))
            stage.eval()
            stage.answer_only()

            def put_back(stage: Stage = stage, before: dict[str, Any] = before) -> None:
                for name in vars(stage).keys() - before.keys():
                    del vars(stage)[name]
                vars(stage).update(before)

            stack.callback(put_back)
        yield


class StageDecoder:
    """Carries out orders on one stage.

    Args:
        stage: a stage model with its weights.
        device: of those weights.
        matchers: on the last stage, for answers that keep to a grammar.
        trains_on: the stage is one of a training, which `answering` brings to answer and back.

    Attributes:
        has_cache: the model keeps keys and values; else each token reads its whole row again.
        reads_in_pieces: a prompt of text may be read in several passes.
        unfinished: row -> the group of its own in which it is read so.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        device: torch.device | str = "cpu",
        matchers: Matchers | None = None,
        trains_on: bool = False,
    ) -> None:
        # training needs tensors that can be saved for a gradient, unlike those of inference mode
        self._mode = torch.no_grad if trains_on else torch.inference_mode
        self._trains_on = trains_on
        if not trains_on:
            stage.eval().requires_grad_(False)
            stage.answer_only()
        self.stage = stage
        self.has_cache = bool(stage.can_decode)
        self.reads_in_pieces = self.has_cache and bool(stage.reads_in_pieces)
        self.device = torch.device(device)
        self.matchers = matchers
        self.groups: dict[int, Group] = {}
        self.unfinished: dict[int, Group] = {}
        self.sampled: dict[int, SampledRow] = {}  # on the last stage
        self._passes = {
            "prefill": self._prefill,
            "decode": self._decode,
            "whole": self._whole,
            "score": self._score,
        }
        self._row_choice = getattr(stage, "row_choice", None)
        self._keeps_logits = stage.is_last and can_keep_logits(stage)

    def run(self, order: PassOrder, tensors: Tensors) -> Tensors:
        """Does this stage's part of an order, in place.

        Args:
            tensors: on the first stage what the model reads; else what the stage before sent.

        Returns:
            What the next stage needs. The last stage writes into the order instead.
        """
        began = time.perf_counter()
        found: Tensors = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._mode())
            if self._trains_on:  # a training run looks for operations that hang: each pass is one
                stack.enter_context(progress.doing("decoding", stage=self.stage.stage))
            try:
                self._tidy(order)
                if self._row_choice is not None:
                    self._row_choice.begin(order.adapters)
                if order.error is None and order.kind in self._passes:
                    found = self._passes[order.kind](order, tensors)
            except Exception as error:  # out of memory or a fault of the model: others continue
                traceback.print_exc(file=sys.stderr)
                order.error = f"stage {self.stage.stage}: {type(error).__name__}: {error}"
                if order.kind == "decode":  # its cache may have moved half way
                    self.groups.pop(order.group, None)
        order.seconds.append(time.perf_counter() - began)
        return {} if order.error else found

    def bytes_of_a_token(self) -> int:
        """Return the bytes of one token in the cache of this stage; at least 1."""
        if not self.has_cache:
            return 1
        stage, zeros = self.stage, functools.partial(torch.zeros_like, device=self.device)
        with self._mode():
            cache = self._new_cache(1)
            cache.begin(1, lengths=[1])
            first, *extras = map(zeros, stage.get_example_input(1, 1))
            tensors = {f"{EXTRA}{place:03d}": value for place, value in enumerate(extras)}
            tensors["input_ids" if stage.is_first else HIDDEN] = first
            positions = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self._forward(tensors, {"position_ids": positions, "attention_mask": None}, cache)
        window = cache.window
        return max(1, cache.num_bytes() // (window.row_capacity * window.column_capacity))

    def pass_tokens(self) -> int:
        """Return how many tokens of prompts one pass reads."""
        stage, device = self.stage, self.device
        has_all_logits = stage.is_last and not can_keep_logits(stage)
        if not is_accelerator(device) or has_all_logits:
            return PASS_TOKENS
        weights = [weight for layer in stage.modules_to_shard() for weight in layer.parameters()]
        widest = max((size for weight in weights for size in weight.shape[-2:]), default=1)
        num_bytes = max((weight.element_size() for weight in weights), default=1)
        free, _ = torch.get_device_module(device).mem_get_info(device)
        room = int(free * SHARE_OF_A_PASS) // (NUM_HELD * widest * num_bytes)
        return min(MOST_PASS_TOKENS, max(PASS_TOKENS, room))

    def _new_cache(self, num_rows: int) -> GroupCache:
        stage = self.stage
        return GroupCache(stage.num_cache_layers(), num_rows, fixed_layers=stage.fixed_layers())

    def _tidy(self, order: PassOrder) -> None:
        leaving = set(order.leave)
        for number, group in list(self.groups.items()):
            if leaving.issuperset((number, row) for row in group.rows):
                del self.groups[number]  # where all rows leave, none is moved
        for number, row in order.leave:
            self.sampled.pop(row, None)
            self.unfinished.pop(row, None)
            left = self.groups.get(number)
            if left is None or row not in left.rows:
                continue  # its prefill failed before it came here
            left.remove(row)
            if not left.rows:
                del self.groups[number]
        for source, target in order.join:
            self._join(target, self.groups.pop(source))

    def _join(self, number: int, new: Group) -> None:
        """Add rows to a group; if memory runs out the group is lost, and its passes fail."""
        old = self.groups.pop(number, None)
        if old is not None:
            old.join(new)
        self.groups[number] = old or new

    def _prefill(self, order: PassOrder, tensors: Tensors) -> Tensors:
        """Read the prompts of new rows, or a piece of one; complete rows join the group."""
        first, end = order.span
        new = self.unfinished.pop(order.rows[0], None) if first else None
        if first and new is None:  # its pass failed
            order.error = f"stage {self.stage.stage}: an earlier piece of the prompt was not read"
            return {}
        if new is None:
            new = Group(self._new_cache(len(order.lengths)), list(order.rows))
            lengths = [end] if order.piece else order.lengths
            new.cache.begin(end, lengths=lengths, room=max(order.lengths))
        else:
            new.cache.begin(end - first)
        width, window = end - first, new.cache.window
        batch: dict[str, Any] = {
            **_others(tensors),
            "attention_mask": window.mask(width, self.device),
        }
        positions = self.stage.decode_positions(batch)[..., -width:]
        kept = self.stage.kept_inputs(batch)
        batch["position_ids"] = positions
        if not window.is_ragged:  # see `_decode`
            batch["attention_mask"] = None
        if order.is_part and self._keeps_logits:
            batch["logits_to_keep"] = torch.empty(0, dtype=torch.long, device=self.device)
        output = self._forward(tensors, batch, new.cache)
        new.cache.advance(width)
        if self.stage.is_last:
            new.read.append(tensors["input_ids"])
        if order.is_part:
            self.unfinished[order.rows[0]] = new
            return {} if self.stage.is_last else _onwards(output, _others(tensors))
        last = positions.amax(-1) + 1
        new.positions = (last if last.ndim == 1 else last.amax(0)).tolist()
        places = range(len(order.lengths))
        new.kept = [{name: value[place] for name, value in kept.items()} for place in places]
        if order.copies:
            new.cache.repeat(order.copies)
            new.cache.most = (order.room[0], order.room[1]) if order.room else None
            each = [place for place in places for _ in range(order.copies)]
            new.positions = [new.positions[place] for place in each]
            new.kept = [new.kept[place] for place in each]
        self._join(order.group, new)
        if self.stage.is_last:
            ids_BT, count = torch.cat(new.read, dim=1), order.copies or 1
            lengths = [length for length in order.lengths for _ in range(count)]
            for place, length in enumerate(lengths):
                self._welcome(order, place, ids_BT[place // count], slice(-length, None))
            logits_BV = output[:, -1]
            return self._choose(
                order, logits_BV.repeat_interleave(count, dim=0) if order.copies else logits_BV
            )
        return _onwards(output, _others(tensors))

    def _welcome(self, order: PassOrder, place: int, ids_T: torch.Tensor, prompt_T: slice) -> None:
        """Add a new row on the last stage."""
        sampling = order.settings[place]
        prompt = ids_T[prompt_T] if sampling.repetition_penalty != 1 else None
        row = self.sampled[order.rows[place]] = SampledRow(sampling, prompt, [])
        if sampling.grammar is not None:
            assert self.matchers is not None, "this stage was built without matchers"
            try:
                stop_ids = sampling.stop_token_ids or ()
                row.matcher = self.matchers.make(sampling.grammar, stop_ids=stop_ids)
            except Exception as error:  # its own request ends, and no other
                row.failure = error

    def _whole(self, order: PassOrder, tensors: Tensors) -> Tensors:
        """Choose one more token of rows that are read in full, padded on the right.

        So it serves models that know neither masks nor positions, as long as they look back only.
        """
        output = self._forward(tensors, self._padded_right(order, tensors), None)
        if not self.stage.is_last:
            return _onwards(output, _others(tensors))
        for place, _ in enumerate(order.settings):
            self._welcome(order, place, tensors["input_ids"][place], slice(order.lengths[place]))
        ends = torch.tensor(order.lengths, device=self.device) - 1
        places = torch.arange(len(order.rows), device=self.device)
        return self._choose(order, output[places, ends])

    def _padded_right(self, order: PassOrder, tensors: Tensors) -> dict[str, Any]:
        columns_T = torch.arange(max(order.lengths), device=self.device)
        lengths_B = torch.tensor(order.lengths, device=self.device)
        mask_BT = (columns_T < lengths_B[:, None]).long()
        return {**_others(tensors), "attention_mask": mask_BT}

    def _decode(self, order: PassOrder, tensors: Tensors) -> Tensors:
        """One more token of each row of a group."""
        group = self.groups.get(order.group)
        if group is None:
            raise RuntimeError("keys and values of the group were lost when memory ran out")
        group.arrange(order.rows)
        window = group.cache.window
        group.cache.begin(1)
        if group.position_ids is None:
            group.position_ids = sent(torch.tensor(group.positions)[:, None], self.device)
        batch = {
            # where all rows are of one length nothing is hidden, and kernels without masks serve
            "attention_mask": window.mask(1, self.device) if window.is_ragged else None,
            "position_ids": group.position_ids,
            **self.stage.decode_inputs(group.kept, window.width + 1),
        }
        output = self._forward(tensors, batch, group.cache)
        group.cache.advance(1)
        group.positions = [position + 1 for position in group.positions]
        group.position_ids = group.position_ids + 1
        if self.stage.is_last:
            return self._choose(order, output[:, -1])
        return _onwards(output, {})

    def _forward(self, tensors: Tensors, batch: dict[str, Any], cache: GroupCache | None) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "input_ids"}
        if cache is not None:
            inputs["past_key_values"] = cache
            if self._keeps_logits:
                inputs.setdefault("logits_to_keep", 1)
        extras: list[torch.Tensor] = []
        if self.stage.is_first:
            first = tensors["input_ids"]
        else:
            first = tensors[HIDDEN]
            extras = [value for name, value in tensors.items() if name.startswith(EXTRA)]
        if "input_ids" in batch:
            inputs["input_ids"] = batch["input_ids"]
        return self.stage(first, *extras, **inputs)

    def _choose(self, order: PassOrder, logits_BV: torch.Tensor) -> Tensors:
        rows = [self.sampled[row] for row in order.rows]
        for place, (row, found) in enumerate(zip(rows, choose(logits_BV, rows), strict=True)):
            order.tokens.append(found.token_id)
            order.logprobs.append(found.logprob)
            if found.error is not None:
                is_users = isinstance(found.error, UserError)
                order.row_errors[place] = (is_users, str(found.error))
            row.answer_ids.append(found.token_id)
            if row.matcher is not None and row.matcher.take(found.token_id):
                order.over.append(place)
        if not any(order.logprobs):
            order.logprobs = []
        return {}

    def _score(self, order: PassOrder, tensors: Tensors) -> Tensors:
        """Log-probabilities of the last tokens of each row; keeps nothing."""
        width = max(order.lengths)
        batch: dict[str, Any]
        if self.has_cache:
            window = Window(len(order.rows))
            window.first_columns = [width - length for length in order.lengths]
            batch = {**_others(tensors), "attention_mask": window.mask(width, self.device)}
            batch["position_ids"] = self.stage.decode_positions(batch)
            if self._keeps_logits:
                batch["logits_to_keep"] = max(map(len, order.targets))
        else:
            batch = self._padded_right(order, tensors)
        output = self._forward(tensors, batch, None)
        if not self.stage.is_last:
            return _onwards(output, _others(tensors))
        behind = width - output.shape[1]  # columns that logits were not kept of
        for place, targets in enumerate(order.targets):
            end = (width if self.has_cache else order.lengths[place]) - behind
            logits_TV = output[place, end - len(targets) : end]
            order.scores.append(score_row(logits_TV, targets, num_top=order.num_tops[place]))
        return {}


def can_keep_logits(stage: torch.nn.Module) -> bool:
    """Whether the model can be told to compute logits of only the last places."""
    whole = getattr(stage, "whole", None)
    return whole is not None and "logits_to_keep" in inspect.signature(whole.forward).parameters


def _others(tensors: Tensors) -> Tensors:
    """Return the inputs that every stage reads, without hidden states and the model's extras."""
    return {
        name: value
        for name, value in tensors.items()
        if name != HIDDEN and not name.startswith(EXTRA)
    }


def _onwards(output: Any, others: Tensors) -> Tensors:
    """Return the tensors for the next stage; pixels are not sent on."""
    hidden, *extras = output if isinstance(output, tuple) else (output,)
    small = {
        name: value
        for name, value in others.items()
        if not value.is_floating_point() and not name.startswith("pixel")
    }
    found = {f"{EXTRA}{place:03d}": value for place, value in enumerate(extras)}
    return {HIDDEN: hidden, **found, **small}


GIB = 2**30
SHARE_OF_A_GPU, SHARE_OF_A_HOST = 0.8, 0.25
UNKNOWN_HOST = 4 * GIB  # a guess that no machine is too small for
# Tokens of prompts in one pass. A GPU works through few tokens faster than the host hands out the
# operations on them; a CPU gains nothing by more, and answers that run wait for the pass.
PASS_TOKENS, MOST_PASS_TOKENS = 2048, 2**14
SHARE_OF_A_PASS = 0.1  # share of a GPU's free memory; the cache leaves twice as much
NUM_HELD = 8  # number of activations of the widest matrix that a layer holds at a time
SPARE = 1.25  # buffers are at most this much larger than needed


def cache_budget(
    device: torch.device, *, gib: float | None, processes: int, host_bytes: int | None = None
) -> int:
    """Bytes for the cache of one stage.

    Args:
        gib: as the user says; None: a share of what is free now.
        processes: on this machine, which share its memory.
        host_bytes: what the host could still give; None: not known, and little is taken for it.
    """
    if gib is not None:
        return int(gib * GIB)
    if is_accelerator(device):
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free * SHARE_OF_A_GPU)
    free = UNKNOWN_HOST if host_bytes is None else host_bytes
    return int(free * SHARE_OF_A_HOST / max(1, processes))


def cells_within(budget: int, decoder: StageDecoder) -> int:
    """Tokens whose keys and values fit on this stage; at least one, or a UserError."""
    cells = int(budget / (decoder.bytes_of_a_token() * SPARE))
    if cells < 1:
        raise UserError(
            f"The cache may take {budget / GIB:.2f} GiB on stage {decoder.stage.stage}, and one "
            f"token takes {decoder.bytes_of_a_token()} bytes there. Raise `cache_gib`, or use more "
            "stages."
        )
    return cells
