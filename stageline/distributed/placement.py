"""Which borders between stages lie between two machines. Pure integers: knows no ranks but numbers.

Rank = replica * num_stages + stage, and torchrun numbers the ranks machine by machine. So the
neighbours of a pipeline are on one machine wherever its stages fit on one.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Crossing:
    """A border between two stages on two machines: after `stage` of `replica`."""

    replica: int
    stage: int
    machines: tuple[int, int]


def crossings(machine_of_rank: Sequence[int], *, num_stages: int) -> list[Crossing]:
    """The borders of all pipelines that lie between two machines.

    Args:
        machine_of_rank: the machine's number of each rank, in order of ranks.
    """
    return [
        Crossing(rank // num_stages, rank % num_stages, (here, there))
        for rank, (here, there) in enumerate(
            zip(machine_of_rank[:-1], machine_of_rank[1:], strict=True)
        )
        if here != there and rank % num_stages < num_stages - 1
    ]


def explain_placement(machine_of_rank: Sequence[int], *, num_stages: int) -> str:
    """Which borders cross machines, and what to change where a pipeline crosses needlessly."""
    num_machines = len(set(machine_of_rank))
    per_machine = max(machine_of_rank.count(machine) for machine in set(machine_of_rank))
    num_replicas = len(machine_of_rank) // num_stages
    found = crossings(machine_of_rank, num_stages=num_stages)
    text = (
        f"{num_machines} machines, up to {per_machine} processes each; "
        f"{_count(num_replicas, 'pipeline')} of {_count(num_stages, 'stage')}"
    )
    if not found:
        return f"{text}: no pipeline crosses machines."
    counts = [sum(c.replica == replica for c in found) for replica in range(num_replicas)]
    least = -(-num_stages // per_machine) - 1
    needless = [replica for replica, count in enumerate(counts) if count > least]
    borders = sorted({(c.stage, c.stage + 1) for c in found})
    shown = ", ".join(f"{before}|{after}" for before, after in borders)
    text += f"; between machines: {_count(len(found), 'border')} (of stages {shown})."
    return f"{text}\n{_warn(needless, per_machine, num_stages)}" if needless else text


def _warn(needless: Sequence[int], per_machine: int, num_stages: int) -> str:
    """What a user changes so that these replicas cross no more than they must."""
    fitting = [n for n in range(1, per_machine + 1) if per_machine % n == 0]
    if num_stages <= per_machine:
        whole = per_machine // num_stages * num_stages
        cure = f"--nproc-per-node {whole}, or --num-stages {' or '.join(map(str, fitting))}"
    else:
        above = -(-num_stages // per_machine) * per_machine
        cure = f"--num-stages {above - per_machine} or {above}"
    return (
        f"warning: {_names(needless)} cross machines more often than {num_stages} stages need on "
        f"{per_machine} processes each, and the network is slower than a machine. Better fitting: "
        f"{cure}."
    )


def _names(replicas: Sequence[int]) -> str:
    return f"{'pipeline' if len(replicas) == 1 else 'pipelines'} {', '.join(map(str, replicas))}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
