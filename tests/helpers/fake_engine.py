"""A decoding engine without a model: it gives set answers, slowly, fails, and can be cancelled.

It keeps to the interface and the order of events of the true one.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stageline.data.text.processor import get_tokenizer
from stageline.inference.decoding.grammars import Matchers
from stageline.inference.decoding.request import (
    AnswerPiece,
    EngineStats,
    Failed,
    Finished,
    Listener,
    Request,
    Scored,
    ScoreRequest,
    TokenLogprob,
)

Reply = Callable[[Request], "str | Exception"]


@dataclass
class _Task:
    """One request that is answered."""

    request: Request
    listener: Listener
    ids: list[int] = field(default_factory=list)
    error: Exception | None = None
    place: int = 0
    text: str = ""
    given: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)


class FakeEngine:
    """Answers with the tokens of `reply(request)`, one of each request at a time.

    Args:
        reply: the whole answer, or an exception that the request fails with.
        seconds: between two tokens.

    Attributes:
        asked: all requests that were handed in.
        most_at_once: requests that ran at the same time.
    """

    def __init__(
        self,
        processor: Any,
        *,
        reply: Reply | str = "Yes, it is.",
        seconds: float = 0.0,
        max_running: int = 4,
        max_length: int | None = 2048,
        model_name: str = "fake",
    ) -> None:
        self.processor = processor
        self.matchers = Matchers(lambda: get_tokenizer(processor))
        self.model_name = model_name
        self.stop_ids = (2, 3)
        self.max_length = max_length
        self.seconds = seconds
        self.max_running = max_running
        self.reply: Reply = (lambda _: reply) if isinstance(reply, str) else reply
        self.is_healthy = True
        self.asked: list[Request] = []
        self.cancelled: list[str] = []
        self.most_at_once = 0
        self._queue: list[_Task] = []
        self._running: list[_Task] = []
        self._cancel: set[str] = set()
        self._change = threading.Condition()
        self._is_stopped = False
        self._thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self) -> "FakeEngine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(10)

    def submit(self, request: Request | ScoreRequest, listener: Listener) -> None:
        """Take a request; a score is reported at once."""
        if isinstance(request, ScoreRequest):
            values = (-0.5,) * request.num_targets
            tops = [tuple((n, -0.1 - n) for n in range(request.num_top))] * request.num_targets
            listener(Scored(request.key, values, False, tuple(tops)))
            return
        with self._change:
            self.asked.append(request)
            self._queue.append(_Task(request, listener))
            self._change.notify_all()

    def cancel(self, key: str) -> None:
        """Cancel a request that has not ended."""
        with self._change:
            self._cancel.add(key)
            self._change.notify_all()

    def stop(self) -> None:
        """Ends `run`."""
        with self._change:
            self._is_stopped = True
            self._change.notify_all()

    def stats(self) -> EngineStats:
        """Return numbers of this moment."""
        with self._change:
            waiting, running = len(self._queue), len(self._running)
        return EngineStats(waiting, running, self.max_running, 0, 0, 1, 0, 1000, self.is_healthy)

    def run(self) -> None:
        """Works until `stop`."""
        while True:
            with self._change:
                while not (self._queue or self._running or self._is_stopped):
                    self._change.wait(1)
                if self._is_stopped:
                    return
                self._drop_cancelled()
                self._admit()
                tasks = list(self._running)
            for task in tasks:
                self._step(task)
            time.sleep(self.seconds)

    def _drop_cancelled(self) -> None:
        for tasks in (self._queue, self._running):
            for task in [one for one in tasks if one.request.key in self._cancel]:
                tasks.remove(task)
                self.cancelled.append(task.request.key)
                task.listener(self._finished(task, "cancelled"))
        self._cancel.clear()

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.max_running:
            task = self._queue.pop(0)
            answer = self.reply(task.request)
            if isinstance(answer, Exception):
                task.error = answer
            else:
                tokenizer = get_tokenizer(self.processor)
                task.ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            self._running.append(task)
        self.most_at_once = max(self.most_at_once, len(self._running))

    def _step(self, task: _Task) -> None:
        if task.error is not None:
            self._end(task, Failed(task.request.key, task.error))
            return
        sampling = task.request.sampling
        if task.place == len(task.ids):
            self._tell(task, task.text, ())
            self._end(task, self._finished(task, "stop"))
            return
        token_id = task.ids[task.place]
        task.place += 1
        tokenizer = get_tokenizer(self.processor)
        text = tokenizer.decode(task.ids[: task.place], skip_special_tokens=True)
        ends = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        task.text = text[: min(ends)] if ends else text
        is_last = bool(ends) or task.place == sampling.max_new_tokens
        self._tell(task, task.text if is_last else _safe(text, sampling.stop), (token_id,))
        if is_last:
            self._end(task, self._finished(task, "stop" if ends else "length"))

    def _tell(self, task: _Task, text: str, ids: tuple[int, ...]) -> None:
        """A piece: what of the text so far was not told yet."""
        told: list[TokenLogprob] = []
        num_top = task.request.sampling.logprobs
        for token_id in ids if num_top is not None else ():
            top = tuple((token_id + n, -0.5 - n) for n in range(num_top))
            told.append(TokenLogprob(token_id, -0.5, top))
        task.logprobs += told
        if ids or text[task.given :]:
            key = task.request.key
            task.listener(AnswerPiece(key, text[task.given :], ids, tuple(told)))
        task.given = max(task.given, len(text))

    def _end(self, task: _Task, event: Finished | Failed) -> None:
        with self._change:
            if task in self._running:
                self._running.remove(task)
        task.listener(event)

    def _finished(self, task: _Task, reason: Any) -> Finished:
        return Finished(
            key=task.request.key,
            reason=reason,
            prompt_tokens=task.request.prompt["input_ids"].shape[1],
            completion_tokens=task.place,
            text=task.text,
            token_ids=tuple(task.ids[: task.place]),
            logprobs=tuple(task.logprobs),
        )


def _safe(text: str, stops: tuple[str, ...]) -> str:
    """Return the text without an unfinished character and without what may begin a stop string."""
    text = text.rstrip("\ufffd")
    sizes = [
        size
        for stop in stops
        for size in range(1, min(len(text), len(stop)) + 1)
        if stop.startswith(text[-size:])
    ]
    return text[: len(text) - max(sizes, default=0)]
