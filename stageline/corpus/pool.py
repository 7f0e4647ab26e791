"""Worker processes that cut chunks, and the order in which their results come back.

A pool takes chunks and gives results; `ordered` keeps a bounded number of them on the way. The
workers of a parent that was killed end by themselves.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from stageline.corpus.chunks import Chunk
from stageline.corpus.worker import ChunkResult, CutterFacts, Task, Worker
from stageline.errors import CRASH

_SECONDS_BETWEEN_LOOKS = 0.5
# chunks on the way for each worker: one is cut, the others wait, or wait to be written
_CHUNKS_A_WORKER = 4
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


class WorkerDied(RuntimeError):
    """A worker process ended from outside; what was built is kept."""

    exit_code = CRASH
    kind = "crash"


class Pool(Protocol):
    """Where chunks are cut."""

    num_workers: int

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """Begins with a chunk; the answer waits for its result."""

    def close(self) -> None:
        """Ends the workers at once."""


class OneProcess:
    """No worker: chunks are cut here, when their results are asked for."""

    num_workers = 1

    def __init__(self, task: Task) -> None:
        self._worker = Worker(task)

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        return self._worker.facts()

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """The answer cuts the chunk."""
        return lambda: self._worker(chunk)

    def close(self) -> None:
        """Nothing is left."""


class Processes:
    """Worker processes of this machine.

    Raises:
        UserError: a worker cannot make its cutter.
        WorkerDied: one was killed.
    """

    def __init__(self, task: Task, num_workers: int) -> None:
        self.num_workers = num_workers
        # forked ones share the tokenizer, and know parts that were imported from files
        has_fork = "fork" in multiprocessing.get_all_start_methods()
        with _one_thread():
            made = Worker(task) if has_fork else task
        self._facts = made.facts() if isinstance(made, Worker) else None
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork" if has_fork else "spawn"),
            initializer=_start_worker,
            initargs=(made, os.getpid()),
        )

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        return self._facts or self._result(self._executor.submit(_facts))

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """Hands a chunk to whichever worker is free."""
        try:
            future = self._executor.submit(_cut, chunk)
        except BrokenProcessPool as error:
            raise _died() from error
        return lambda: self._result(future)

    def close(self) -> None:
        """Kills the workers: they have nothing to put away."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with contextlib.suppress(ValueError):  # it has ended and was closed
                process.kill()

    def _result(self, future: Future) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise _died() from error


def ordered(pool: Pool, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, ChunkResult]]:
    """The results in the order of the chunks; few are on the way at a time."""
    waiting: deque[tuple[Chunk, Callable[[], ChunkResult]]] = deque()
    most = pool.num_workers * _CHUNKS_A_WORKER
    for chunk in chunks:
        waiting.append((_without_payload(chunk), pool.submit(chunk)))
        if len(waiting) >= most:
            first, result = waiting.popleft()
            yield first, result()
    while waiting:
        first, result = waiting.popleft()
        yield first, result()


def _without_payload(chunk: Chunk) -> Chunk:
    return chunk if chunk.payload is None else Chunk(**{**vars(chunk), "payload": None})


def _died() -> WorkerDied:
    return WorkerDied(
        "a worker process ended before its chunk was cut, killed from outside: by the system when "
        "memory is short, for example. Workers were expected to live as long as the build. What "
        "was built is kept: run the same command again to go on, with fewer --num-workers or a "
        "smaller --max-document-bytes where memory is short."
    )


_given: Task | Worker | None = None


def _start_worker(given: Task | Worker, parent: int) -> None:
    global _given
    _given = given
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(ONE_THREAD)
    gc.freeze()  # what is there stays: it need not be looked at again and again
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # threads of a tokenizer do not survive a fork, and a worker is one core: more would be others'
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_with(parent: int) -> None:
    # a killed parent says nothing, and the pipes to it stay open in the other workers
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _worker() -> Worker:
    global _given
    if not isinstance(
        _given, Worker
    ):  # here, not at the start: so its errors come back as they are
        assert _given is not None
        _given = Worker(_given)
    return _given


def _facts() -> CutterFacts:
    return _worker().facts()


def _cut(chunk: Chunk) -> ChunkResult:
    return _worker()(chunk)
