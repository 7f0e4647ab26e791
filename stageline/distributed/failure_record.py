"""Report of one failure: the line, `failure.json`, and the error file for torch's agent."""

import contextlib
import errno
import faulthandler
import json
import os
import re
import socket
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from stageline.errors import (
    CRASH,
    MemoryFull,
    StorageError,
    UserError,
    is_out_of_memory,
    spelled,
)
from stageline.progress import Progress, place

_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|"
    r"timed out|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|"
    r"failed to (recv|send)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib"))
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)


def chain(error: BaseException) -> list[BaseException]:
    """Return the exception and what it was raised from, outermost first."""
    found, cause = [error], error.__cause__
    while cause is not None and not any(cause is one for one in found):  # an error may cause itself
        found.append(cause)
        cause = cause.__cause__
    return found


def classify(error: BaseException) -> tuple[BaseException, str, int]:
    """(the exception that tells most, its kind, the exit code that follows)."""
    for cause in chain(error):
        code = getattr(cause, "exit_code", None)
        if isinstance(code, int):
            other = UserError.kind if code == UserError.exit_code else "crash"
            return cause, getattr(cause, "kind", other), code
    for cause in chain(error):
        if is_out_of_memory(cause):
            return cause, MemoryFull.kind, MemoryFull.exit_code
        if isinstance(cause, OSError) and cause.errno in _NO_SPACE:
            return cause, StorageError.kind, StorageError.exit_code
    # torch's own schedules wrap what a stage raised
    is_wrapped = str(error).lstrip().startswith("[Stage")
    return chain(error)[-1] if is_wrapped else error, "crash", CRASH


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception tells of a neighbour's death, not of a cause."""
    if any(isinstance(getattr(cause, "exit_code", None), int) for cause in chain(error)):
        return False  # its exit code is known, so the cause is too
    return any(
        isinstance(cause, ConnectionError)
        or type(cause).__name__ in ("DistBackendError", "DistNetworkError")
        or (isinstance(cause, RuntimeError) and _LOST_CONNECTION.search(str(cause)))
        for cause in chain(error)
    )


MAX_TRACEBACK = 20_000  # characters, their end
stages_here: list[int] = []  # this rank runs these stages of the model


@dataclass(frozen=True)
class FailureRecord:
    """One failure.

    Attributes:
        kind: the word in brackets; "" for words that are told as they are.
        message: what happened and what to do; may have several lines.
        stages: of the rank.
        stage, step, micro_batch, operation: what it did; see `stageline.progress.Progress`.
        is_secondary: it follows from another rank's end; told only where no rank tells more.
        log: a file that holds the traceback; "": it is told with the message.
    """

    kind: str
    code: int
    message: str
    rank: int = 0
    num_ranks: int = 1
    stages: tuple[int, ...] = ()
    stage: int | None = None
    step: int | None = None
    micro_batch: int | None = None
    operation: str = ""
    host: str = ""
    time_ns: int = 0
    is_secondary: bool = False
    traceback: str = ""
    log: str = ""

    @property
    def headline(self) -> str:
        """`error[crash] rank=1 stage=1 step=3: what`, the first line of the message."""
        what = self.message.splitlines()[0] if self.message else ""
        if not self.kind:
            return what
        more = f" (traceback: {self.log})" if self.log and self.code == CRASH else ""
        return f"error[{self.kind}]{self._where()}: {what}{more}"

    def _where(self) -> str:
        # an option is wrong on all ranks, a lost connection of this one is not where the fault was
        if self.kind == UserError.kind or self.is_secondary:
            return ""
        stages = self.stages if self.num_ranks > 1 or len(self.stages) > 1 else ()
        parts = {
            "rank": self.rank if self.num_ranks > 1 else None,
            "stage": ",".join(map(str, stages)) or None,
            "step": self.step,
        }
        if self.stage is not None and stages:
            parts["stage"] = self.stage
        return "".join(f" {name}={value}" for name, value in parts.items() if value is not None)

    def report(self) -> str:
        """Return all lines; the headline comes first, and again at the end of several lines."""
        lines = [self.headline, *self.message.splitlines()[1:]]
        if self.traceback and not self.log and self.kind and self.code == CRASH:
            lines += self.traceback.rstrip().splitlines()
        if len(lines) > 1 and self.kind:
            lines.append(self.headline)
        return "\n".join(lines) + "\n"


def on_full_memory(describe: Callable[[], str]) -> None:
    """Register a function that reports the contents of a full memory and the cure; last wins."""
    _Run.describe_memory = describe


def record_here(
    kind: str,
    code: int,
    message: str,
    *,
    is_secondary: bool = False,
    at: Progress | None = None,
) -> FailureRecord:
    """A record of this rank, now; `at` is what it does, by default what its main thread does."""
    here = at or place()
    return FailureRecord(
        kind=kind,
        code=code,
        message=spelled(message),
        rank=int(os.environ.get("RANK", "0")),
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        stages=tuple(stages_here),
        stage=stages_here[0] if here.stage is None and len(stages_here) == 1 else here.stage,
        step=here.step,
        micro_batch=here.micro_batch,
        operation=here.operation,
        host=socket.gethostname(),
        time_ns=time.time_ns(),
        is_secondary=is_secondary,
    )


def raised_at(error: BaseException) -> str:
    """Return " at file:line" of the innermost frame, where one is outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)] or frames
    return f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def record_of(error: BaseException, *, is_secondary: bool = False) -> FailureRecord:
    """The record of an exception on this rank."""
    now = time.time_ns()
    cause, kind, code = classify(error)
    message = str(cause)
    if code == CRASH and not hasattr(cause, "exit_code"):
        message = f"{_first_line(cause)}{raised_at(cause)}{_during()}"
    elif code == MemoryFull.exit_code and is_out_of_memory(cause):
        more = ""
        if asked := _ASKED.search(str(cause)):
            count = int(float(asked[1]) * 1024 ** "bkmgt".index(asked[2][0].lower()))
            more = f"; {count / 2**30:.2f} GiB more ({count} bytes) were asked for"
        try:
            filled = _Run.describe_memory() if _Run.describe_memory else ""
        except Exception as failed:  # the report of a failure must not fail
            filled = f"What fills it could not be found out ({_first_line(failed)})."
        message = f"out of memory{_during()}{more}. {filled or _first_line(cause)}"
    elif isinstance(cause, OSError) and not hasattr(cause, "exit_code"):
        message = f"{_first_line(cause)}{_during()}"
    trace = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    record = record_here(kind, code, message, is_secondary=is_secondary)
    return replace(record, time_ns=now, traceback=trace)


def _first_line(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _during() -> str:
    here = place()
    if here.operation == "start":
        return ""
    of = "" if here.micro_batch is None else f" of micro-batch {here.micro_batch}"
    return f" in {here.operation}{of}"


# Files in the run folder: failure.json and failures/rank-1.log. The log holds a rank's traceback,
# or what Python wrote of its threads when a signal ended it or when it hung. Before a failure there
# are only empty logs, which a good end takes away.

FILE = "failure.json"
FOLDER = "failures"


class _Run:
    """State of this run, for its reports.

    Attributes:
        began: when this process entered its entry file.
        log: signals write to it.
        armed_by: the process whose timer writes stacks.
        describe_memory: reports the contents of a full memory, and the cure.
    """

    began: float = 0.0
    folder: Path | None = None
    log: IO[str] | None = None
    armed_by: int | None = None
    describe_memory: Callable[[], str] | None = None


def begin() -> None:
    """Note that an entry file begins."""
    _Run.began = time.time()


def tell_run_folder(path: str | Path) -> None:
    """Set the folder of reports; one process removes the files of an earlier start there."""
    _Run.folder = Path(path)
    rank = os.environ.get("RANK")
    if rank in (None, "0"):
        with contextlib.suppress(OSError):
            for file in (_Run.folder / FILE, *(_Run.folder / FOLDER).glob("rank-*")):
                # a rank that is quicker than this one may have failed already; a log of no length
                # may be another process's, still open
                told = file.stat() if file.is_file() else None
                if told and told.st_size and (rank is None or told.st_mtime < _Run.began):
                    file.unlink()


def has_checkpoint() -> bool:
    """Return whether the folder of reports has a checkpoint to resume."""
    return _Run.folder is not None and any((_Run.folder / "checkpoints").glob("step-????????"))


def open_log() -> None:
    """Open the log of this rank, so that a signal like SIGSEGV leaves the lines of its threads."""
    if _Run.folder is None:
        return
    with contextlib.suppress(OSError):
        path = _log_of(int(os.environ.get("RANK", "0")))
        path.parent.mkdir(parents=True, exist_ok=True)
        _Run.log = path.open("a", encoding="utf-8")
        faulthandler.enable(file=_Run.log)


def close_log() -> None:
    """End `open_log`; an empty log is removed, and the folder after the last one."""
    log, _Run.log = _Run.log, None
    if log is None:
        return
    with contextlib.suppress(OSError, ValueError):
        if _Run.armed_by == os.getpid():  # a forked process would wait for its parent's timer
            faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        log.close()
        path = Path(log.name)
        if path.stat().st_size == 0:
            path.unlink()
            path.parent.rmdir()


def write_stacks_after(seconds: float) -> None:
    """Write the stacks of all threads into the log, unless called again before."""
    if _Run.log is not None and seconds > 0:
        with contextlib.suppress(OSError, ValueError):  # it was just closed
            faulthandler.dump_traceback_later(seconds, file=_Run.log)
            _Run.armed_by = os.getpid()


def where_stacks_are() -> str:
    """` in FOLDER`, for the end of a sentence."""
    return f" in {_Run.folder / FOLDER}" if _Run.folder and _Run.log else ""


def log_with_words(rank: int) -> str:
    """The path of a rank's log if there is something in it."""
    path = _Run.folder and _log_of(rank)
    return str(path) if path and path.is_file() and path.stat().st_size else ""


def _log_of(rank: int) -> Path:
    assert _Run.folder is not None  # the callers looked
    return _Run.folder / FOLDER / f"rank-{rank}.log"


def keep_traceback(record: FailureRecord) -> FailureRecord:
    """Write the traceback into the rank's log; the record with its log, if that stands."""
    if _Run.folder is None or not record.traceback or record.kind == UserError.kind:
        return record  # a wrong option is not of this folder's run
    try:
        log = _log_of(record.rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(record.traceback)
    except OSError:
        return record
    return replace(record, log=str(log))


def write_first(record: FailureRecord) -> None:
    """Write failure.json: the failure that ended the run."""
    if _Run.folder is not None and record.kind not in ("", UserError.kind):
        with contextlib.suppress(OSError):
            _Run.folder.mkdir(parents=True, exist_ok=True)
            _write(_Run.folder / FILE, asdict(record))


LAUNCHER = "STAGELINE_LAUNCHER"  # the process id of the launcher, for its workers
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's agent

# Files of torch's agent, below its own folder of logs: ATTEMPT/RANK/error.json in the form that its
# `ErrorHandler` writes, with the record in it; the stages of the rank are next to it.


def leave_error_file(record: FailureRecord) -> None:
    """Report to the agent why this rank ends."""
    extra = {"py_callstack": record.report(), "timestamp": str(record.time_ns // 10**9)}
    told = {"message": record.headline, "extraInfo": extra}
    _leave({"message": told, "record": asdict(record)})


def name_stages(stages: Sequence[int]) -> None:
    """Set the stages of the model that this rank runs, for its report and its launcher's."""
    stages_here[:] = stages
    _leave(stages_here, name="stages.json")


def _leave(told: Any, *, name: str = "") -> None:
    """Write the agent's error file, or the file `name` next to it."""
    if path := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError):
            _write(Path(path).with_name(name) if name else Path(path), told)


def is_first_to_report() -> bool:
    """Whether this rank prints: not below our launcher, which does; else the first of a machine."""
    path = os.environ.get(ERROR_FILE)
    if LAUNCHER in os.environ or not path:
        return not path
    try:
        # other files of this attempt are in the folders of the ranks
        Path(path).parents[1].joinpath("reported").touch(exist_ok=False)
    except OSError:
        return False
    return True


def read_error_files(folder: Path) -> dict[int, FailureRecord]:
    """Rank -> what it told the agent."""
    told = [json.loads(file.read_text())["record"] for file in folder.rglob("error.json")]
    records = [FailureRecord(**{**one, "stages": tuple(one["stages"])}) for one in told]
    return {record.rank: record for record in records}


def stages_of(folder: Path, rank: int) -> tuple[int, ...]:
    """The stages that a rank of this machine runs, as far as it told."""
    file = next(folder.rglob(f"{rank}/stages.json"), None)
    return tuple(json.loads(file.read_text())) if file else ()


def _write(path: Path, told: Any) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
