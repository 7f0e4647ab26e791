"""Builds a corpus of text files: in several processes, in order, and after a kill going on.

The parent divides the input into chunks, workers cut them, and the parent writes what comes back
in the order of the chunks. So the bytes do not depend on the number of workers, and what is held
in memory not on the size of the input. Every few seconds a journal says how far it is.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from stageline.chaos import point
from stageline.corpus.chunks import CHUNK_BYTES, Chunk, iter_chunks
from stageline.corpus.journal import SUFFIX as JOURNAL
from stageline.corpus.journal import (
    Journal,
    Progress,
    Source,
    check_unchanged,
    find_sources,
    only_build,
)
from stageline.corpus.pool import (
    ChunkResult,
    CutterFacts,
    OneProcess,
    Pool,
    Processes,
    RayActors,
    Task,
    ordered,
)
from stageline.corpus.row_text import DEFAULT_FIELD, EMPTY, BadLine, Document
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, StorageError, UserError

# -- the lines that gave no document: all counted, the first ones listed in PREFIX.bad.jsonl ------

SUFFIX = ".bad.jsonl"
NUM_LISTED = 1000


class BadLines:
    """Lists bad lines, or ends the build with the first one.

    Args:
        progress: how many were listed before this start; the list is cut to that.
        is_strict: a bad line ends the build.

    Raises:
        DataError: bad lines were passed over before, and now none is to be.
    """

    def __init__(
        self,
        path_prefix: str,
        *,
        progress: Progress,
        is_strict: bool,
        num_listed: int = NUM_LISTED,
    ) -> None:
        self.path = Path(f"{path_prefix}{SUFFIX}")
        self._progress = progress
        self._is_strict = is_strict
        self._num_listed = num_listed
        self._cut()
        if is_strict and progress.num_bad:
            raise DataError(
                f"{progress.num_bad} bad lines were passed over before this build was left, and "
                f"`strict` asks for none:\n{self.listed()}\nCorrect them and begin anew with "
                "`overwrite`, or go on without `strict`."
            )

    def check(self, path: str, first_line: int, bad: Sequence[BadLine]) -> None:
        """Refuses those of a chunk where none may be.

        Args:
            first_line: lines of the file before the chunk.

        Raises:
            DataError: names file and line of the first.
        """
        if bad and self._is_strict:
            raise _strict_error(path, first_line, bad[0])

    def take(
        self, path: str, first_line: int, bad: Sequence[BadLine], kinds: Mapping[str, int]
    ) -> None:
        """Notes those of a chunk."""
        total = self._progress.bad_kinds
        for kind, number in kinds.items():
            total[kind] = total.get(kind, 0) + number
        self._list(path, first_line, bad)

    def listed(self, most: int = 5) -> str:
        """The first ones, a line each."""
        if not self.path.exists():
            return ""
        with self.path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in itertools.islice(file, most)]
        lines = [f"  {row['file']}:{row['line']}: {row['reason']}" for row in rows]
        rest = self._progress.num_bad - len(lines)
        return "\n".join(lines + ([f"  and {rest} more"] if rest > 0 else []))

    def _list(self, path: str, first_line: int, bad: Sequence[BadLine]) -> None:
        wanted = bad[: max(0, self._num_listed - self._progress.num_listed)]
        text = "".join(
            json.dumps(
                {
                    "file": path,
                    "line": first_line + item.line,
                    "reason": item.reason,
                    "start": item.start,
                }
            )
            + "\n"
            for item in wanted
        )
        if not text:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror or error}. What was built is "
                "kept: make room and run the same command again."
            ) from error
        self._progress.num_listed += len(wanted)
        self._progress.bad_bytes += len(text)  # ASCII

    def _cut(self) -> None:
        """Takes away what was listed after the journal was written."""
        if self._progress.bad_bytes == 0:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            os.truncate(self.path, self._progress.bad_bytes)


def _strict_error(path: str, first_line: int, bad: BadLine) -> DataError:
    return DataError(
        f"{path}:{first_line + bad.line}: {bad.reason}. It begins with {bad.start!r}. A document "
        "was expected in every line, because of `strict`: correct the line, or build without "
        "`strict`, which counts such lines and leaves them out."
    )


# -- shows how far a build is: a bar in a terminal, a line every ten seconds elsewhere ------------

_SECONDS_A_LINE = 10.0
MB = 1e6


class BuildProgress:
    """Bytes of the input that are done, and the time that is left.

    Args:
        total: bytes of all files.
        done: of them by an earlier start.
        is_shown: False shows nothing.
        stream: by default the standard error.
    """

    def __init__(
        self,
        *,
        total: int,
        done: int = 0,
        is_shown: bool = True,
        stream: TextIO | None = None,
        seconds_a_line: float = _SECONDS_A_LINE,
    ) -> None:
        self._stream = stream or sys.stderr
        self._total, self._first, self._done = total, done, done
        self._since = self._last = time.monotonic()
        self._seconds = seconds_a_line
        self._is_shown = is_shown
        self._bar = self._make_bar() if is_shown and self._stream.isatty() else None

    def add(self, num_bytes: int) -> None:
        """Some more are done."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._is_shown and time.monotonic() - self._last >= self._seconds:
            self._last = time.monotonic()
            print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """For example "12.3 of 190.7 MB, 11.2 MB/s, 16 s left"."""
        speed = (self._done - self._first) / max(1e-9, time.monotonic() - self._since)
        left = f"{(self._total - self._done) / speed:.0f} s left" if speed else "time unknown"
        done, total = self._done / MB, self._total / MB
        return f"{done:.1f} of {total:.1f} MB, {speed / MB:.1f} MB/s, {left}"

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()

    def _make_bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self._total,
            initial=self._done,
            unit="B",
            unit_scale=True,
            file=self._stream,
            desc="corpus",
        )


# -- what a build says at its end -----------------------------------------------------------------


@dataclass(frozen=True)
class BuildReport:
    """What was built.

    Attributes:
        counts: of the cutter, by name: documents, segments, tokens, cut sentences ...
        bad_kinds: lines that gave no document, by kind.
        bad_path: where the first of them are listed; None: there are none.
        encoder: which implementation of the tokenizer did it.
        num_bytes: of the input, as it lies on the disk.
        seconds: of all starts together.
        num_bytes_before: of the input, that an earlier start had done.
    """

    path_prefix: str
    counts: dict[str, int]
    bad_kinds: dict[str, int]
    bad_path: str | None
    encoder: str
    num_bytes: int
    seconds: float
    num_bytes_before: int

    @property
    def num_bad(self) -> int:
        return sum(self.bad_kinds.values())

    def __str__(self) -> str:
        counts = ", ".join(
            f"{number:,} {name.removeprefix('num_').replace('_', ' ')}"
            for name, number in self.counts.items()
        )
        speed = self.num_bytes / MB / max(1e-9, self.seconds)
        lines = [
            f"{self.path_prefix}: {counts}",
            f"{self.num_bytes / MB:.1f} MB in {self.seconds:.1f} s, {speed:.1f} MB/s; "
            f"tokenizer: {self.encoder}",
        ]
        if self.num_bad:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.bad_kinds.items())
            lines.append(f"{self.num_bad:,} bad lines left out ({kinds}): see {self.bad_path}")
        return "\n".join(lines)


# -- one start of a build: writes what the workers cut, in order, and keeps the journal -----------

# as many bad lines and no document: the input is not what it should be
_HOPELESS = 1000


class BuildRun:
    """One start of a build.

    Args:
        given: names of the document, the language and the type.
        is_strict: a bad line ends the build.
        overwrites: replaces a finished corpus, and what another build left.

    Raises:
        UserError: another build was left.
    """

    def __init__(
        self,
        prefix: str,
        *,
        task: Task,
        facts: CutterFacts,
        given: dict[str, str],
        is_strict: bool,
        overwrites: bool,
        seconds_a_journal: float,
    ) -> None:
        self._prefix, self._task, self._facts = prefix, task, facts
        self._seconds_a_journal = seconds_a_journal
        settings = _settings(task, facts, given)
        self._journal = Journal(prefix, settings=settings, sources=task.sources)
        self.progress, state = self._left(overwrites) or (Progress(), None)
        self._before, self._seconds_before = self.progress.num_bytes, self.progress.seconds
        self._is_closed = self.progress.is_closing and _is_closed(prefix)
        self._bad = BadLines(prefix, progress=self.progress, is_strict=is_strict)
        if not self._is_closed:
            self._writer = self._make_writer(state, given, overwrites)
        self._since = self._written = time.monotonic()
        # whether writer and progress say the same
        self._is_between_chunks = True

    def _make_writer(
        self, state: dict | None, given: dict[str, str], overwrites: bool
    ) -> CorpusWriter:
        if state is not None:
            return CorpusWriter.resume(self._prefix, state)
        return CorpusWriter(
            self._prefix,
            tokenizer=self._facts.tokenizer,
            rules=self._facts.rules,
            language=given["language"],
            type_names=(given["type_name"],),
            overwrite=overwrites,
            sources=[_noted(source) for source in self._task.sources],
        )

    def run(self, pool: Pool, *, is_shown: bool) -> BuildReport:
        """Cuts what is left and makes the corpus whole."""
        progress = self.progress
        total = sum(source.size for source in self._task.sources)
        shown = BuildProgress(total=total, done=progress.num_bytes, is_shown=is_shown)
        chunks = iter_chunks(
            self._task.sources,
            first=(progress.file, progress.part),
            max_document_bytes=self._task.max_document_bytes,
            columns=self._task.columns,
            chunk_bytes=self._task.chunk_bytes,
        )
        try:
            for chunk, result in ordered(pool, chunks):
                self._take(chunk, result)
                shown.add(chunk.num_bytes)
            self._finish()
        except (KeyboardInterrupt, SystemExit, RuntimeError, UserError):
            self._leave()
            raise
        finally:
            shown.close()
        return self._report(total)

    def _left(self, overwrites: bool) -> tuple[Progress, dict] | None:
        """Progress and writer state of the build that was left, where it is gone on with."""
        try:
            return self._journal.read()
        except UserError:
            if not overwrites:
                raise
            self._journal.remove()
            return None

    def _leave(self) -> None:
        """Notes how far it is, so that the next start need not cut that again."""
        if not self._is_between_chunks:
            return
        if not self.progress.counts.get("num_tokens"):  # nothing is lost by beginning anew
            self._journal.remove()
            self._writer.discard()
            return
        with contextlib.suppress(OSError):
            self._write_journal()

    def _take(self, chunk: Chunk, result: ChunkResult) -> None:
        progress = self.progress
        first_line = progress.num_lines if chunk.file == progress.file else 0
        self._bad.check(chunk.path, first_line, result.bad)
        self._is_between_chunks = False
        self._writer.add(result.segments)
        self._bad.take(chunk.path, first_line, result.bad, result.bad_kinds)
        for name, number in result.counts.items():
            progress.counts[name] = progress.counts.get(name, 0) + number
        progress.file, progress.part = chunk.file, chunk.part + 1
        progress.num_lines = first_line + result.num_lines
        progress.num_bytes += chunk.num_bytes
        self._is_between_chunks = True
        self._refuse_hopeless()
        point("corpus_chunk")
        if time.monotonic() - self._written >= self._seconds_a_journal:
            self._write_journal()

    def _refuse_hopeless(self, least: int = _HOPELESS) -> None:
        progress = self.progress
        num_bad = progress.num_bad - progress.bad_kinds.get(EMPTY, 0)
        if num_bad >= least and not progress.counts.get("num_tokens"):
            raise DataError(
                f"all of the first {progress.num_bad:,} lines are bad:\n{self._bad.listed()}\n"
                "Documents were expected in most lines: check how documents are made of rows."
            )

    def _write_journal(self) -> None:
        self.progress.seconds = self._seconds_before + time.monotonic() - self._since
        self._journal.write(self.progress, self._writer.state())
        self._written = time.monotonic()

    def _finish(self) -> None:
        if not self._is_closed:
            check_unchanged(self._task.sources)
            self._refuse_nothing()
            self.progress.is_closing = True
            self._write_journal()
            self._is_between_chunks = False
            point("corpus_close")
            self._writer.close()
            point("corpus_closed")
        for name in ("offsets", "flags"):  # of a writer that was killed over its last names
            Path(f"{self._prefix}.{name}.part").unlink(missing_ok=True)
        self._journal.remove()

    def _refuse_nothing(self) -> None:
        if self.progress.counts.get("num_tokens"):
            return
        self._refuse_hopeless(1)
        raise DataError(
            f"no document came from {len(self._task.sources)} files, the first of them "
            f"{self._task.sources[0].path}. At least one was expected: check the files."
        )

    def _report(self, num_bytes: int) -> BuildReport:
        progress = self.progress
        return BuildReport(
            self._prefix,
            counts=progress.counts,
            bad_kinds=progress.bad_kinds,
            bad_path=str(self._bad.path) if progress.num_listed else None,
            encoder=self._facts.encoder,
            num_bytes=num_bytes,
            seconds=self._seconds_before + time.monotonic() - self._since,
            num_bytes_before=self._before,
        )


def _is_closed(prefix: str) -> bool:
    """Whether the files have their last names: only the journal was still to go."""
    return Path(f"{prefix}.idx").exists() and not Path(f"{prefix}.bin.part").exists()


def _settings(task: Task, facts: CutterFacts, given: dict[str, str]) -> dict[str, Any]:
    """All that decides over the bytes of the corpus, but for the inputs."""
    return {
        **given,
        "tokenizer": asdict(facts.tokenizer),
        "rules": asdict(facts.rules),
        "max_document_bytes": task.max_document_bytes,
        "chunk_bytes": task.chunk_bytes,
    }


def _noted(source: Source) -> dict[str, Any]:
    return {"name": Path(source.path).name, "size": source.size, "edges_sha256": source.edges}


# -------------------------------------------------------------------------------------------------

MAX_DOCUMENT_BYTES = 32 << 20
_SECONDS_A_JOURNAL = 5.0


def build_corpus(
    files: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    path_prefix: str | os.PathLike,
    make_cutter: Callable[[], Any],
    document: Document | None = None,
    columns: Sequence[str] | None = None,
    document_name: str | None = None,
    language: str = "auto",
    type_name: str = "0",
    num_workers: int = 1,
    executor: Literal["processes", "ray"] = "processes",
    strict: bool = False,
    resume: bool = True,
    overwrite: bool = False,
    progress: bool = True,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    seconds_a_journal: float = _SECONDS_A_JOURNAL,
) -> BuildReport:
    """Builds the corpus of some files, or goes on with a build that was left.

    Args:
        files: names, folders, patterns: .txt, .jsonl .json .ndjson (also .gz .bz2 .zst), .parquet.
        make_cutter: makes a `DocumentCutter`; called once in each worker.
        document: (line, or dict of a row) -> text; by default the line, or the field "text".
        columns: the fields of Parquet that it needs; by default all.
        document_name: for the journal; by default its name in Python.
        language: goes into the header.
        num_workers: 0 cuts in this process.
        strict: a bad line ends the build.
        resume: False begins anew where a build was left.
        overwrite: replaces a finished corpus; a build that was left goes on if nothing changed.
        max_document_bytes: a longer line is a bad line.

    Raises:
        UserError: wrong options; other ones, or other inputs, than the build that was left.
        DataError: a bad line under `strict`, a damaged file, no document at all.
        StorageError: the files cannot be written.
        WorkerDied: a worker was killed; the same call goes on.
    """
    _check(num_workers, executor, max_document_bytes)
    needed = [DEFAULT_FIELD] if document is None else columns
    settings = (make_cutter, document, max_document_bytes, needed, chunk_bytes)
    task = Task(find_sources(files), *settings)
    names = (document_name or _name_of(document), language, type_name)
    prefix = os.fspath(path_prefix)
    with only_build(prefix):
        _make_way(prefix, resume=resume, overwrite=overwrite)
        with contextlib.closing(_open_pool(task, num_workers, executor)) as pool:
            run = BuildRun(
                prefix,
                task=task,
                facts=pool.facts(),
                given=dict(zip(("document", "language", "type_name"), names, strict=True)),
                is_strict=strict,
                overwrites=overwrite,
                seconds_a_journal=seconds_a_journal,
            )
            return run.run(pool, is_shown=progress)


def _check(num_workers: int, executor: str, max_document_bytes: int) -> None:
    if num_workers < 0:
        raise UserError(f"`num_workers` is {num_workers}; 0 or more was expected.")
    if max_document_bytes < 1:
        raise UserError(f"`max_document_bytes` is {max_document_bytes}; 1 or more was expected.")
    if executor not in ("processes", "ray"):
        raise UserError(f"`executor` is {executor!r}; processes or ray was expected.")


def _make_way(prefix: str, *, resume: bool, overwrite: bool) -> None:
    index, journal = Path(f"{prefix}.idx"), Path(f"{prefix}{JOURNAL}")
    if index.exists() and not journal.exists() and not overwrite:
        raise UserError(
            f"{index} is there: a finished corpus. A new prefix was expected, because a corpus "
            "may be in use: give another `save_prefix`, or replace it with `overwrite`."
        )
    if not resume:
        journal.unlink(missing_ok=True)


def _open_pool(task: Task, num_workers: int, executor: str) -> Pool:
    if executor == "ray":
        return RayActors(task, max(1, num_workers))
    return Processes(task, num_workers) if num_workers else OneProcess(task)


def _name_of(document: Document | None) -> str:
    if document is None:
        return "default"
    function = getattr(document, "func", document)  # of a partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    options = getattr(document, "keywords", {})
    return f"{function.__module__}.{name} {options}" if options else f"{function.__module__}.{name}"
