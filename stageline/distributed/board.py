"""The board where ranks claim the report of a failure: one of them tells, the others read who.

It is the TCP store that the ranks met at, which works across machines; where that is gone, a store
in a file, which works for the ranks of one machine.
"""

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from stageline.distributed.machines import process_started_at, this_machine

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_CONNECT = 3.0
SECONDS_TO_DIE = 1.0
SECONDS_OF_A_START = 5.0  # between the processes of one machine


def claim_key() -> str:
    """Where in the store the claim of this start lies."""
    # one that torchrun's agents keep is that of all starts; machines that came later count fewer
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_kept else "0"
    return f"stageline/failed_first/{count}"


def connect_store(seconds: float = SECONDS_TO_CONNECT) -> "TCPStore":
    """A connection of its own to the store of the run: another thread may wait in the group's.

    Raises:
        OSError, RuntimeError: nobody answers.
    """
    from torch.distributed import TCPStore  # torch is slow to import: only where it is needed

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # a failing TCPStore would write lines of its own before the report
    socket.create_connection((address, port), timeout=seconds).close()
    wait = timedelta(seconds=seconds)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=wait)


class _Ours:
    """Whether the store at the address of the run may be its own, and whether we left it."""

    store = True
    is_left = False


def disown_store() -> None:
    """Tells that the address of the run is another program's: no claim may go there."""
    _Ours.store = False


class Board:
    """Where the ranks of a run agree who reports.

    Args:
        is_file: the ranks of other machines do not see it, and it ends with no process.
    """

    def __init__(self, store: "Store", *, is_file: bool = False) -> None:
        self.store = store
        self.is_file = is_file
        self.key = claim_key()
        self.machine = this_machine()

    @classmethod
    def on_store(cls) -> "Board":
        """In the store that the ranks met at."""
        return cls(connect_store())

    @classmethod
    def on_file(cls) -> "Board":
        """In a file, where the store is gone. It stays."""
        from torch.distributed import FileStore

        return cls(FileStore(str(_claims_file())), is_file=True)

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        """Claims the report, after `patience` seconds; the claim of the rank that has it."""
        text = json.dumps(mine)
        if not mine.get("is_secondary"):
            self.store.set(self._claim_of(mine["rank"]), text)
        _wait_until(lambda: self.store.check([self.key]), patience)
        held = self.store.compare_set(self.key, "", text).decode()
        return None if held == text else json.loads(held)

    def is_claimed(self) -> bool:
        """Whether a rank has the report."""
        return self.store.check([self.key])

    def claims(self) -> list[dict]:
        """What all ranks that failed so far claim; more may come for a moment."""
        names = map(self._claim_of, range(int(os.environ["WORLD_SIZE"])))
        return [json.loads(self.store.get(name)) for name in names if self.store.check([name])]

    def settle(self, first: dict) -> None:
        """Tells the others which claim was the earliest."""
        self.store.set(self.key + "/first", json.dumps(first))

    def settled(self, seconds: float) -> dict | None:
        """Waits at most `seconds` for what `settle` tells."""
        name = self.key + "/first"
        _wait_until(lambda: self.store.check([name]), seconds)
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def mark_reported(self) -> None:
        """Lets the other ranks of this machine end."""
        self.store.set(self.key + "/reported", "1")

    def wait_reported(self, seconds: float) -> None:
        """Waits at most `seconds` for `mark_reported`."""
        _wait_until(lambda: self.store.check([self.key + "/reported"]), seconds)

    def leave(self, seconds: float) -> None:
        """Where this process is the store, the others would lose what they read without it."""
        if self.is_file:
            return
        _Ours.is_left = True
        time.sleep(2 * SECONDS_BETWEEN_LOOKS)  # until no other thread looks any more
        gone = self.key + "/gone"
        self.store.add(gone, 1)
        if os.environ.get("RANK", "0") == "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
            count = int(os.environ["WORLD_SIZE"])
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self.store.add(gone, 0) < count:
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def is_first_to_hear(self) -> bool:
        """Whether no other rank of this machine has asked this before."""
        return self.store.add(self._heard(self.machine.index), 1) == 1

    def wait_heard(self, seconds: float, *, but: int | None) -> None:
        """Waits at most `seconds` for the other machines, but one, to ask `is_first_to_hear`."""
        others = set(range(self.machine.count)) - {self.machine.index, but}
        keys = [self._heard(index) for index in others]
        if keys and not self.is_file:
            _wait_until(lambda: self.store.check(keys), seconds)

    def _claim_of(self, rank: int) -> str:
        return f"{self.key}/claim/{rank}"

    def _heard(self, machine: int) -> str:
        return f"{self.key}/heard/{machine}"


def is_claim_filed() -> bool:
    """Whether a rank of this machine failed before there was a store."""
    return _claims_file().exists() and Board.on_file().is_claimed()


def _claims_file() -> Path:
    run_id = re.sub(r"\W", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
    port = os.environ.get("MASTER_PORT", "0")
    name = f"stageline_failed_first_{run_id}_{port}_{os.getppid()}"
    path = Path(tempfile.gettempdir(), name)
    with contextlib.suppress(OSError):
        # of an earlier run: a shell that starts one after another is the same parent
        if path.stat().st_mtime < process_started_at() - SECONDS_OF_A_START:
            path.unlink()
    return path


def claim_report(
    mine: dict, *, patience: float, is_store_lost: bool = False
) -> tuple[Board | None, dict | None]:
    """Claims the report on the best board there is.

    Returns:
        The board, None for a lone process; and the claim that came before, if one did.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None, None
    # two threads of one rank may claim: equal texts would both seem to be the first
    mine = {**mine, "claimant": f"{os.getpid()}_{threading.get_ident()}"}
    is_store_lost = is_store_lost or not _Ours.store
    deadline = time.monotonic() + patience
    if patience and not is_store_lost and this_machine().count > 1:
        time.sleep(SECONDS_TO_DIE)  # a store that is about to end makes torch write of it
    try:
        board = Board.on_file() if is_store_lost else Board.on_store()
        return board, board.claim(mine, patience=deadline - time.monotonic())
    except Exception:  # the store died with its machine: the report must come out all the same
        board = Board.on_file()
        return board, board.claim(mine, patience=deadline - time.monotonic())


def _wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (_Ours.is_left or not is_true()):
        time.sleep(SECONDS_BETWEEN_LOOKS)
