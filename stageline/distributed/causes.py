"""What an exception means: its kind and exit code, and whether it only echoes another's end."""

import errno
import re
from collections.abc import Iterator

from stageline.errors import CRASH, DataError, MemoryFull, StorageError, UserError

_KINDS = {2: "usage", 3: "data", 4: "checkpoint", 5: "storage", 6: "non-finite"}
_KINDS |= {7: "memory", 8: "hang", CRASH: "crash"}
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|"
    r"timed out|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|"
    r"failed to (recv|send)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|bad_alloc|ALLOC_FAILED", re.IGNORECASE
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def classify(error: BaseException) -> tuple[BaseException, str, int]:
    """(the exception that tells most, its kind, the exit code that follows)."""
    for cause in chain(error):
        code = getattr(cause, "exit_code", None)
        if isinstance(code, int):
            return cause, getattr(cause, "kind", _KINDS.get(code, "crash")), code
    for cause in chain(error):
        if is_out_of_memory(cause):
            return cause, MemoryFull.kind, MemoryFull.exit_code
        if isinstance(cause, OSError) and cause.errno in _NO_SPACE:
            return cause, StorageError.kind, StorageError.exit_code
    # torch's own schedules wrap what a stage raised
    is_wrapped = str(error).lstrip().startswith("[Stage")
    return list(chain(error))[-1] if is_wrapped else error, "crash", CRASH


def is_of_the_user(code: int) -> bool:
    """Whether an error of this code is told without a traceback."""
    return code in (UserError.exit_code, DataError.exit_code)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception tells of a neighbour's death, not of a cause."""
    if any(isinstance(getattr(cause, "exit_code", None), int) for cause in chain(error)):
        return False  # somebody found out what it means
    return any(
        isinstance(cause, ConnectionError)
        or type(cause).__name__ in ("DistBackendError", "DistNetworkError")
        or (isinstance(cause, RuntimeError) and _LOST_CONNECTION.search(str(cause)))
        for cause in chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; knows torch's errors by their words."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def bytes_asked(error: BaseException) -> int | None:
    """What the text of an error of memory says that was asked for."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    unit = found[2].lower()
    return int(float(found[1]) * 1024 ** ("bkmgt".index(unit[0])))
