"""The stacks of all threads of a rank, for the report of a hang; also of one that hangs in C code.

A rank writes its own. One whose Python does not run any more is asked by SIGUSR2: the system's part
of the handler writes into a file in memory, which a neighbour on the same machine reads.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

FOLDER = "failures"  # beside the other accounts of a failure
SECONDS_TO_WRITE = 0.3
_run_folder: Path | None = None


def keep_stacks_in(folder: Path | None) -> None:
    """Tells where stacks are written, below the run's folder; None: nowhere."""
    global _run_folder
    _run_folder = folder


def offer_stacks() -> int:
    """Makes SIGUSR2 write the stacks of this process into a file in memory.

    Returns:
        Its number in this process; -1 where that cannot be.
    """
    if not hasattr(os, "memfd_create"):
        return -1
    number = os.memfd_create("stacks")
    faulthandler.register(signal.SIGUSR2, file=number, all_threads=True)
    return number


def write_stacks() -> Path | None:
    """Writes the stacks of this process; the folder, if that was possible."""
    if _run_folder is None:
        return None
    try:
        path = _file(_run_folder, os.environ.get("RANK", "0"))
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:  # a run that ends must not fail of it
        return None
    return path.parent


def fetch_stacks(offers: Mapping[int, tuple[int, int]]) -> None:
    """Writes the stacks of other processes of this machine, unless they did so themselves.

    Args:
        offers: rank -> (process id, number that `offer_stacks` gave there).
    """
    if _run_folder is None:
        return
    offers = {rank: offer for rank, offer in offers.items() if offer[1] >= 0}
    for pid, _ in offers.values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(SECONDS_TO_WRITE if offers else 0.0)
    for rank, (pid, number) in offers.items():
        with contextlib.suppress(OSError):
            # by its name in /proc, so that our own place in the file is at its beginning
            text = Path(f"/proc/{pid}/fd/{number}").read_bytes()
            file = _file(_run_folder, rank)
            if text and not file.exists():
                file.write_bytes(text)


def _file(folder: Path, rank: int | str) -> Path:
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    return folder / FOLDER / f"rank-{rank}.stacks"
