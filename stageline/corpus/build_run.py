"""One start of a build: writes what the workers cut, in order, and keeps the journal."""

import contextlib
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stageline.chaos import point
from stageline.corpus.bad_lines import BadLines
from stageline.corpus.build_progress import BuildProgress
from stageline.corpus.build_report import BuildReport
from stageline.corpus.chunks import Chunk, iter_chunks
from stageline.corpus.journal import Journal, Progress
from stageline.corpus.pool import Pool, ordered
from stageline.corpus.row_text import EMPTY
from stageline.corpus.sources import Source, check_unchanged
from stageline.corpus.worker import ChunkResult, CutterFacts, Task
from stageline.corpus.writer import CorpusWriter
from stageline.errors import DataError, UserError

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
