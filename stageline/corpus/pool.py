"""Worker processes that cut chunks, and the order in which their results come back.

A pool takes chunks and gives results; `ordered` keeps a bounded number of them on the way. The
workers of a parent that was killed end by themselves.
"""

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from stageline.chaos import point
from stageline.corpus.header import CutRules, Segments, TokenizerInfo
from stageline.corpus.input import (
    CHUNK_BYTES,
    BadLine,
    Chunk,
    ChunkRows,
    Document,
    Source,
    iter_chunks,
    read_chunk,
)
from stageline.errors import CRASH, UserError

_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 200_000
_SECONDS_BETWEEN_LOOKS = 0.5
# chunks on the way for each worker: one is cut, the others wait, or wait to be written
_CHUNKS_A_WORKER = 4
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Task:
    """What all workers are given; it can be pickled.

    Attributes:
        make_cutter: makes what turns texts into (Segments, counts); called once in each worker.
        columns: of Parquet files that documents are made of; None: all.
    """

    sources: Sequence[Source]
    make_cutter: Callable[[], Any]
    document: Document
    max_document_bytes: int
    columns: Sequence[str] | None = None
    chunk_bytes: int = CHUNK_BYTES

    def chunks(self, file: int = 0, part: int = 0) -> Iterator[Chunk]:
        """All chunks in order, from one on."""
        return iter_chunks(
            self.sources,
            first=(file, part),
            max_document_bytes=self.max_document_bytes,
            columns=self.columns,
            chunk_bytes=self.chunk_bytes,
        )

    def rows(self, chunk: Chunk) -> ChunkRows:
        """The documents of a chunk."""
        limit = self.max_document_bytes
        return read_chunk(chunk, document=self.document, max_document_bytes=limit)


@dataclass(frozen=True)
class CutterFacts:
    """What the workers cut with.

    Attributes:
        encoder: which implementation of the tokenizer is used, for people.
    """

    tokenizer: TokenizerInfo
    rules: CutRules
    encoder: str


@dataclass(frozen=True)
class ChunkResult:
    """What became of a chunk.

    Attributes:
        counts: those of the cutter, by name.
        bad: the first bad lines, counted from 1 in the chunk.
        bad_kinds: how many of which kind.
    """

    segments: Segments
    counts: dict[str, int]
    num_lines: int
    bad: list[BadLine]
    bad_kinds: Counter[str]


class ChunkWorker:
    """Cuts chunks; the same chunk gives the same bytes in every process. Holds no other state.

    The cutter is made when it is first needed, so that its `UserError` comes back as it is.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    @cached_property
    def _cutter(self) -> Any:
        cutter = self._task.make_cutter()
        # all workers look at the same documents, so all come to the same encoder
        cutter.encoder.check(sample_texts(self._task))
        return cutter

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        encoder = self._cutter.encoder
        kind = f"{encoder.kind} ({encoder.note})" if encoder.note else encoder.kind
        return CutterFacts(encoder.info, self._cutter.rules, kind)

    def cut(self, chunk: Chunk) -> ChunkResult:
        """The segments of a chunk."""
        rows = self._task.rows(chunk)
        point("corpus_worker")
        try:
            parts = [self._cutter(rows.texts)]
        except UserError:
            parts = self._cut_one_by_one(rows)
        counts = Counter[str]()
        for _, own in parts:
            counts.update(dataclasses.asdict(own))
        bad = sorted(rows.bad, key=lambda item: item.line)
        segments = Segments.join([one for one, _ in parts])
        return ChunkResult(segments, dict(counts), rows.num_lines, bad, rows.bad_kinds)

    def _cut_one_by_one(self, rows: ChunkRows) -> list[tuple[Segments, Any]]:
        """Finds the document that the cutter refuses, and leaves it out."""
        parts = []
        for number, text in zip(rows.numbers, rows.texts, strict=True):
            try:
                parts.append(self._cutter([text]))
            except UserError as error:
                rows.refuse(number, "refused", str(error), text)
        return parts


def sample_texts(task: Task) -> list[str]:
    """Some documents from the beginning of the input."""
    texts = next((texts for chunk in task.chunks() if (texts := task.rows(chunk).texts)), [])
    texts = texts[:_SAMPLE_DOCUMENTS]
    while len(texts) > 1 and sum(map(len, texts)) > _SAMPLE_CHARACTERS:
        texts.pop()
    return [text[:_SAMPLE_CHARACTERS] for text in texts]


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
        self._worker = ChunkWorker(task)

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        return self._worker.facts()

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """The answer cuts the chunk."""
        return lambda: self._worker.cut(chunk)

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
        worker = ChunkWorker(task)
        with _one_thread():
            self._facts = worker.facts() if has_fork else None
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork" if has_fork else "spawn"),
            initializer=_start_worker,
            initargs=(worker, os.getpid()),
        )
        self._results = self._executor._result_queue

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        return self._facts or self._result(self._executor.submit(_facts))

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """Hands a chunk to whichever worker is free."""
        try:
            future = self._executor.submit(_cut, chunk)
        except BrokenProcessPool as error:
            raise _died("a worker process") from error
        return lambda: self._result(future)

    def close(self) -> None:
        """Kills the workers: they have nothing to put away."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with contextlib.suppress(ValueError):  # it has ended and was closed
                process.kill()
        # one may have been killed in the middle of a result, whose reader would wait for the rest
        self._results._writer.close()  # type: ignore[attr-defined]  # its pipe has no other name

    def _result(self, future: Future) -> Any:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise _died("a worker process") from error


def open_pool(task: Task, num_workers: int, executor: str) -> Pool:
    """Workers for a task; 0 of them: this process.

    Raises:
        UserError: no such executor or number, or it is not installed.
    """
    if num_workers < 0:
        raise UserError(f"`num_workers` is {num_workers}; 0 or more was expected.")
    if executor == "ray":
        return RayActors(task, max(1, num_workers))
    if executor != "processes":
        raise UserError(f"`executor` is {executor!r}; processes or ray was expected.")
    return Processes(task, num_workers) if num_workers else OneProcess(task)


def ordered(pool: Pool, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, ChunkResult]]:
    """The results in the order of the chunks; few are on the way at a time."""
    waiting: deque[tuple[Chunk, Callable[[], ChunkResult]]] = deque()
    most = pool.num_workers * _CHUNKS_A_WORKER
    for chunk in chunks:
        waiting.append((dataclasses.replace(chunk, payload=None), pool.submit(chunk)))
        if len(waiting) >= most:
            first, result = waiting.popleft()
            yield first, result()
    while waiting:
        first, result = waiting.popleft()
        yield first, result()


def _died(what: str) -> WorkerDied:
    return WorkerDied(
        f"{what} ended before its chunk was cut. Workers were expected to live as long as the "
        "build; the system kills them when memory is short, for example. What was built is kept: "
        "run the same command again to go on, with fewer `num_workers` or a smaller "
        "`max_document_bytes` where memory is short."
    )


_worker: ChunkWorker  # of this process


def _start_worker(worker: ChunkWorker, parent: int) -> None:
    global _worker
    _worker = worker
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


def _facts() -> CutterFacts:
    return _worker.facts()


def _cut(chunk: Chunk) -> ChunkResult:
    return _worker.cut(chunk)


class RayActors:
    """Workers on a Ray cluster: the one that RAY_ADDRESS names, or one of this machine alone.

    Plain files are read where they are cut, so they have to lie on a disk that all machines share.
    Compressed files and Parquet are read by the parent and sent.

    Raises:
        UserError: ray is not installed, or a worker cannot make its cutter.
        WorkerDied: one ended; Ray is not asked to start it anew.
    """

    def __init__(self, task: Task, num_workers: int) -> None:
        self.num_workers = num_workers
        self._ray = _import_ray()
        # one that a program around this one started stays when the build is over
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers}
            self._ray.init(
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False,
                runtime_env={"env_vars": {**ONE_THREAD, "PYTHONPATH": _python_path()}},
                **local,
            )
        actor = self._ray.remote(num_cpus=1, max_restarts=0)(ChunkWorker)
        self._actors = [actor.remote(task) for _ in range(num_workers)]
        self._next = itertools.cycle(self._actors)

    def facts(self) -> CutterFacts:
        """Tokenizer and rules, the same of all workers.

        Raises:
            UserError: the workers see different tokenizers.
        """
        facts = [self._get(actor.facts.remote()) for actor in self._actors]
        if any(other != facts[0] for other in facts):
            raise UserError(
                "the workers of the Ray cluster have different tokenizers under one path. The "
                "same was expected, because one corpus has one: copy the folder to all machines, "
                "or to a disk that they share."
            )
        return facts[0]

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """Hands a chunk to the next worker in turn."""
        reference = next(self._next).cut.remote(chunk)
        return lambda: self._get(reference)

    def close(self) -> None:
        """Ends the workers, and the cluster where it is of this build alone."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            self._ray.shutdown()

    def _get(self, reference: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return self._ray.get(reference)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise _died(f"a worker of the Ray cluster ({error})") from error


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "`executor` ray was asked for and the package ray is not installed: pip install "
            "ray, or build with `executor` processes."
        ) from error
    return ray


def _python_path() -> str:
    """Where this program imports from: workers need the same, also parts beside it."""
    import sys

    return os.pathsep.join(path or os.getcwd() for path in sys.path)
