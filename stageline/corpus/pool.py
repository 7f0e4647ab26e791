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
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy

from stageline.chaos import point
from stageline.corpus.chunks import CHUNK_BYTES, Chunk, iter_chunks
from stageline.corpus.header import CutRules, Segments, TokenizerInfo
from stageline.corpus.journal import Source
from stageline.corpus.row_text import BadLine, ChunkRows, Document, read_chunk
from stageline.errors import CRASH, UserError

# -- what a worker does with a chunk: rows to documents, documents to segments. Holds no state ----

_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 200_000


@dataclass(frozen=True)
class Task:
    """What all workers are given; it can be pickled.

    Attributes:
        make_cutter: makes what turns texts into (Segments, counts); called once in each worker.
        columns: of Parquet files that documents are made of; None: all.
    """

    sources: Sequence[Source]
    make_cutter: Callable[[], Any]
    document: Document | None
    max_document_bytes: int
    columns: Sequence[str] | None = None
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True)
class CutterFacts:
    """What the workers cut with.

    Attributes:
        encoder: which implementation of the tokenizer is used, for people.
    """

    tokenizer: TokenizerInfo
    rules: CutRules
    encoder: str


@dataclass
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
    bad: list[BadLine] = field(default_factory=list)
    bad_kinds: Counter[str] = field(default_factory=Counter)


class ChunkWorker:
    """Cuts chunks; the same chunk gives the same bytes in every process.

    Raises:
        UserError: the cutter cannot be made.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._cutter = task.make_cutter()
        check = getattr(getattr(self._cutter, "encoder", None), "check", None)
        if check is not None:
            # all workers look at the same documents, so all come to the same encoder
            check(sample_texts(task))

    def facts(self) -> CutterFacts:
        """Tokenizer and rules."""
        encoder = self._cutter.encoder
        note = getattr(encoder, "note", "")
        kind = f"{encoder.kind} ({note})" if note else str(encoder.kind)
        return CutterFacts(encoder.info, self._cutter.rules, kind)

    def __call__(self, chunk: Chunk) -> ChunkResult:
        task = self._task
        rows = read_chunk(chunk, document=task.document, max_document_bytes=task.max_document_bytes)
        point("corpus_worker")
        segments, counts = self._cut(rows)
        bad = sorted(rows.bad, key=lambda item: item.line)
        return ChunkResult(segments, counts, rows.num_lines, bad, rows.bad_kinds)

    def _cut(self, rows: ChunkRows) -> tuple[Segments, dict[str, int]]:
        try:
            segments, counts = self._cutter(rows.texts)
            return segments, _as_dict(counts)
        except UserError:
            return self._cut_one_by_one(rows)

    def _cut_one_by_one(self, rows: ChunkRows) -> tuple[Segments, dict[str, int]]:
        """Finds the document that the cutter refuses, and leaves it out."""
        parts, total = [_no_segments()], Counter[str]()
        for number, text in zip(rows.numbers, rows.texts, strict=True):
            try:
                segments, counts = self._cutter([text])
            except UserError as error:
                rows.refuse(number, "refused", str(error), text)
                continue
            parts.append(segments)
            total.update(_as_dict(counts))
        return join(parts), dict(total)


def sample_texts(task: Task) -> list[str]:
    """Some documents from the beginning of the input."""
    chunks = iter_chunks(
        task.sources,
        max_document_bytes=task.max_document_bytes,
        columns=task.columns,
        chunk_bytes=task.chunk_bytes,
    )
    texts: list[str] = []
    for chunk in chunks:
        rows = read_chunk(chunk, document=task.document, max_document_bytes=task.max_document_bytes)
        texts += rows.texts[:_SAMPLE_DOCUMENTS]
        if texts:
            break
    while len(texts) > 1 and sum(map(len, texts)) > _SAMPLE_CHARACTERS:
        texts.pop()
    return [text[:_SAMPLE_CHARACTERS] for text in texts]


def join(parts: Sequence[Segments]) -> Segments:
    """One behind the other."""
    return Segments(
        *(
            numpy.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens", "lengths", "flags")
        )
    )


def _no_segments() -> Segments:
    return Segments(
        numpy.zeros(0, numpy.uint32), numpy.zeros(0, numpy.int64), numpy.zeros(0, numpy.uint8)
    )


def _as_dict(counts: Any) -> dict[str, int]:
    return {name: int(value) for name, value in dataclasses.asdict(counts).items()}


# -------------------------------------------------------------------------------------------------

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
        self._worker = ChunkWorker(task)

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
            made = ChunkWorker(task) if has_fork else task
        self._facts = made.facts() if isinstance(made, ChunkWorker) else None
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork" if has_fork else "spawn"),
            initializer=_start_worker,
            initargs=(made, os.getpid()),
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
            raise _died() from error
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
        "was built is kept: run the same command again to go on, with fewer `num_workers` or a "
        "smaller `max_document_bytes` where memory is short."
    )


_given: Task | ChunkWorker | None = None


def _start_worker(given: Task | ChunkWorker, parent: int) -> None:
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


def _worker() -> ChunkWorker:
    global _given
    if not isinstance(
        _given, ChunkWorker
    ):  # here, not at the start: so its errors come back as they are
        assert _given is not None
        _given = ChunkWorker(_given)
    return _given


def _facts() -> CutterFacts:
    return _worker().facts()


def _cut(chunk: Chunk) -> ChunkResult:
    return _worker()(chunk)


# -- cuts chunks on the machines of a Ray cluster; the parent writes, as with processes -----------
# Plain files are read where they are cut, so they have to lie on a disk that all machines share.
# Compressed files and Parquet are read by the parent and sent.


class RayActors:
    """Workers on a Ray cluster: the one that RAY_ADDRESS names, or one of this machine alone.

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
        actor = self._ray.remote(num_cpus=1, max_restarts=0)(_Actor)
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
            raise WorkerDied(
                f"a worker of the Ray cluster ended before its chunk was cut ({error}). Workers "
                "were expected to live as long as the build. What was built is kept: run the same "
                "command again to go on, with fewer `num_workers` where memory is short."
            ) from error


class _Actor:
    """A `ChunkWorker` behind Ray."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._worker: ChunkWorker | None = None

    def _made(self) -> ChunkWorker:
        if self._worker is None:  # here, not at the start: so its errors come back as they are
            self._worker = ChunkWorker(self._task)
        return self._worker

    def facts(self) -> CutterFacts:
        return self._made().facts()

    def cut(self, chunk: Chunk) -> ChunkResult:
        return self._made()(chunk)


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
