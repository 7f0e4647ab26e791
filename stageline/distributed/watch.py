"""Ends the processes of this machine when another machine fails or is lost.

A rank that waits for a neighbour on a machine that vanished would wait for the timeout of the
group. One thread of one process per machine watches instead: the claim in the store tells of a
rank that failed, the lifeline of a machine that is gone. Ending that process is enough: the
launcher then ends the others of its machine.
"""

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from stageline.distributed.board import FileBoard, claim_key, connect_store, disown_store
from stageline.distributed.failure import end_as_told, end_lost
from stageline.distributed.lifeline import is_leaving, open_hub, reach_hub
from stageline.distributed.machines import Machine, this_machine
from stageline.distributed.worker_notes import has_launcher

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_UNTIL_TIED = 0.1
SECONDS_FOR_THE_LIFELINE = 4.0


def watch_machines(*, lost_after: float) -> None:
    """Starts the watch of this machine, in its first process, if there are several machines.

    Args:
        lost_after: seconds without a sign of life after which a machine is lost; 0: for ever.
    """
    machine = this_machine()
    if machine.count > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
        threading.Thread(target=_watch, args=(machine, lost_after), daemon=True).start()


def watch_claims() -> None:
    """Starts the watch of a process that no launcher looks after: it ends when another one fails.

    It may wait where no lost connection would wake it, such as for ranks that never come.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if not is_alone and not has_launcher() and "TORCHELASTIC_RUN_ID" not in os.environ:
        threading.Thread(target=_watch_claims, daemon=True).start()


def _watch_claims() -> None:
    store, file = None, FileBoard()
    while not is_leaving():
        with contextlib.suppress(Exception):
            store = store or connect_store()
            if store.check([claim_key()]):
                end_as_told()
        if file.path.exists():
            disown_store()
            end_as_told()
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _watch(machine: Machine, lost_after: float) -> None:
    lifeline = _Lifeline(machine, lost_after)
    try:
        store = _patiently_connect(lost_after)
        while not is_leaving():
            if store.check([claim_key()]):
                end_as_told()
            lifeline.tie(store)
            time.sleep(SECONDS_BETWEEN_LOOKS if lifeline.is_tied else SECONDS_UNTIL_TIED)
    except Exception as error:
        time.sleep(SECONDS_FOR_THE_LIFELINE)  # it tells better who was lost
        if machine.index and not is_leaving():
            end_lost("the first machine", f"its store does not answer ({error})")


def _patiently_connect(lost_after: float) -> "TCPStore":
    """The store is there before the ranks, unless rank 0 has to make it."""
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + lost_after if agents_store and lost_after else float("inf")
    while True:
        try:
            return connect_store()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(SECONDS_BETWEEN_LOOKS)


class _Lifeline:
    """Ties the connection between this machine and the first one, as soon as it can be."""

    def __init__(self, machine: Machine, lost_after: float) -> None:
        self.machine = machine
        self.lost_after = lost_after
        self.key = claim_key() + "/lifeline"
        self.is_tied = False

    def tie(self, store: "TCPStore") -> None:
        """Does nothing the second time, or where the first machine is not ready."""
        if self.is_tied:
            return
        how: dict[str, Any] = {"lost_after": self.lost_after, "on_lost": end_lost}
        if self.machine.index == 0:
            store.set(self.key, open_hub(self.machine, **how))
        elif store.check([self.key]):
            self._reach(store.get(self.key).decode(), how)
        else:
            return
        self.is_tied = True

    def _reach(self, invitation: str, how: dict[str, Any]) -> None:
        address = os.environ["MASTER_ADDR"]
        try:
            reach_hub(self.machine, address, invitation, **how)
        except OSError as error:
            print(
                f"warning: {self.machine} finds no way to a port of {address} ({error}). If a "
                "machine vanishes, this one will wait for the timeout of the exchange. Open all "
                "ports between the machines.",
                file=sys.stderr,
                flush=True,
            )
