"""Which machine this process runs on, of those of the run, as torchrun tells it. Knows no torch."""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

_IMPORTED_AT = time.time()


@dataclass(frozen=True)
class Machine:
    """One machine of a run.

    Attributes:
        index, count: its number, and how many there are; torchrun says "node" or "group".
        host: its name.
        first_rank, num_ranks: the ranks that run on it.
    """

    index: int
    count: int
    host: str
    first_rank: int
    num_ranks: int

    def __str__(self) -> str:
        """`ranks 4-7 (host b)`."""
        last = self.first_rank + self.num_ranks - 1
        ranks = f"ranks {self.first_rank}-{last}" if self.num_ranks > 1 else f"rank {last}"
        return f"{ranks} (host {self.host})"


def this_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    """The machine of this process; the only one where no torchrun says otherwise."""
    rank = int(environment.get("RANK", "0"))
    return Machine(
        index=int(environment.get("GROUP_RANK", "0")),
        count=int(environment.get("GROUP_WORLD_SIZE", "1")),
        host=socket.gethostname(),
        first_rank=rank - int(environment.get("LOCAL_RANK", rank)),
        num_ranks=int(environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE", "1"))),
    )


def process_started_at() -> float:
    """When this process began, on the clock of `time.time`; where /proc is not, a bit too late."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, ValueError, IndexError):
        return _IMPORTED_AT
