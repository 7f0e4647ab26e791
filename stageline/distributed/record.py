"""What is told of one failure: the line, the file `failure.json`, what ranks tell each other."""

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from stageline.distributed.causes import bytes_asked, classify, is_out_of_memory
from stageline.distributed.machines import this_machine
from stageline.errors import CRASH, MemoryFull, UserError
from stageline.progress import place

MAX_TRACEBACK = 20_000  # characters, their end
_stages: list[int] = []
_describers: list[Callable[[], str]] = []


@dataclass(frozen=True)
class FailureRecord:
    """One failure.

    Attributes:
        kind: the word in brackets; "" for words that are told as they are.
        message: what happened and what to do; may have several lines.
        stages: of the rank.
        stage, step, micro_batch, operation: what it did; see `stageline.progress.Place`.
        time_ns: when, on the clock of the host.
        is_secondary: it follows from another rank's end; told only where no rank tells more.
        log: a file that holds the traceback; "": it is told with the message.
        attempt: which start of which run this was.
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
    machine: int = 0
    host: str = ""
    time_ns: int = 0
    is_secondary: bool = False
    traceback: str = ""
    log: str = ""
    attempt: str = ""

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
        """All lines; the headline is the first, and the last of several."""
        lines = [self.headline, *self.message.splitlines()[1:]]
        if self.traceback and not self.log and self.kind and self.code == CRASH:
            lines += self.traceback.rstrip().splitlines()
        if len(lines) > 1 and self.kind:
            lines.append(self.headline)
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_record(told: Mapping[str, Any]) -> FailureRecord:
    """A record from JSON; what it does not know is left out."""
    known = {field.name for field in fields(FailureRecord)}
    given = {name: value for name, value in told.items() if name in known}
    return FailureRecord(**{**given, "stages": tuple(given.get("stages", ()))})


def first_of(records: Sequence[FailureRecord]) -> FailureRecord:
    """The cause: the earliest one; of those that only follow from others none, if possible."""
    return min(records, key=lambda record: (record.is_secondary, record.time_ns))


def tell_stages(stages: Sequence[int]) -> None:
    """Tells which stages of the model this rank runs."""
    _stages[:] = stages


def own_stages() -> tuple[int, ...]:
    """What `tell_stages` told."""
    return tuple(_stages)


def on_full_memory(describe: Callable[[], str]) -> None:
    """Registers what tells, where memory is full, what fills it and what to do; the last wins."""
    _describers[:] = [describe]


def this_attempt() -> str:
    """Which start of which run this process belongs to, as far as the environment tells."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(os.environ.get(name, "") for name in names)


def record_here(kind: str, code: int, message: str, *, is_secondary: bool = False) -> FailureRecord:
    """A record of this rank, now."""
    here, machine = place(), this_machine()
    return FailureRecord(
        kind=kind,
        code=code,
        message=message,
        rank=int(os.environ.get("RANK", "0")),
        num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
        stages=tuple(_stages),
        stage=here.stage if here.stage is not None or len(_stages) != 1 else _stages[0],
        step=here.step,
        micro_batch=here.micro_batch,
        operation=here.operation,
        machine=machine.index,
        host=machine.host,
        time_ns=time.time_ns(),
        is_secondary=is_secondary,
        attempt=this_attempt(),
    )


def record_of(error: BaseException, *, is_secondary: bool = False) -> FailureRecord:
    """The record of an exception on this rank."""
    now = time.time_ns()
    cause, kind, code = classify(error)
    message = str(cause)
    if code == CRASH and not hasattr(cause, "exit_code"):
        message = f"{_first_line(cause)}{_location(cause)}{_during()}"
    elif code == MemoryFull.exit_code and is_out_of_memory(cause):
        message = _full_memory(cause)
    elif isinstance(cause, OSError) and not hasattr(cause, "exit_code"):
        message = f"{_first_line(cause)}{_during()}"
    trace = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
    record = record_here(kind, code, message, is_secondary=is_secondary)
    return replace(record, time_ns=now, traceback=trace)


def _full_memory(error: BaseException) -> str:
    asked = bytes_asked(error)
    many = "" if asked is None else f"; {_gib(asked)} more ({asked} bytes) were asked for"
    said = "".join(filter(None, (_say(describe) for describe in _describers)))
    return f"out of memory{_during()}{many}. {said or _first_line(error)}"


def _say(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except Exception as error:  # the report of a failure must not fail
        return f"What fills it could not be found out ({_first_line(error)})."


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _first_line(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _location(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def _during() -> str:
    here = place()
    if here.operation == "start":
        return ""
    of = "" if here.micro_batch is None else f" of micro-batch {here.micro_batch}"
    return f" in {here.operation}{of}"
