"""The decoding engine: takes requests, keeps all stages at work, hands out answers.

It runs on the first stage's rank. `submit` and `cancel` may be called from any thread; all else
happens in the one thread that drives it: `run` for a server, `answer` and `score` for a batch.
"""

import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from stageline.device import sent
from stageline.errors import UserError
from stageline.inference.decoding.answer import AnswerText, Running, ScoreQueue, check_row
from stageline.inference.decoding.chain import Chain, max_in_flight
from stageline.inference.decoding.grammars import Matchers
from stageline.inference.decoding.request import (
    EngineError,
    EngineStats,
    Failed,
    Finished,
    Listener,
    PassOrder,
    Prompt,
    Request,
    Scored,
    ScoreRequest,
    adapters_of,
    answer_room,
    is_alone,
    length_of,
    padded_right,
    part_of,
    together,
)
from stageline.inference.decoding.scheduler import Limits, Prefill, Scheduler
from stageline.inference.decoding.scheduler import Sequence as Scheduled

Item = TypeVar("Item", Request, ScoreRequest)
Result = TypeVar("Result")
SECONDS_BETWEEN_SIGNS = 30.0  # an idle engine asks so often whether all stages are there
DEFAULT_LIMITS = Limits()
# A step on few rows takes as long as one on a few more: all weights are read. So fewer rows are not
# divided among groups (benchmarks/decoding_cpu_2026-11-22.md).
ROWS_OF_A_GROUP = 8


class DecodingEngine:
    """Answers requests on a chain of stages.

    Args:
        chain: the stages; this process has the first one.
        tokenizer: for the texts of answers.
        processor: what prompts are encoded with.
        config: of the first stage's model.
        stop_ids: tokens that end an answer, where a request names none.
        device: where the first stage reads.
        prompt_cells: room in the cache that the images of a prompt take, in tokens.
        has_cache: the stages keep keys and values; else each token reads its whole row again.
        reads_in_pieces: the stages can read a prompt of text in several passes.
        matchers: check grammars; None: made of the tokenizer.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        tokenizer: Any,
        processor: Any = None,
        config: Any = None,
        limits: Limits = DEFAULT_LIMITS,
        stop_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        model_name: str = "model",
        prompt_cells: Callable[[Prompt], int] = lambda prompt: 0,
        has_cache: bool = True,
        reads_in_pieces: bool = False,
        matchers: Matchers | None = None,
    ) -> None:
        self.chain = chain
        self.tokenizer = tokenizer
        self.processor = tokenizer if processor is None else processor
        self.config, self.limits = config, limits
        self.stop_ids = tuple(stop_ids)
        self.device = torch.device(device)
        self.model_name = model_name
        self.prompt_cells = prompt_cells
        self.has_cache, self.reads_in_pieces = has_cache, reads_in_pieces and has_cache
        self.matchers = matchers or Matchers(lambda: tokenizer)
        self.is_healthy = True
        least = ROWS_OF_A_GROUP if has_cache else 1  # whole rows are bound by arithmetic
        self._scheduler = Scheduler(
            limits,
            best_groups=lambda num_rows: max(1, min(chain.num_stages, num_rows // least)),
            num_stages=chain.num_stages,
        )
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, Running] = {}
        self._scores = ScoreQueue(limits, pads_right=not has_cache)
        self._numbers = itertools.count(1)
        self._is_stopping, self._door, self._is_over = threading.Event(), threading.Lock(), False
        self._prompt_tokens = self._completion_tokens = 0

    @property
    def max_length(self) -> int:
        """Longest prompt with its answer, in tokens."""
        return self.limits.max_length

    def submit(self, request: Request | ScoreRequest, listener: Listener) -> None:
        """Queues a request.

        Args:
            listener: is called in the engine's thread with each `AnswerPiece`, then once with
                `Finished` (`Scored`) or `Failed`; it must return at once. If it raises, it is
                called no more, its request ends as if cancelled, and all others continue.

        Raises:
            UserError: the request can't be answered: its prompt is empty or too long.
            EngineError: the engine was stopped, or broke down.
        """
        if isinstance(request, ScoreRequest):
            check_row(request, self.limits)
            take = functools.partial(self._scores.add, request, listener)
        else:
            take = functools.partial(self._admit, self._running_of(request, listener))
        with self._door:
            if self._is_over:
                raise EngineError("the engine was stopped")
            self._inbox.put(take)

    def cancel(self, key: str) -> None:
        """Ends a request, if it still runs; its listener gets `Finished` with "cancelled".

        A score that waits fails with `Cancelled`.
        """
        self._inbox.put(lambda: self._cancel(key))

    def stop(self) -> None:
        """Makes `run` return; requests that run get `Failed`."""
        self._is_stopping.set()
        self._inbox.put(lambda: None)

    def stats(self) -> EngineStats:
        """Return counts of requests, tokens and cache; they may be out of date by a moment."""
        scheduler = self._scheduler
        return EngineStats(
            queued=len(scheduler.waiting) + self._inbox.qsize() + len(self._scores.waiting),
            running=scheduler.num_running,
            max_running=self.limits.max_rows,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_groups=len(scheduler.groups),
            cache_cells=scheduler.num_cells,
            max_cache_cells=self.limits.max_cells,
            is_healthy=self.is_healthy,
        )

    def run(self) -> None:
        """Answers what is submitted until `stop` is called."""
        try:
            while not self._is_stopping.is_set():
                if self._act():
                    continue
                self._tell_who_left()
                try:
                    self._inbox.get(timeout=SECONDS_BETWEEN_SIGNS)()
                except queue.Empty:  # are all stages there?
                    self._order(PassOrder("tidy"))
                    self._take(self.chain.result())
            self._fail_all(EngineError("the engine was stopped"))
        except BaseException as error:
            self.is_healthy = False
            self._fail_all(EngineError(f"the engine broke down: {error}"))
            raise

    def answer(self, requests: Iterable[Request]) -> Iterator[Finished | Failed]:
        """Answers requests in this thread; yields answers as they are done."""
        done: deque[Finished | Failed] = deque()

        def listen(event: Any) -> None:
            if isinstance(event, Finished | Failed):
                done.append(event)

        def add(request: Request) -> None:
            self._admit(self._running_of(request, listen))

        try:
            yield from self._drain(requests, done, add, num_waiting=lambda: len(self._running))
        finally:  # also if the caller stops iterating
            if self.is_healthy:
                for key in list(self._running):
                    self._cancel(key)
                while self._running or self.chain.num_in_flight:
                    self._act()
                self._tell_who_left()

    def _tell_who_left(self) -> None:
        if self._scheduler.leaving:
            self._order(PassOrder("tidy"))
            self._take(self.chain.result())

    def score(self, items: Iterable[ScoreRequest]) -> Iterator[Scored | Failed]:
        """Scores the last tokens of rows, in this thread; in the order in which it is done."""
        done, scores = deque[Scored | Failed](), self._scores

        def add(item: ScoreRequest) -> None:
            check_row(item, self.limits)
            scores.add(item, done.append)

        try:
            yield from self._drain(items, done, add, num_waiting=lambda: len(scores.waiting))
        finally:  # also if the caller stops iterating
            if self.is_healthy:
                scores.waiting.clear()
                while scores.has_work:
                    self._act()

    def _drain(
        self,
        items: Iterable[Item],
        done: deque[Result],
        add: Callable[[Item], None],
        *,
        num_waiting: Callable[[], int],
    ) -> Iterator[Result | Failed]:
        """Take items in, enough to keep the stages busy, and yield their results."""
        source, is_over = iter(items), False
        while not is_over or done or self._running or self._scores.has_work:
            while not is_over and num_waiting() < 2 * self.limits.max_rows:
                item = next(source, None)
                is_over = item is None
                if item is None:
                    break
                try:
                    add(item)
                except UserError as error:
                    yield Failed(item.key, error)
            while done:
                yield done.popleft()
            if self._running or self._scores.has_work:
                self._act()

    def close(self) -> None:
        """Lets the other ranks go; nothing is answered any more."""
        while self.chain.num_in_flight:
            self.chain.result()
        if self.chain.num_stages > 1:
            self._order(PassOrder("stop"))
            self.chain.result()

    def _act(self) -> bool:
        """Handle new requests, then start a pass or take a result; False: nothing to do."""
        try:
            while not self._inbox.empty():
                self._inbox.get()()
            if self._start_next():
                return True
            if is_back := self.chain.num_in_flight > 0:
                self._take(self.chain.result())
            return is_back
        except BaseException:  # a stage reports a failed pass in its order, not as an exception
            self.is_healthy = False
            raise

    def _start_next(self) -> bool:
        if self.chain.num_in_flight >= max_in_flight(self.chain.num_stages):
            return False
        # one at a time where there are answers, which would wait for all of them
        if self._scores.waiting and not (self._running and self._scores.is_on_its_way):
            self._order(*self._scores.next_order())
            return True
        found = self._scheduler.next_prefill()
        if found is not None:
            self._read(found)
            return True
        joins = self._scheduler.next_joins()
        group = self._scheduler.next_step(may_wait=not joins)
        if group is None:
            return False
        # one more token of each row of the group
        owners = [one.owner for one in group.members]
        order = PassOrder("decode", group=group.number, rows=[one.row for one in group.members])
        order.adapters = adapters_of(owner.request for owner in owners)
        if self.has_cache:
            order.join = joins
            ids = {"input_ids": torch.tensor([[owner.last_token] for owner in owners])}
        else:
            rows = [owner.row_ids() for owner in owners]
            order.kind, order.lengths = "whole", list(map(len, rows))
            ids = padded_right(rows)
        self._order(order, ids)
        return True

    def _read(self, found: Prefill) -> None:
        """Starts the pass that reads prompts, or a piece of one."""
        owners = [one.owner for one in found.chosen]
        order = PassOrder(
            "prefill" if self.has_cache else "whole",
            group=found.group.number,
            rows=[one.row for one in found.chosen],
            adapters=adapters_of(owner.request for owner in owners),
            lengths=[one.length for one in found.chosen],
        )
        if found.piece is not None:
            order.piece = [found.piece.start, found.piece.stop]
        if not order.is_part:
            order.settings = [owner.request.sampling for owner in owners]
        if self.has_cache:
            read = [owner.request.prompt for owner in owners]
            if found.piece is not None:
                read = [part_of(prompt, found.piece) for prompt in read]
            self._order(order, together(read))
        else:
            self._order(order, padded_right([owner.row_ids() for owner in owners]))
        self._prompt_tokens += sum(order.lengths) if found.piece is None else len(found.piece)

    def _order(self, order: PassOrder, tensors: dict[str, torch.Tensor] | None = None) -> None:
        order.number = next(self._numbers)
        order.leave += self._scheduler.take_leaving()
        on_device = {name: sent(value, self.device) for name, value in (tensors or {}).items()}
        self.chain.start(order, on_device)

    def _take(self, order: PassOrder) -> None:
        """Pass the results of an order on to its requests."""
        if order.kind == "score":
            self._scores.take(order)
        if order.kind not in ("prefill", "decode", "whole"):
            return
        by_row = self._scheduler.running_by_row()
        for place, row in enumerate(order.rows):
            # a piece brings nothing but its failure
            if row not in by_row or (order.error is None and order.is_part):
                continue
            running: Running = by_row[row].owner
            before = running.num_tokens
            running.take_from(order, place)
            self._completion_tokens += running.num_tokens - before
            if running.is_over:
                self._scheduler.leave(by_row[row])
                self._running.pop(running.key, None)
        if not order.is_part:
            self._scheduler.came_home(order.group)

    def _running_of(self, request: Request, listener: Listener) -> Running:
        """The request with an answer that there is room for, and with all tokens that end it.

        Raises:
            UserError: no token fits, or the model can't take images or the grammar.
        """
        prompt, sampling, limits = request.prompt, request.sampling, self.limits
        length, cells = length_of(prompt), self.prompt_cells(prompt)
        room = limits.max_length if limits.max_cells is None else limits.max_cells - cells
        images = f", and its images take as much room as {cells} more" if cells else ""
        room = answer_room(length, min(limits.max_length, room), images=images)
        most = min(sampling.max_new_tokens, room)
        if not self.has_cache and is_alone(prompt):
            raise UserError(
                "The prompt has images, and this model keeps no keys and values (can_decode is "
                "False): it would look at them for every token. Send only text."
            )
        if sampling.grammar is not None:
            self.matchers.check(sampling.grammar)
        ends = self.stop_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
        if limits.short_length is not None and not limits.is_long(length):
            # no pass reads the last token
            most = min(most, limits.short_length + 1 - length)
        sampling = replace(sampling, max_new_tokens=most, stop_token_ids=ends)
        text = AnswerText(self.tokenizer, sampling.stop, ends)
        return Running(replace(request, sampling=sampling), listener, text)

    def _admit(self, running: Running) -> None:
        if running.key in self._running:
            running.fail(UserError(f"the key {running.key!r} runs already: keys must differ"))
            return
        self._running[running.key] = running
        prompt = running.request.prompt
        length, has_images = length_of(prompt), is_alone(prompt)
        longest = length + running.request.sampling.max_new_tokens
        self._scheduler.waiting.append(
            Scheduled(
                row=next(self._numbers),
                length=length,
                longest=longest + self.prompt_cells(prompt),
                is_alone=has_images,
                owner=running,
                may_be_cut=self.reads_in_pieces and not has_images,
                is_long=self.limits.is_long(length),
            )
        )

    def _cancel(self, key: str) -> None:
        running = self._running.get(key)
        if running is None:
            self._scores.cancel(key)
            return
        running.is_cancelled = True  # if a pass has it, it ends when that is back
        if self._scheduler.withdraw(running):
            running.finish("cancelled")
            del self._running[key]

    def _fail_all(self, error: Exception) -> None:
        with self._door:
            self._is_over = True
        while not self._inbox.empty():
            self._inbox.get()()
        for running in self._running.values():
            running.fail(error)
        self._running.clear()
        self._scores.fail_all(error)
