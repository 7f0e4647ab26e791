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
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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


class CutterFacts(NamedTuple):
    """Tokenizer and rules of the workers; `encoder` tells people how the tokenizer is run."""

    tokenizer: TokenizerInfo
    rules: CutRules
    encoder: str


class ChunkResult(NamedTuple):
    """What became of a chunk: counts of the cutter by name, the first bad lines, their kinds."""

    segments: Segments
    counts: Counter[str]
    num_lines: int
    bad: list[BadLine]
    bad_kinds: Counter[str]


class ChunkWorker:
    """Cuts chunks; the same chunk gives the same bytes in every process."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @cached_property
    def _cutter(self) -> Any:
        cutter = self._task.make_cutter()
        # all workers look at the same documents, so all come to the same encoder
        cutter.encoder.check(sample_texts(self._task))
        return cutter

    def facts(self) -> CutterFacts:
        encoder = self._cutter.encoder
        kind = f"{encoder.kind} ({encoder.note})" if encoder.note else encoder.kind
        return CutterFacts(encoder.info, self._cutter.rules, kind)

    def cut(self, chunk: Chunk) -> ChunkResult:
        rows = self._task.rows(chunk)
        try:
            parts = [self._cutter(rows.texts)]
        except UserError:
            parts = self._cut_one_by_one(rows)
        counts = Counter[str]()
        for _, own in parts:
            counts.update(dataclasses.asdict(own))
        bad = sorted(rows.bad, key=lambda item: item.line)
        segments = Segments.join([one for one, _ in parts])
        return ChunkResult(segments, counts, rows.num_lines, bad, rows.bad_kinds)

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


class OneProcess:
    """No worker: chunks are cut here, when their results are asked for."""

    num_workers = 1

    def __init__(self, task: Task) -> None:
        self._worker = ChunkWorker(task)
        self.facts = self._worker.facts()

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """Begins with a chunk; calling the answer waits for its result."""
        return lambda: self._worker.cut(chunk)

    def close(self) -> None:
        """Ends the workers at once."""


class Processes:
    """Worker processes of this machine.

    Raises:
        UserError: the cutter cannot be made.
        WorkerDied: a worker was killed.
    """

    def __init__(self, task: Task, num_workers: int) -> None:
        self.num_workers = num_workers
        worker = ChunkWorker(task)
        before = dict(os.environ)
        os.environ.update(ONE_THREAD)  # threads of a tokenizer do not survive a fork
        try:
            self.facts = worker.facts()
        finally:
            os.environ.clear()
            os.environ.update(before)
        # forked ones share the tokenizer, and know parts that were imported from files
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_start_worker,
            initargs=(worker, os.getpid()),
        )
        self._results = self._executor._result_queue

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """As of `OneProcess`: whichever worker is free gets the chunk."""
        try:
            future = self._executor.submit(_cut, chunk)
        except BrokenProcessPool as error:
            raise _died() from error
        return lambda: self._result(future)

    def close(self) -> None:
        """Kills the workers: they have nothing to put away."""
        for process in list((self._executor._processes or {}).values()):
            with contextlib.suppress(ValueError):  # it has ended and was closed
                process.kill()
        # one may have been killed in the middle of a result, whose reader would wait for the rest
        self._results._writer.close()  # type: ignore[attr-defined]  # its pipe has no other name
        # a thread that is still ending closes pipes which the interpreter writes to at its own end
        self._executor.shutdown(wait=True)

    def _result(self, future: Future) -> ChunkResult:
        try:
            return future.result()
        except BrokenProcessPool as error:
            raise _died() from error


def ordered(pool: "Pool", chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, ChunkResult]]:
    """The results in the order of the chunks; few are on the way at a time."""
    waiting: deque[tuple[Chunk, Callable[[], ChunkResult]]] = deque()
    most = pool.num_workers * _CHUNKS_A_WORKER
    for chunk in chunks:
        if len(waiting) >= most:
            first, result = waiting.popleft()
            yield first, result()
        waiting.append((dataclasses.replace(chunk, payload=None), pool.submit(chunk)))
    for first, result in waiting:
        yield first, result()


def _died(what: str = "a worker process") -> WorkerDied:
    return WorkerDied(
        f"{what} ended before its chunk was cut; the system kills workers when memory is short, "
        "for example. What was built is kept: run the same command again to go on, with fewer "
        "`num_workers` or a smaller `max_document_bytes` where memory is short."
    )


_worker: ChunkWorker  # that of this process


def _start_worker(worker: ChunkWorker, parent: int) -> None:
    global _worker
    _worker = worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(ONE_THREAD)
    gc.freeze()  # what is there stays: it need not be looked at again and again
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    # a killed parent says nothing, and the pipes to it stay open in the other workers
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _cut(chunk: Chunk) -> ChunkResult:
    return _worker.cut(chunk)


class RayActors:
    """Workers on a Ray cluster: the one that RAY_ADDRESS names, or one of this machine alone.

    Plain files are read where they are cut, so they have to lie on a disk that all machines share.
    Compressed files and Parquet are read by the parent and sent.

    Raises:
        UserError: ray is not installed, a worker cannot make its cutter, or they have different
            tokenizers.
        WorkerDied: one ended; Ray is not asked to start it anew.
    """

    def __init__(self, task: Task, num_workers: int) -> None:
        self.num_workers = num_workers
        try:
            import ray
        except ImportError as error:
            raise UserError(
                "`executor` ray was asked for and the package ray is not installed: pip install "
                "ray, or build with `executor` processes."
            ) from error
        self._ray = ray
        # one that a program around this one started stays when the build is over
        self._is_ours = not self._ray.is_initialized()
        if self._is_ours:
            local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers}
            python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
            self._ray.init(
                log_to_driver=False,
                configure_logging=False,
                include_dashboard=False,
                # workers import from where this program does, also parts beside it
                runtime_env={"env_vars": {**ONE_THREAD, "PYTHONPATH": python_path}},
                **local,
            )
        actor = self._ray.remote(num_cpus=1, max_restarts=0)(ChunkWorker)
        self._actors = [actor.remote(task) for _ in range(num_workers)]
        self._next = itertools.cycle(self._actors)
        try:
            self.facts = self._same_facts()
        except BaseException:
            self.close()
            raise

    def submit(self, chunk: Chunk) -> Callable[[], ChunkResult]:
        """As of `OneProcess`: the next worker in turn gets the chunk."""
        reference = next(self._next).cut.remote(chunk)
        return lambda: self._get(reference)

    def close(self) -> None:
        """Ends the workers, and the cluster where it is of this build alone."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._is_ours:
            self._ray.shutdown()

    def _same_facts(self) -> CutterFacts:
        first, *others = [self._get(actor.facts.remote()) for actor in self._actors]
        if any(other != first for other in others):
            raise UserError(
                "the workers of the Ray cluster have different tokenizers under one path. The "
                "same was expected, because one corpus has one: copy the folder to all machines, "
                "or to a disk that they share."
            )
        return first

    def _get(self, reference: Any) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return self._ray.get(reference)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            raise _died(f"a worker of the Ray cluster ({error})") from error


Pool = OneProcess | Processes | RayActors


def open_pool(task: Task, num_workers: int, executor: str) -> Pool:
    """Workers for a task: processes of this machine, or ray; without workers this process.

    Raises:
        UserError: the executor is not installed.
    """
    if executor == "ray":
        return RayActors(task, max(1, num_workers))
    return Processes(task, num_workers) if num_workers else OneProcess(task)
