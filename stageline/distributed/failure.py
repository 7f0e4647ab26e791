"""How a run ends. The rank that failed first reports; the others end quietly with its exit code.

When one rank dies, its neighbours lose their connections and would report that instead of the
cause. So a rank claims the report in a store that all ranks share, before its sockets close; one
that merely lost a connection waits a moment for a better claim. Nothing is cleaned up on this path:
tearing a process group down would close sockets before the cause is told.
"""

import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from stageline.distributed.interrupt import INTERRUPTED, install_stop_handler, was_interrupted

UNEXPECTED = 1
SECONDS_FOR_THE_CAUSE = 2.0
SECONDS_FOR_THE_REPORT = 5.0
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|"
    r"timed out|ncclremoteerror|ncclsystemerror|nccl communicator was aborted|"
    r"failed to (recv|send)|recvvalue failed|sendbytes failed",
    re.IGNORECASE,
)
_stages: list[int] = []


def name_stages(stages: Sequence[int]) -> None:
    """Tells which stages of the model this rank runs, for its report."""
    _stages[:] = stages


def run_entry(main: Callable[[], int | None]) -> NoReturn:
    """Runs an entry file's `main` and ends the process.

    Exit codes: what `main` returns (None is 0); an exception's `exit_code` (2 for a wrong option, 3
    for bad data), printed without a traceback; 130 after Ctrl-C; 1 for anything else.
    """
    install_stop_handler()
    try:
        code = main() or 0
    except KeyboardInterrupt:
        _end_interrupted()
    except Exception as error:
        trace = error.__traceback__
        _end_failed(error.with_traceback(trace and trace.tb_next))  # less the frame of this file
    if was_interrupted() and not _has_agent():
        code = code or INTERRUPTED
    # below an agent 0: at anything else it would end the ranks that are still saving
    sys.exit(code)


def describe_failure(error: BaseException) -> tuple[str, int]:
    """The report of an exception and the exit code that follows from it."""
    for cause in _causes(error):
        code = getattr(cause, "exit_code", None)
        if isinstance(code, int):
            return f"error: {cause}\n", code
    root = list(_causes(error))[-1] if str(error).lstrip().startswith("[Stage") else error
    what = "".join(traceback.format_exception_only(root)).strip()
    trace = "".join(traceback.format_exception(error))
    return f"{_who()}: {what}\n{trace}", UNEXPECTED


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception tells of a neighbour's death, not of a cause."""
    return any(
        isinstance(cause, ConnectionError)
        or type(cause).__name__ in ("DistBackendError", "DistNetworkError")
        or (isinstance(cause, RuntimeError) and _LOST_CONNECTION.search(str(cause)))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def _who() -> str:
    if _world_size() == 1:
        return "failed"
    stage = f" (stage {', '.join(map(str, _stages))})" if _stages else ""
    return f"rank {os.environ.get('RANK', '0')}{stage} failed first"


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _has_agent() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _end_failed(error: Exception) -> NoReturn:
    report, code = describe_failure(error)
    patience = SECONDS_FOR_THE_CAUSE if is_lost_connection(error) else 0.0
    _end(report, code, patience=patience)


def _end_interrupted() -> NoReturn:
    report = "Interrupted before the first step; nothing was saved.\n"
    _end(report, INTERRUPTED, patience=0.0)


def _end(report: str, code: int, *, patience: float) -> NoReturn:
    """Reports unless another rank has the claim, then ends the process at once."""
    board = _open_board()
    winner = board.claim({"rank": os.environ.get("RANK", "0"), "code": code}, patience=patience)
    if winner is None:
        sys.stdout.flush()
        print(("\n" if sys.stderr.isatty() else "") + report, end="", file=sys.stderr, flush=True)
        board.mark_reported()
        os._exit(code)
    # an agent ends all ranks as soon as one is gone: let the first one finish its report
    board.wait_reported(SECONDS_FOR_THE_REPORT)
    sys.stdout.flush()
    os._exit(winner["code"])


class _NoBoard:
    """For a single process: always the first."""

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        return None

    def mark_reported(self) -> None:
        return None

    def wait_reported(self, seconds: float) -> None:
        return None


class _StoreBoard:
    """The claim in the TCP store that the ranks met at; works across machines."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # torch is slow to import: only when failing

        self.key = f"stageline/failed_first/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=3),
        )

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        """Claims the report, after `patience` seconds; the claim of the rank that has it."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self.store.check([self.key]):
            time.sleep(0.05)
        text = json.dumps(mine)
        held = self.store.compare_set(self.key, "", text).decode()
        return None if held == text else json.loads(held)

    def mark_reported(self) -> None:
        self.store.set(self.key + "/reported", "1")

    def wait_reported(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.store.check([self.key + "/reported"]):
            time.sleep(0.05)


class _FileBoard:
    """The claim as a file, for the ranks of one machine whose store is gone."""

    def __init__(self) -> None:
        run_id = re.sub(r"\W", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        name = f"stageline_failed_first_{run_id}_{os.getppid()}.json"
        self.path = Path(tempfile.gettempdir()) / name
        self.reported = self.path.with_suffix(".reported")

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        """As `_StoreBoard.claim`."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and not self.path.exists():
            time.sleep(0.05)
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(mine))
        try:
            os.link(draft, self.path)  # atomic, with its content
        except FileExistsError:
            return json.loads(self.path.read_text())
        finally:
            draft.unlink()
        return None

    def mark_reported(self) -> None:
        self.reported.touch()

    def wait_reported(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.reported.exists():
            time.sleep(0.05)


def _open_board() -> _NoBoard | _StoreBoard | _FileBoard:
    if _world_size() == 1:
        return _NoBoard()
    try:
        return _StoreBoard()
    except Exception:  # the store died with its host: the report must come out all the same
        return _FileBoard()
