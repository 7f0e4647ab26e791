"""Files that tell of a failure, in the run folder: failure.json, failures/rank-1.json and .log.

The log of a rank holds its traceback, or what Python wrote of its threads when a signal ended it.
Nothing is made before something fails, but for logs of no length that a good end takes away.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import IO

from stageline.distributed.record import FailureRecord, read_record, this_attempt
from stageline.errors import UserError

FILE = "failure.json"
FOLDER = "failures"
SECONDS_OF_A_START = 120  # ranks that were started together come up within
_STARTED_AT = time.time_ns()


class _Run:
    """The folder of this run, if it is known, and the log that signals write to."""

    folder: Path | None = None
    log: IO[str] | None = None


_run = _Run()


def tell_run_folder(path: str | Path) -> None:
    """Tells where files may go; what an earlier start left there is taken away by one process."""
    _run.folder = Path(path)
    rank = os.environ.get("RANK")
    if rank in (None, "0"):
        with contextlib.suppress(OSError):
            # a rank's log before the file that tells its age
            files = sorted((_run.folder / FOLDER).glob("rank-*"), reverse=True)
            for file in (_run.folder / FILE, *files):
                # a rank that is quicker than this one may have failed already
                if file.is_file() and (rank is None or _is_stale(file)):
                    _remove(file)


def _is_stale(file: Path) -> bool:
    if file.stat().st_mtime_ns < _STARTED_AT - SECONDS_OF_A_START * 10**9:
        return True
    if file.suffix == ".log":
        return _is_stale(file.with_suffix(".json")) if file.with_suffix(".json").exists() else False
    try:
        return json.loads(file.read_text()).get("attempt") != this_attempt()
    except ValueError:
        return True


def _remove(file: Path) -> None:
    if file.stat().st_size:  # a log of no length may be another process's, still open
        file.unlink(missing_ok=True)


def open_log() -> None:
    """Opens the log of this rank, so that a signal like SIGSEGV leaves the lines of its threads."""
    if _run.folder is None:
        return
    with contextlib.suppress(OSError):
        path = _log_of(int(os.environ.get("RANK", "0")))
        path.parent.mkdir(parents=True, exist_ok=True)
        _run.log = path.open("a", encoding="utf-8")
        faulthandler.enable(file=_run.log)


def close_log() -> None:
    """Ends `open_log`; an empty log goes, and the folder if it is the last one."""
    log, _run.log = _run.log, None
    if log is None:
        return
    with contextlib.suppress(OSError, ValueError):
        faulthandler.disable()
        log.close()
        path = Path(log.name)
        if path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()


def write_record(record: FailureRecord) -> FailureRecord:
    """Writes the files of a rank before anything else; the record with its log, if that stands."""
    if _run.folder is None or record.kind in ("", UserError.kind):
        return record  # a wrong option is not of this folder's run
    try:
        log = _log_of(record.rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        if record.traceback:
            with log.open("a", encoding="utf-8") as file:
                file.write(record.traceback)
            record = replace(record, log=str(log))
        _write(log.with_suffix(".json"), record)
    except OSError:
        return replace(record, log="")
    return record


def write_first(record: FailureRecord) -> None:
    """Writes failure.json: the failure that ended the run."""
    if _run.folder is not None and record.kind not in ("", UserError.kind):
        with contextlib.suppress(OSError):
            _run.folder.mkdir(parents=True, exist_ok=True)
            _write(_run.folder / FILE, record)


def read_first() -> FailureRecord | None:
    """What failure.json tells of this start of the run; None if nothing was told yet."""
    if _run.folder is None:
        return None
    try:
        told = read_record(json.loads((_run.folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    return told if told.attempt == this_attempt() else None


def log_with_words(rank: int) -> str:
    """The path of a rank's log if there is something in it."""
    if _run.folder is None:
        return ""
    path = _log_of(rank)
    return str(path) if path.is_file() and path.stat().st_size else ""


def _log_of(rank: int) -> Path:
    return _run.folder / FOLDER / f"rank-{rank}.log"


def _write(path: Path, record: FailureRecord) -> None:
    draft = path.with_suffix(f".{os.getpid()}_{threading.get_ident()}")
    draft.write_text(json.dumps(record.as_dict(), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
