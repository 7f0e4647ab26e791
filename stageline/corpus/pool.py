"""Worker processes that cut chunks, and the order in which their results come back.

A pool takes chunks and gives results; `ordered` keeps a bounded number of them on the way. The
workers of a parent that was killed end by themselves.
"""

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
# chunks on the way for each worker: one is cut, the others wait, or wait to be written
_CHUNKS_A_WORKER = 4
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Task:
    """Input and settings of all workers."""

    sources: Sequence[Source]
    make_cutter: Callable[[], Any]  # makes what turns texts into (Segments, counts)
    document: Document
    max_document_bytes: int
    columns: Sequence[str] | None = None  # columns of Parquet files; None: all
    chunk_bytes: int = CHUNK_BYTES

    def chunks(self, file: int = 0, part: int = 0) -> Iterator[Chunk]:
        """Return all chunks in order, from one on."""
        limits = {"max_document_bytes": self.max_document_bytes, "chunk_bytes": self.chunk_bytes}
        return iter_chunks(self.sources, first=(file, part), columns=self.columns, **limits)

    def rows(self, chunk: Chunk) -> ChunkRows:
        """Return the documents of a chunk."""
        return read_chunk(chunk, self.document, self.max_document_bytes)


class CutterFacts(NamedTuple):
    """Tokenizer and rules of the workers; `encoder` names the implementation of the tokenizer."""

    tokenizer: TokenizerInfo
    rules: CutRules
    encoder: str


class ChunkResult(NamedTuple):
    """Result of a chunk: counts of the cutter by name, the first bad lines, their kinds."""

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
        cutter, task = self._task.make_cutter(), self._task
        texts = next((texts for chunk in task.chunks() if (texts := task.rows(chunk).texts)), [])
        texts = texts[:_SAMPLE_DOCUMENTS]
        while len(texts) > 1 and sum(map(len, texts)) > _SAMPLE_CHARACTERS:
            texts.pop()
        # all workers look at the same documents, so all come to the same encoder
        cutter.encoder.check([text[:_SAMPLE_CHARACTERS] for text in texts])
        return cutter

    def facts(self) -> CutterFacts:
        encoder = self._cutter.encoder
        kind = f"{encoder.kind} ({encoder.note})" if encoder.note else encoder.kind
        return CutterFacts(encoder.info, self._cutter.rules, kind)

    def cut(self, chunk: Chunk) -> ChunkResult:
        rows = self._task.rows(chunk)
        try:
            parts = [self._cutter(rows.texts)]
        except UserError:  # one document is at fault: find it and leave it out
            parts = []
            for number, text in zip(rows.numbers, rows.texts, strict=True):
                try:
                    parts.append(self._cutter([text]))
                except UserError as error:
                    rows.refuse(number, "refused", str(error), text)
        counts = Counter[str]()
        for _, own in parts:
            counts.update(own._asdict())
        segments = Segments.join([one for one, _ in parts])
        bad = sorted(rows.bad, key=lambda item: item.line)
        return ChunkResult(segments, counts, rows.num_lines, bad, rows.bad_kinds)


class WorkerDied(RuntimeError):
    """A worker process ended from outside; what was built is kept."""

    exit_code = CRASH
    kind = "crash"

    def __init__(self) -> None:
        super().__init__(
            "a worker process was killed, as when memory is short. What was built is kept: run the "
            "same command again, with fewer `num_workers` or a smaller `max_document_bytes`."
        )


class Pool(NamedTuple):
    """Workers with their tokenizer and rules; `submit` returns a function that waits."""

    num_workers: int
    facts: CutterFacts
    submit: Callable[[Chunk], Callable[[], ChunkResult]]


@contextlib.contextmanager
def open_pool(task: Task, num_workers: int) -> Iterator[Pool]:
    """Open the worker processes of a task; with `num_workers` 0 this process cuts.

    Raises:
        UserError: the cutter cannot be made.
        WorkerDied: a worker was killed.
    """
    worker = ChunkWorker(task)
    if not num_workers:
        yield Pool(1, worker.facts(), lambda chunk: lambda: worker.cut(chunk))
        return
    os.environ.update(ONE_THREAD)  # threads of a tokenizer do not survive a fork
    facts = worker.facts()
    # forked ones share the tokenizer, and know parts that were imported from files
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(worker, os.getpid()),
    )
    results = executor._result_queue
    try:
        yield Pool(num_workers, facts, lambda chunk: executor.submit(_cut, chunk).result)
    except BrokenProcessPool as error:
        raise WorkerDied from error
    finally:
        # workers have nothing to save
        for process in list((executor._processes or {}).values()):
            with contextlib.suppress(ValueError):  # it has ended and was closed
                process.kill()
        # one may have been killed in the middle of a result, whose reader would wait for the rest
        results._writer.close()  # type: ignore[attr-defined]  # its pipe has no other name
        # a thread that is still ending closes pipes which the interpreter writes to at its own end
        executor.shutdown(wait=True)


_worker: ChunkWorker  # that of this process


def _start_worker(worker: ChunkWorker, parent: int) -> None:
    global _worker
    _worker = worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # all objects so far stay, so the collector need not visit them

    def end_with_parent() -> None:
        # a killed parent sends no message, and the pipes to it stay open in the other workers
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _cut(chunk: Chunk) -> ChunkResult:
    return _worker.cut(chunk)


def ordered(pool: Pool, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Yield the results in the order of the chunks; few are in flight at a time."""
    waiting: deque[tuple[Chunk, Callable[[], ChunkResult]]] = deque()
    most = pool.num_workers * _CHUNKS_A_WORKER
    for chunk in chunks:
        if len(waiting) >= most:
            first, result = waiting.popleft()
            yield first, result()
        waiting.append((dataclasses.replace(chunk, payload=b""), pool.submit(chunk)))
    for first, result in waiting:
        yield first, result()
