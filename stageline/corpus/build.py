"""Builds a corpus of text files: in several processes, in order, and after a kill going on.

The parent divides the input into chunks, workers cut them, and the parent writes what comes back
in the order of the chunks. So the bytes do not depend on the number of workers, and what is held
in memory not on the size of the input. Every few seconds a journal says how far it is.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from stageline.corpus.build_report import BuildReport
from stageline.corpus.build_run import BuildRun
from stageline.corpus.chunks import CHUNK_BYTES
from stageline.corpus.journal import SUFFIX as JOURNAL
from stageline.corpus.journal import only_build
from stageline.corpus.pool import OneProcess, Pool, Processes
from stageline.corpus.row_text import DEFAULT_FIELD, Document
from stageline.corpus.sources import find_sources
from stageline.corpus.worker import Task
from stageline.errors import UserError

MAX_DOCUMENT_BYTES = 32 << 20
_SECONDS_A_JOURNAL = 5.0


def build_corpus(
    files: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    path_prefix: str | os.PathLike,
    make_cutter: Callable[[], Any],
    document: Document | None = None,
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
        files: names, folders, patterns: .txt (a document a line), .jsonl .json .ndjson, all also
            .gz .bz2 .zst, and .parquet.
        make_cutter: makes a `DocumentCutter`; called once in each worker.
        document: (line, or dict of a row) -> text; by default the line, or the field "text". Its
            attribute `columns`, where it has one, names the fields that it needs of Parquet.
        document_name: says in the journal which one it is; by default its name in Python.
        language: goes into the header.
        num_workers: 0 cuts in this process.
        strict: a bad line ends the build.
        resume: False begins anew where a build was left.
        overwrite: replaces a finished corpus; of a build that was left, goes on where nothing
            changed, and else begins anew.
        max_document_bytes: a longer line is a bad line.

    Raises:
        UserError: wrong options; other ones, or other inputs, than the build that was left.
        DataError: a bad line under `strict`, a damaged file, no document at all.
        StorageError: the files cannot be written.
        WorkerDied: a worker was killed. The build can be gone on with.
    """
    _check(num_workers, executor, max_document_bytes)
    settings = (make_cutter, document, max_document_bytes, _columns(document), chunk_bytes)
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
        raise UserError(f"--num-workers is {num_workers}; 0 or more was expected.")
    if max_document_bytes < 1:
        raise UserError(f"--max-document-bytes is {max_document_bytes}; 1 or more was expected.")
    if executor not in ("processes", "ray"):
        raise UserError(f"--executor is {executor!r}; processes or ray was expected.")


def _make_way(prefix: str, *, resume: bool, overwrite: bool) -> None:
    index, journal = Path(f"{prefix}.idx"), Path(f"{prefix}{JOURNAL}")
    if index.exists() and not journal.exists() and not overwrite:
        raise UserError(
            f"{index} is there: a finished corpus. A new prefix was expected, because a corpus "
            "may be in use: give another --save-prefix, or replace it with --overwrite."
        )
    if not resume:
        journal.unlink(missing_ok=True)


def _open_pool(task: Task, num_workers: int, executor: str) -> Pool:
    if executor == "ray":
        from stageline.corpus.ray_build import RayActors

        return RayActors(task, max(1, num_workers))
    return Processes(task, num_workers) if num_workers else OneProcess(task)


def _columns(document: Document | None) -> Sequence[str] | None:
    return [DEFAULT_FIELD] if document is None else getattr(document, "columns", None)


def _name_of(document: Document | None) -> str:
    if document is None:
        return "default"
    function = getattr(document, "func", document)  # of a partial
    name = getattr(function, "__qualname__", type(function).__qualname__)
    options = getattr(document, "keywords", {})
    return f"{function.__module__}.{name} {options}" if options else f"{function.__module__}.{name}"
