"""Builds a corpus of text files: in several processes, in order, and after a kill from the journal.

Workers cut chunks of the input, the parent writes what comes back in the order of the chunks: so
the bytes do not depend on the number of workers, nor the memory on the size of the input. Every few
seconds PREFIX.journal says how far it is; it is gone when the corpus is finished.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from stageline.chaos import point
from stageline.corpus.input import (
    CHUNK_BYTES,
    EMPTY,
    BadLine,
    Chunk,
    Document,
    Source,
    check_unchanged,
    default_document,
    find_sources,
)
from stageline.corpus.pool import (
    ChunkResult,
    CutterFacts,
    Pool,
    Task,
    open_pool,
    ordered,
)
from stageline.corpus.writer import CorpusWriter, cannot_write, lock_file
from stageline.errors import DataError, UserError

MAX_DOCUMENT_BYTES = 32 << 20
MB = 1e6
JOURNAL = ".journal"
_VERSION = 1  # of the journal
_NUM_LISTED = 1000  # of the bad lines
# as many bad lines and no document: the input is not what it should be
_HOPELESS = 1000
_SECONDS_A_LINE = 10.0  # of the progress, where it is no bar


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


@dataclass
class Progress:
    """How far a build is. All of it is JSON.

    Attributes:
        file, part: the first chunk that is not written.
        num_lines: of the current file, before that chunk.
        num_bytes: of all files, as they lie on the disk.
        counts: of the cutter, by name.
        bad_kinds: bad lines of each kind.
        bad_bytes: of the list of bad lines; num_listed: lines of it.
        is_closing: all is added; only the names of the files are to change.
    """

    file: int = 0
    part: int = 0
    num_lines: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    bad_kinds: dict[str, int] = field(default_factory=dict)
    bad_bytes: int = 0
    num_listed: int = 0
    is_closing: bool = False

    @property
    def num_bad(self) -> int:
        return sum(self.bad_kinds.values())


class Journal:
    """The journal of a prefix.

    Args:
        settings: what decides over the bytes of the corpus, name -> what JSON holds.
    """

    def __init__(
        self, path_prefix: str, *, settings: dict[str, Any], sources: Sequence[Source]
    ) -> None:
        self.path = Path(f"{path_prefix}{JOURNAL}")
        self._settings = json.loads(json.dumps(settings))
        self._sources = [asdict(source) for source in sources]

    def write(self, progress: Progress, writer_state: dict[str, Any]) -> None:
        """Replaces the journal; a kill leaves the old one or the new one.

        Raises:
            StorageError: it cannot be written.
        """
        values = {
            "version": _VERSION,
            "settings": self._settings,
            "sources": self._sources,
            "progress": asdict(progress),
            "writer": writer_state,
        }
        draft = self.path.with_name(f"{self.path.name}.part")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(values, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def read(self) -> tuple[Progress, dict[str, Any]] | None:
        """(progress, state of the writer) of the build that was left; None: there is none.

        Raises:
            UserError: it was another build; names all that changed.
            DataError: the journal is no journal.
        """
        if not self.path.exists():
            return None
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            version = values["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.path} is not the journal of a build ({error}). It says where to go on: "
                "begin anew with `overwrite`."
            ) from error
        if version != _VERSION:
            changes = [f"journal version: was {version}, is {_VERSION}"]
        else:
            changes = _changed_settings(values["settings"], self._settings)
            changes += _changed_sources(values["sources"], self._sources)
        if changes:
            listed = "".join(f"\n  {change}" for change in changes)
            raise UserError(
                f"{self.path} is of a build that was left, and this is another one:{listed}\n"
                "The same command was expected, because one corpus would else be built in two "
                "ways: set back what changed, give another `save_prefix`, or begin anew with "
                "`overwrite`."
            )
        return Progress(**values["progress"]), values["writer"]


def _changed_settings(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    changes: list[str] = []
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += _changed_settings(old, new, f"{prefix}{name}.")
        elif old != new:
            changes.append(f"{prefix}{name}: was {old!r}, is {new!r}")
    return changes


def _changed_sources(before: Sequence[dict], now: Sequence[dict]) -> list[str]:
    old, new = ({source["path"]: source for source in sources} for sources in (before, now))
    changes = [f"input {path}: is not named any more" for path in old if path not in new]
    changes += [f"input {path}: was not named before" for path in new if path not in old]
    for path in (path for path in old if path in new and old[path] != new[path]):
        pairs = ((name, value, new[path].get(name)) for name, value in old[path].items())
        what = ", ".join(f"{name} was {a}, is {b}" for name, a, b in pairs if a != b)
        changes.append(f"input {path}: {what}")
    if not changes and list(old) != list(new):
        changes.append("the inputs come in another order")
    return changes


class BadLines:
    """The lines that gave no document: all counted, the first ones listed in PREFIX.bad.jsonl.

    Args:
        progress: how many were listed before this start; the list is cut to that.
        is_strict: a bad line ends the build.

    Raises:
        DataError: bad lines were passed over before, and now none is to be.
    """

    def __init__(self, path_prefix: str, *, progress: Progress, is_strict: bool) -> None:
        self.path = Path(f"{path_prefix}.bad.jsonl")
        self._progress = progress
        self._is_strict = is_strict
        # what was listed after the journal was written goes
        if progress.bad_bytes == 0:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            os.truncate(self.path, progress.bad_bytes)
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
            raise DataError(
                f"{path}:{first_line + bad[0].line}: {bad[0].reason}. It begins with "
                f"{bad[0].start!r}. A document was expected in every line, because of `strict`: "
                "correct the line, or build without `strict`, which counts such lines and leaves "
                "them out."
            )

    def take(self, path: str, first_line: int, bad: Sequence[BadLine]) -> None:
        """Lists those of a chunk."""
        wanted = bad[: max(0, _NUM_LISTED - self._progress.num_listed)]
        rows = [
            {"file": path, "line": first_line + one.line, "reason": one.reason, "start": one.start}
            for one in wanted
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not text:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._progress.num_listed += len(wanted)
        self._progress.bad_bytes += len(text)  # ASCII

    def listed(self, most: int = 5) -> str:
        """The first ones, a line each."""
        if not self.path.exists():
            return ""
        with self.path.open(encoding="utf-8") as file:
            rows = map(json.loads, itertools.islice(file, most))
            lines = [f"  {row['file']}:{row['line']}: {row['reason']}" for row in rows]
        rest = self._progress.num_bad - len(lines)
        return "\n".join(lines + [f"  and {rest} more"] * (rest > 0))


class BuildProgress:
    """How far a build is: a bar in a terminal, a line every ten seconds elsewhere.

    Args:
        total: bytes of all files.
        done: of them by an earlier start.
    """

    def __init__(
        self, *, total: int, done: int = 0, is_shown: bool = True, stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self._total, self._first, self._done = total, done, done
        self._since = self._last = time.monotonic()
        self._is_shown = is_shown
        has_bar = is_shown and self._stream.isatty()
        options = {"unit": "B", "unit_scale": True, "file": self._stream, "desc": "corpus"}
        self._bar = tqdm(total=total, initial=done, **options) if has_bar else None

    def add(self, num_bytes: int) -> None:
        """Some more are done."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._is_shown and time.monotonic() - self._last >= _SECONDS_A_LINE:
            self._last = time.monotonic()
            speed = (self._done - self._first) / max(1e-9, self._last - self._since)
            left = f"{(self._total - self._done) / speed:.0f} s left" if speed else "time unknown"
            done, total = self._done / MB, self._total / MB
            line = f"{done:.1f} of {total:.1f} MB, {speed / MB:.1f} MB/s, {left}"
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


class BuildRun:
    """One start of a build: writes what the workers cut, in order, and keeps the journal.

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
        # all that decides over the bytes of the corpus, but for the inputs
        settings = {
            **given,
            "tokenizer": asdict(facts.tokenizer),
            "rules": asdict(facts.rules),
            "max_document_bytes": task.max_document_bytes,
            "chunk_bytes": task.chunk_bytes,
        }
        self._journal = Journal(prefix, settings=settings, sources=task.sources)
        self.progress, state = self._left(overwrites)
        self._before, self._seconds_before = self.progress.num_bytes, self.progress.seconds
        # the files have their last names: only the journal is still to go
        has_names = Path(f"{prefix}.idx").exists() and not Path(f"{prefix}.bin.part").exists()
        self._is_closed = self.progress.is_closing and has_names
        self._bad = BadLines(prefix, progress=self.progress, is_strict=is_strict)
        if state is not None and not self._is_closed:
            self._writer = CorpusWriter.resume(prefix, state)
        elif state is None:
            self._writer = CorpusWriter(
                prefix,
                tokenizer=facts.tokenizer,
                rules=facts.rules,
                language=given["language"],
                type_names=(given["type_name"],),
                overwrite=overwrites,
                sources=[
                    {"name": Path(one.path).name, "size": one.size, "edges_sha256": one.edges}
                    for one in task.sources
                ],
            )
        self._since = self._written = time.monotonic()
        # whether writer and progress say the same
        self._is_between_chunks = True

    def run(self, pool: Pool, *, is_shown: bool) -> BuildReport:
        """Cuts what is left and makes the corpus whole."""
        progress = self.progress
        total = sum(source.size for source in self._task.sources)
        shown = BuildProgress(total=total, done=progress.num_bytes, is_shown=is_shown)
        try:
            for chunk, result in ordered(pool, self._task.chunks(progress.file, progress.part)):
                self._take(chunk, result)
                shown.add(chunk.num_bytes)
            self._finish()
        except (KeyboardInterrupt, SystemExit, RuntimeError, UserError):
            self._leave()
            raise
        finally:
            shown.close()
        return BuildReport(
            self._prefix,
            counts=progress.counts,
            bad_kinds=progress.bad_kinds,
            bad_path=str(self._bad.path) if progress.num_listed else None,
            encoder=self._facts.encoder,
            num_bytes=total,
            seconds=self._seconds(),
            num_bytes_before=self._before,
        )

    def _left(self, overwrites: bool) -> tuple[Progress, dict | None]:
        """Progress and writer state of the build that was left, where it is resumed."""
        try:
            return self._journal.read() or (Progress(), None)
        except UserError:
            if not overwrites:
                raise
            self._journal.path.unlink(missing_ok=True)
            return Progress(), None

    def _leave(self) -> None:
        """Notes how far it is, so that the next start need not cut that again."""
        if not self._is_between_chunks:
            return
        if not self.progress.counts.get("num_tokens"):  # nothing is lost by beginning anew
            self._journal.path.unlink(missing_ok=True)
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
        self._bad.take(chunk.path, first_line, result.bad)
        _add(progress.bad_kinds, result.bad_kinds)
        _add(progress.counts, result.counts)
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

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._since

    def _write_journal(self) -> None:
        self.progress.seconds = self._seconds()
        self._journal.write(self.progress, self._writer.state())
        self._written = time.monotonic()

    def _finish(self) -> None:
        if not self._is_closed:
            sources = self._task.sources
            check_unchanged(sources)
            self._refuse_hopeless(1)
            if not self.progress.counts.get("num_tokens"):
                raise DataError(
                    f"no document came from {len(sources)} files, the first of them "
                    f"{sources[0].path}. At least one was expected: check the files."
                )
            self.progress.is_closing = True
            self._write_journal()
            self._is_between_chunks = False
            point("corpus_close")
            self._writer.close()
            point("corpus_closed")
        for name in ("offsets", "flags"):  # of a writer that was killed over its last names
            Path(f"{self._prefix}.{name}.part").unlink(missing_ok=True)
        self._journal.path.unlink(missing_ok=True)


def _add(total: dict[str, int], new: Mapping[str, int]) -> None:
    for name, number in new.items():
        total[name] = total.get(name, 0) + number


@contextlib.contextmanager
def only_build(path_prefix: str) -> Iterator[None]:
    """Refuses a second build of the same prefix at the same time.

    Raises:
        UserError: one is at work.
        StorageError: the folder cannot be written.
    """
    path = Path(f"{path_prefix}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise cannot_write(path, error) from error
    with file:
        is_ours = lock_file(file)
        # else it was the lock of a build that ended this moment
        is_ours = is_ours and path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino
        if not is_ours:
            raise UserError(
                f"another build writes {path_prefix} at this moment. One was expected, because "
                "both would write the same files: wait for it, or give another `save_prefix`."
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def build_corpus(
    files: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    path_prefix: str | os.PathLike,
    make_cutter: Callable[[], Any],
    document: Document = default_document,
    columns: Sequence[str] | None = None,
    document_name: str = "default",  # in the journal
    language: str = "auto",  # for the header
    type_name: str = "0",
    num_workers: int = 1,
    executor: Literal["processes", "ray"] = "processes",
    strict: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    seconds_a_journal: float = 5.0,
) -> BuildReport:
    """Builds the corpus of some files, or goes on with a build that was left.

    Args:
        files: names, folders, patterns: .txt, .jsonl .json .ndjson (also .gz .bz2 .zst), .parquet.
        make_cutter: makes a `DocumentCutter`; called once in each worker.
        document: (line, or dict of a row) -> text; by default the line, or the field "text".
        columns: the fields of Parquet that it needs; by default all.
        num_workers: 0 cuts in this process.
        strict: a bad line ends the build.
        overwrite: replaces a finished corpus; a build that was left goes on if nothing changed.
        max_document_bytes: a longer line is a bad line.

    Raises:
        UserError: wrong options; other ones, or other inputs, than the build that was left.
        DataError: a bad line under `strict`, a damaged file, no document at all.
        StorageError: the files cannot be written.
        WorkerDied: a worker was killed; the same call goes on.
    """
    if max_document_bytes < 1:
        raise UserError(f"`max_document_bytes` is {max_document_bytes}; 1 or more was expected.")
    sources = find_sources(files)
    task = Task(sources, make_cutter, document, max_document_bytes, columns, chunk_bytes)
    prefix = os.fspath(path_prefix)
    given = {"document": document_name, "language": language, "type_name": type_name}
    with only_build(prefix):
        index, journal = Path(f"{prefix}.idx"), Path(f"{prefix}{JOURNAL}")
        if index.exists() and not journal.exists() and not overwrite:
            raise UserError(
                f"{index} is there: a finished corpus. A new prefix was expected, because a corpus "
                "may be in use: give another `save_prefix`, or replace it with `overwrite`."
            )
        with contextlib.closing(open_pool(task, num_workers, executor)) as pool:
            return BuildRun(
                prefix,
                task=task,
                facts=pool.facts(),
                given=given,
                is_strict=strict,
                overwrites=overwrite,
                seconds_a_journal=seconds_a_journal,
            ).run(pool, is_shown=progress)
