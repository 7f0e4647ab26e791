"""Which borders of a pipeline lie between two machines. Pure integers: knows no ranks but numbers.

Rank = replica * num_ranks + rank of the pipeline, and torchrun numbers ranks machine by machine. So
the neighbours of a pipeline are on one machine wherever its ranks fit on one. (Where ranks hold
several stages in a round, the last rank also sends to the first.)
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Crossing:
    """A border between two ranks on two machines: after `pp_rank` of `replica`."""

    replica: int
    pp_rank: int
    machines: tuple[int, int]


def crossings(machine_of_rank: Sequence[int], *, num_ranks: int) -> list[Crossing]:
    """The borders of all pipelines that lie between two machines.

    Args:
        machine_of_rank: the machine's number of each rank, in order of ranks.
    """
    return [
        Crossing(rank // num_ranks, rank % num_ranks, (here, there))
        for rank, (here, there) in enumerate(
            zip(machine_of_rank[:-1], machine_of_rank[1:], strict=True)
        )
        if here != there and rank % num_ranks < num_ranks - 1
    ]


def explain_placement(machine_of_rank: Sequence[int], *, num_ranks: int) -> str:
    """Which borders cross machines, and what to change where a pipeline crosses needlessly."""
    num_machines = len(set(machine_of_rank))
    per_machine = max(machine_of_rank.count(machine) for machine in set(machine_of_rank))
    num_replicas = len(machine_of_rank) // num_ranks
    found = crossings(machine_of_rank, num_ranks=num_ranks)
    text = (
        f"{num_machines} machines, up to {per_machine} processes each; "
        f"{_count(num_replicas, 'pipeline')} of {_count(num_ranks, 'rank')}"
    )
    if not found:
        return f"{text}: no pipeline crosses machines."
    counts = [sum(c.replica == replica for c in found) for replica in range(num_replicas)]
    least = -(-num_ranks // per_machine) - 1
    needless = [replica for replica, count in enumerate(counts) if count > least]
    borders = sorted({(c.pp_rank, c.pp_rank + 1) for c in found})
    shown = ", ".join(f"{before}|{after}" for before, after in borders)
    text += f"; between machines: {_count(len(found), 'border')} (of ranks {shown})."
    return f"{text}\n{_warn(needless, per_machine, num_ranks)}" if needless else text


def _warn(needless: Sequence[int], per_machine: int, num_ranks: int) -> str:
    """What a user changes so that these replicas cross no more than they must."""
    fitting = [n for n in range(1, per_machine + 1) if per_machine % n == 0]
    if num_ranks <= per_machine:
        whole = per_machine // num_ranks * num_ranks
        cure = f"--nproc-per-node {whole}, or {' or '.join(map(str, fitting))} ranks a pipeline"
    else:
        above = -(-num_ranks // per_machine) * per_machine
        cure = f"{above - per_machine} or {above} ranks a pipeline"
    return (
        f"warning: {_names(needless)} cross machines more often than {num_ranks} ranks need on "
        f"{per_machine} processes each, and the network is slower than a machine. Better fitting: "
        f"{cure} (--num-stages)."
    )


def _names(replicas: Sequence[int]) -> str:
    return f"{'pipeline' if len(replicas) == 1 else 'pipelines'} {', '.join(map(str, replicas))}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
