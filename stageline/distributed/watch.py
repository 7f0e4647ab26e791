"""The lifeline between the machines of a run, and the way to its store.

A rank that waits for a neighbour on a machine that vanished would wait for the timeout of the
group. One process per machine keeps a connection to the first machine, which tells that it is gone.
"""

import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from stageline.distributed.board import FileBoard, claim_key, connect_store, disown_store
from stageline.distributed.failure import end_as_told, end_lost
from stageline.distributed.lifeline import expect_tie, mark_tied, open_hub, reach_hub
from stageline.distributed.machines import Machine
from stageline.distributed.worker_notes import has_launcher

if TYPE_CHECKING:
    from torch.distributed import TCPStore

SECONDS_BETWEEN_TRIALS = 0.2


def patiently_connect(lost_after: float) -> "TCPStore":
    """The store is there before the ranks, unless rank 0 has to make it.

    Where a rank failed before there was one, this process ends.
    """
    agents_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + lost_after if agents_store and lost_after else float("inf")
    while True:
        try:
            return connect_store()
        except Exception:
            if time.monotonic() > deadline:
                raise
            end_if_filed()
            time.sleep(SECONDS_BETWEEN_TRIALS)


@functools.cache
def _file_board() -> FileBoard:
    return FileBoard()


def end_if_filed() -> None:
    """Ends this process if another one of this machine failed before there was a store.

    Below a launcher the store is there before the ranks.
    """
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if is_alone or has_launcher() or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if _file_board().path.exists():
        disown_store()
        end_as_told()


class Lifeline:
    """Ties the connection between this machine and the first one, as soon as it can be.

    Args:
        lost_after: seconds without a sign of life after which a machine is lost; 0: for ever.
    """

    def __init__(self, machine: Machine, lost_after: float) -> None:
        self.machine = machine
        self.lost_after = lost_after
        self.key = claim_key() + "/lifeline"
        # one process of a machine is enough: its launcher then ends the others
        self.is_tied = machine.count == 1 or os.environ.get("LOCAL_RANK", "0") != "0"
        if not self.is_tied:
            expect_tie()

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
        mark_tied()

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
