"""Build a corpus of text files in several processes, in order; a journal allows it to resume.

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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stageline.corpus.input import (
    CHUNK_BYTES,
    EMPTY,
    Chunk,
    Document,
    default_document,
    find_sources,
)
from stageline.corpus.pool import ChunkResult, CutterFacts, Pool, Task, open_pool, ordered
from stageline.corpus.writer import CorpusWriter, name_files, writing
from stageline.errors import DataError, UserError

MAX_DOCUMENT_BYTES = 32 << 20
_NUM_LISTED = 1000  # bad lines that are listed in full
_HOPELESS = 1000  # bad lines without any document that end a build


@dataclass
class Progress:
    """Progress of a build, as JSON values."""

    file: int = 0  # with `part`, the first chunk that is not written
    part: int = 0
    num_lines: int = 0  # lines of the current file before that chunk
    num_bytes: int = 0  # read of all files, compressed ones as stored
    seconds: float = 0.0  # time of all starts together
    counts: Counter[str] = field(default_factory=Counter)  # counts of the cutter
    bad_kinds: Counter[str] = field(default_factory=Counter)  # lines that gave no document
    bad_bytes: int = 0  # size of the list of bad lines
    num_listed: int = 0
    is_closing: bool = False  # all is written; the files are being renamed

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> "Progress":
        """Return the progress that a journal holds."""
        counters = {name: Counter(values[name]) for name in ("counts", "bad_kinds")}
        return cls(**{**values, **counters})


@dataclass(frozen=True)
class BuildReport:
    """Result of a build."""

    path_prefix: str
    progress: Progress
    bad_path: str | None  # list of the first bad lines
    encoder: str  # the implementation of the tokenizer
    num_bytes_before: int  # input that earlier starts have read

    def __str__(self) -> str:
        progress = self.progress
        counts = ", ".join(
            f"{number:,} {name.removeprefix('num_').replace('_', ' ')}"
            for name, number in progress.counts.items()
        )
        size, seconds = progress.num_bytes / 1e6, progress.seconds
        rate = f"{size:.1f} MB in {seconds:.1f} s, {size / max(1e-9, seconds):.1f} MB/s"
        text = f"{self.path_prefix}: {counts}\n{rate}; tokenizer: {self.encoder}"
        if progress.bad_kinds:
            kinds = ", ".join(f"{number:,} {kind}" for kind, number in progress.bad_kinds.items())
            num_bad = progress.bad_kinds.total()
            text += f"\n{num_bad:,} bad lines left out ({kinds}): see {self.bad_path}"
        return text


def _changes(before: Any, now: Any, name: str = "") -> list[str]:
    """Return a line for each difference between two dicts of dicts."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [f"{name}: was {before!r}, is {now!r}"]
    return [
        change
        for key in {**before, **now}
        for change in _changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    ]


class BuildRun:
    """One start of a build, see `build_corpus`: writes what the workers cut, and keeps the journal.

    PREFIX.journal holds the progress of the build and all that decides the bytes of the corpus.
    PREFIX.bad.jsonl lists the first lines that gave no document.
    """

    def __init__(
        self,
        prefix: str,
        task: Task,
        facts: CutterFacts,
        *,
        given: dict[str, str],
        is_strict: bool,
        overwrites: bool,
        seconds_a_journal: float,
    ) -> None:
        self._prefix, self._task, self._facts = prefix, task, facts
        self._is_strict, self._seconds_a_journal = is_strict, seconds_a_journal
        self._journal, self._bad_path = Path(f"{prefix}.journal"), Path(f"{prefix}.bad.jsonl")
        # all that decides the bytes of the corpus
        settings = {
            **given,
            "tokenizer": {**asdict(facts.tokenizer), "folder": ""},  # its folder may have moved
            "rules": asdict(facts.rules),
            "max_document_bytes": task.max_document_bytes,
            "chunk_bytes": task.chunk_bytes,
            "chunks": "whole lines",  # an older build divided plain files at other places
        }
        inputs = {source.path: asdict(source) for source in task.sources}
        self._settings = json.loads(json.dumps({"settings": settings, "sources": inputs}))
        sources = [
            {"name": Path(one.path).name, "size": one.size, "edges_sha256": one.edges}
            for one in task.sources
        ]
        self.progress, state = self._left(overwrites)
        self._before, self._seconds_before = self.progress.num_bytes, self.progress.seconds
        if not self.progress.is_closing:
            # first: it refuses a second build of the prefix at the same time
            self._writer = CorpusWriter(
                prefix,
                tokenizer=facts.tokenizer,
                rules=facts.rules,
                language=given["language"],
                type_names=(given["type_name"],),
                overwrite=overwrites,
                sources=sources,
                state=state,
            )
        # Drop the lines that were listed after the journal was written: they are read again.
        if self.progress.bad_bytes == 0:
            self._bad_path.unlink(missing_ok=True)
        elif self._bad_path.exists():
            os.truncate(self._bad_path, self.progress.bad_bytes)
        if is_strict and self.progress.bad_kinds:
            raise DataError(
                f"the unfinished build skipped {self.progress.bad_kinds.total()} bad lines:\n"
                f"{self._listed()}\nCorrect them and begin again with `overwrite`, or continue "
                "without `strict`."
            )
        self._since = self._written = time.monotonic()
        # whether writer and progress are at the same chunk
        self._is_between_chunks = True

    def _left(self, overwrites: bool) -> tuple[Progress, dict[str, Any] | None]:
        """Return progress and writer state of the unfinished build, if it is resumed."""
        if not self._journal.exists():
            return Progress(), None
        before = json.loads(self._journal.read_text(encoding="utf-8"))
        changes = _changes(before["settings"], self._settings["settings"])
        changes += _changes(before["sources"], self._settings["sources"], "input")
        if not changes and list(before["sources"]) != list(self._settings["sources"]):
            changes = ["the inputs come in another order"]
        if not changes:
            return Progress.of_json(before["progress"]), before["writer"]
        if not overwrites:
            listed = "".join(f"\n  {change}" for change in changes)
            raise UserError(
                f"{self._journal} is of an unfinished build with other settings:{listed}\n"
                "Undo these changes, give another `save_prefix`, or begin again with `overwrite`."
            )
        self._journal.unlink()
        return Progress(), None

    def run(self, pool: Pool, *, is_shown: bool) -> BuildReport:
        """Cut the remaining chunks and close the corpus."""
        progress = self.progress
        seconds = 0.1 if sys.stderr.isatty() else 10.0
        bar = tqdm(
            total=sum(source.size for source in self._task.sources),
            initial=progress.num_bytes,
            unit="B",
            unit_scale=True,
            desc="corpus",
            disable=not is_shown,
            mininterval=seconds,
            delay=seconds,
        )
        try:
            for chunk, result in ordered(pool, self._task.chunks(progress.file, progress.part)):
                self._take(chunk, result)
                bar.update(chunk.num_bytes)
            progress.num_bytes = bar.total
            self._finish()
        except (KeyboardInterrupt, SystemExit, RuntimeError, UserError):
            # the next start need not cut the written chunks again
            if self._is_between_chunks and progress.counts["num_tokens"]:
                with contextlib.suppress(OSError):
                    self._write_journal()
            elif self._is_between_chunks:  # nothing is lost by beginning again
                self._journal.unlink(missing_ok=True)
                self._writer.discard()
            raise
        finally:
            bar.close()
        progress.seconds = self._seconds()
        bad_path = str(self._bad_path) if progress.num_listed else None
        return BuildReport(self._prefix, progress, bad_path, self._facts.encoder, self._before)

    def _take(self, chunk: Chunk, result: ChunkResult) -> None:
        progress = self.progress
        first_line = progress.num_lines if chunk.file == progress.file else 0
        if result.bad and self._is_strict:
            first = result.bad[0]
            raise DataError(
                f"{chunk.path}:{first_line + first.line}: {first.reason}. It begins with "
                f"{first.start!r}. Correct the line, or build without `strict`."
            )
        self._is_between_chunks = False
        self._writer.add(result.segments)
        bad = result.bad[: max(0, _NUM_LISTED - progress.num_listed)]
        rows = [
            {"file": chunk.path, "line": first_line + line, "reason": reason, "start": start}
            for line, _, reason, start in bad
        ]
        if rows:
            text = "".join(json.dumps(row) + "\n" for row in rows)
            with writing(self._bad_path), self._bad_path.open("a", encoding="utf-8") as file:
                file.write(text)
            progress.num_listed += len(rows)
            progress.bad_bytes += len(text)  # ASCII
        progress.bad_kinds += result.bad_kinds
        progress.counts.update(result.counts)
        progress.file, progress.part = chunk.file, chunk.part + 1
        progress.num_lines = first_line + result.num_lines
        progress.num_bytes += chunk.num_bytes
        self._is_between_chunks = True
        self._refuse_hopeless()
        if time.monotonic() - self._written >= self._seconds_a_journal:
            self._write_journal()

    def _write_journal(self) -> None:
        """Replace the journal; a kill leaves the old one or the new one."""
        self.progress.seconds = self._seconds()
        draft = self._journal.with_name(f"{self._journal.name}.part")
        writer = None if self.progress.is_closing else self._writer.state()
        content = {**self._settings, "progress": vars(self.progress), "writer": writer}
        with writing(self._journal):
            with draft.open("w", encoding="utf-8") as file:
                json.dump(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._journal)
        self._written = time.monotonic()

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._since

    def _listed(self, most: int = 5) -> str:
        """Return the first bad lines, a line each."""
        if not self._bad_path.exists():
            return ""
        with self._bad_path.open(encoding="utf-8") as file:
            rows = map(json.loads, itertools.islice(file, most))
            lines = [f"  {row['file']}:{row['line']}: {row['reason']}" for row in rows]
        rest = self.progress.bad_kinds.total() - len(lines)
        return "\n".join(lines + [f"  and {rest} more"] * (rest > 0))

    def _refuse_hopeless(self, least: int = _HOPELESS) -> None:
        """Refuse input that gave `least` bad lines and no document."""
        progress = self.progress
        num_bad = progress.bad_kinds.total()
        if num_bad - progress.bad_kinds[EMPTY] >= least and not progress.counts["num_tokens"]:
            raise DataError(
                f"all of the first {num_bad:,} lines are bad:\n{self._listed()}\n"
                "Check how documents are made of rows."
            )

    def _finish(self) -> None:
        if self.progress.is_closing:
            name_files(self._prefix)
        else:
            self._refuse_hopeless(1)
            if not self.progress.counts["num_tokens"]:
                paths = [source.path for source in self._task.sources]
                raise DataError(f"{len(paths)} files have no document: {paths[:3]}. Check them.")
            self._write_journal()
            self._is_between_chunks = False

            def note() -> None:
                self.progress.is_closing = True
                self._write_journal()

            self._writer.close(when_whole=note)
        self._journal.unlink(missing_ok=True)


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
    strict: bool = False,
    overwrite: bool = False,
    progress: bool = True,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    seconds_a_journal: float = 5.0,
) -> BuildReport:
    """Build the corpus of some files, or continue an unfinished build.

    Args:
        files: names, folders, patterns: .txt, .jsonl .json .ndjson (also .gz .bz2 .zst), .parquet.
        make_cutter: makes a `DocumentCutter`; called once in each worker.
        document: (line, or dict of a row) -> text; by default the line, or the field "text".
        columns: the fields of Parquet that it needs; by default all.
        num_workers: 0 cuts in this process.
        strict: a bad line ends the build.
        overwrite: replaces a finished corpus; an unfinished build continues if nothing changed.
        max_document_bytes: a longer line is a bad line.

    Raises:
        UserError: wrong options; options or inputs differ from those of the unfinished build;
            another build writes this prefix.
        DataError: a bad line under `strict`, a damaged file, no document at all.
        StorageError: the files cannot be written.
        WorkerDied: a worker was killed; the same call continues the build.
    """
    sources = find_sources(files)
    task = Task(sources, make_cutter, document, max_document_bytes, columns, chunk_bytes)
    given = {"document": document_name, "language": language, "type_name": type_name}
    with open_pool(task, num_workers) as pool:
        run = BuildRun(
            os.fspath(path_prefix),
            task,
            pool.facts,
            given=given,
            is_strict=strict,
            overwrites=overwrite,
            seconds_a_journal=seconds_a_journal,
        )
        return run.run(pool, is_shown=progress)
