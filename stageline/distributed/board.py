"""The board where ranks claim the report of a failure: one of them tells, the others read who.

It is the TCP store that the ranks met at, which works across machines; where that is gone, a file,
which works for the ranks of one machine.
"""

import contextlib
import json
import os
import re
import shutil
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
    from torch.distributed import TCPStore

SECONDS_BETWEEN_LOOKS = 0.05
SECONDS_TO_CONNECT = 3.0
SECONDS_TO_DIE = 1.0
SECONDS_OF_A_START = 5.0  # between the processes of one machine


def claim_key() -> str:
    """Where in the store the claim of this run lies."""
    return f"stageline/failed_first/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


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
    """Where the ranks of a run agree who reports; this one is for a lone process, always the first.

    Nobody waits for it, and it waits for nobody.
    """

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        """Claims the report, after `patience` seconds; the claim of the rank that has it."""
        return None

    def claims(self) -> list[dict]:
        """What all ranks that failed so far claim; more may come for a moment."""
        return []

    def settle(self, first: dict) -> None:
        """Tells the others which claim was the earliest."""

    def settled(self, seconds: float) -> dict | None:
        """Waits at most `seconds` for what `settle` tells."""
        return None

    def mark_reported(self) -> None:
        """Lets the other ranks of this machine end."""

    def wait_reported(self, seconds: float) -> None:
        """Waits at most `seconds` for `mark_reported`."""

    def leave(self, seconds: float) -> None:
        """Ends the use of the board, at most `seconds` later."""

    def is_first_to_hear(self) -> bool:
        """Whether no other rank of this machine has asked this before."""
        return False

    def wait_heard(self, seconds: float, *, but: int | None) -> None:
        """Waits at most `seconds` for the other machines, but one, to ask `is_first_to_hear`."""


class StoreBoard(Board):
    """The claim in the TCP store."""

    def __init__(self) -> None:
        self.key = claim_key()
        self.machine = this_machine()
        self.store = connect_store()

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        text = json.dumps(mine)
        if not mine.get("is_secondary"):
            self.store.set(self._claim_of(mine["rank"]), text)
        _wait_until(lambda: self.store.check([self.key]), patience)
        held = self.store.compare_set(self.key, "", text).decode()
        return None if held == text else json.loads(held)

    def claims(self) -> list[dict]:
        names = map(self._claim_of, range(int(os.environ["WORLD_SIZE"])))
        return [json.loads(self.store.get(name)) for name in names if self.store.check([name])]

    def settle(self, first: dict) -> None:
        self.store.set(self.key + "/first", json.dumps(first))

    def settled(self, seconds: float) -> dict | None:
        name = self.key + "/first"
        _wait_until(lambda: self.store.check([name]), seconds)
        return json.loads(self.store.get(name)) if self.store.check([name]) else None

    def mark_reported(self) -> None:
        self.store.set(self.key + "/reported", "1")

    def wait_reported(self, seconds: float) -> None:
        _wait_until(lambda: self.store.check([self.key + "/reported"]), seconds)

    def leave(self, seconds: float) -> None:
        """Where this process is the store, the others would lose what they read without it."""
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
        return self.store.add(self._heard(self.machine.index), 1) == 1

    def wait_heard(self, seconds: float, *, but: int | None) -> None:
        others = set(range(self.machine.count)) - {self.machine.index, but}
        keys = [self._heard(index) for index in others]
        _wait_until(lambda: not keys or self.store.check(keys), seconds)

    def _claim_of(self, rank: int) -> str:
        return f"{self.key}/claim/{rank}"

    def _heard(self, machine: int) -> str:
        return f"{self.key}/heard/{machine}"


class FileBoard(Board):
    """The claim as a file, for the ranks of one machine whose store is gone.

    The files stay, and no other machine reads them.
    """

    def __init__(self) -> None:
        run_id = re.sub(r"\W", "_", os.environ.get("TORCHELASTIC_RUN_ID", "none"))
        port = os.environ.get("MASTER_PORT", "0")
        name = f"stageline_failed_first_{run_id}_{port}_{os.getppid()}"
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.path = Path(tempfile.gettempdir()) / f"{name}_{restart}.json"
        self.reported = self.path.with_suffix(".reported")
        self.first = self.path.with_suffix(".first")
        self._forget_earlier_runs()

    def _forget_earlier_runs(self) -> None:
        """A shell that starts one run after another is the same parent."""
        for path in self.path.parent.glob(f"{self.path.stem}.*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < process_started_at() - SECONDS_OF_A_START:
                    path.unlink()

    def claim(self, mine: dict, *, patience: float) -> dict | None:
        draft = self.path.with_suffix(f".{os.getpid()}_{threading.get_ident()}")
        draft.write_text(json.dumps(mine))
        if not mine.get("is_secondary"):
            copy = Path(shutil.copy(draft, draft.with_suffix(draft.suffix + "_copy")))
            copy.replace(self.path.with_suffix(f".claim{mine['rank']}"))
        _wait_until(self.path.exists, patience)
        try:
            os.link(draft, self.path)  # atomic, with its content
        except FileExistsError:
            return json.loads(self.path.read_text())
        finally:
            draft.unlink()
        return None

    def claims(self) -> list[dict]:
        found = self.path.parent.glob(f"{self.path.stem}.claim*")
        return [json.loads(path.read_text()) for path in sorted(found)]

    def settle(self, first: dict) -> None:
        draft = self.first.with_suffix(".first_draft")
        draft.write_text(json.dumps(first))
        draft.replace(self.first)

    def settled(self, seconds: float) -> dict | None:
        _wait_until(self.first.exists, seconds)
        return json.loads(self.first.read_text()) if self.first.exists() else None

    def mark_reported(self) -> None:
        self.reported.touch()

    def wait_reported(self, seconds: float) -> None:
        _wait_until(self.reported.exists, seconds)


def claim_report(
    mine: dict, *, patience: float, is_store_lost: bool = False
) -> tuple[Board, dict | None]:
    """Claims the report on the best board there is; (the board, the claim that came before)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Board(), None
    # two threads of one rank may claim: equal texts would both seem to be the first
    mine = {**mine, "claimant": f"{os.getpid()}_{threading.get_ident()}"}
    is_store_lost = is_store_lost or _Ours.store is False
    deadline = time.monotonic() + patience
    if patience and not is_store_lost and this_machine().count > 1:
        time.sleep(SECONDS_TO_DIE)  # a store that is about to end makes torch write of it
    try:
        board = FileBoard() if is_store_lost else StoreBoard()
        return board, board.claim(mine, patience=deadline - time.monotonic())
    except Exception:  # the store died with its machine: the report must come out all the same
        file_board = FileBoard()
        return file_board, file_board.claim(mine, patience=deadline - time.monotonic())


def _wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (_Ours.is_left or not is_true()):
        time.sleep(SECONDS_BETWEEN_LOOKS)
