"""Compares named tensors that lie on several ranks with those of a whole model on rank 0.

Tensors travel one at a time, so that rank 0 never holds more than one of another stage.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

StageTensors = Sequence[tuple[int, str, torch.Tensor | None]]  # (stage, name, value)
Expected = Mapping[str, torch.Tensor | None]
CHUNK = 1 << 22  # numbers that are compared at a time


@dataclass(frozen=True)
class Difference:
    """One name that is not as it should be; `stage` is None when no stage has it."""

    stage: int | None
    name: str
    what: str

    def __str__(self) -> str:
        place = "on no stage" if self.stage is None else f"stage {self.stage}"
        return f"{self.name} ({place}): {self.what}"


@dataclass
class Comparison:
    """What a comparison of named tensors found.

    Attributes:
        num_compared: tensors that both sides have.
        largest: the greatest difference of two numbers; NaN counts as infinite.
    """

    num_compared: int = 0
    largest: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.differences

    def merge(self, other: "Comparison") -> None:
        """Adds what another one found."""
        self.num_compared += other.num_compared
        self.largest = max(self.largest, other.largest)
        self.differences += other.differences

    @property
    def figure(self) -> str:
        """How many were compared, and how far apart they are at most."""
        if not self.differences:
            how = "to the bit" if self.largest == 0 else f"within {self.largest:.1e}"
            return f"{self.num_compared} equal {how}"
        return f"{len(self.differences)} wrong, {self.num_compared} compared, at most " + (
            f"{self.largest:.1e} apart"
        )


def measure(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float) -> tuple[bool, float]:
    """Whether two tensors agree, and the greatest difference of two of their numbers.

    NaN agrees with NaN: attention makes it in rows that are padding.

    Args:
        tolerance: absolute and relative; 0 asks for equal bits.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False, math.inf
    if torch.equal(ours, theirs):
        return True, 0.0
    largest, fits = 0.0, True
    pairs = zip(ours.flatten().split(CHUNK), theirs.flatten().split(CHUNK))
    for one, other in pairs:  # in pieces: an embedding in float64 would double the memory
        fit, apart = _measure_piece(one.double(), other.double(), tolerance)
        largest, fits = max(largest, apart), fits and fit
    return fits, largest


def _measure_piece(
    ours: torch.Tensor, theirs: torch.Tensor, tolerance: float
) -> tuple[bool, float]:
    both = ours.isnan() & theirs.isnan()
    gap = (ours - theirs).abs_().masked_fill_(both, 0.0)
    largest = gap.max().item()
    limits = theirs.abs().masked_fill_(both, 0.0).add_(1).mul_(tolerance)
    fits = largest == 0.0 or (tolerance > 0 and bool((gap <= limits).all()))
    return fits, largest if math.isfinite(largest) else math.inf


def numbers_agree(ours: float, theirs: float, *, tolerance: float) -> bool:
    """Whether two numbers agree; NaN agrees with nothing."""
    return abs(ours - theirs) <= tolerance * (1 + abs(theirs))


def compare_named(
    own: StageTensors,
    expected: Expected | None,
    *,
    tolerance: float,
    group: dist.ProcessGroup | None = None,
) -> Comparison | None:
    """Compares all ranks' tensors with the expected ones by name; every rank calls this.

    Args:
        own: of this rank's stages; None stands for a tensor that is not there, such as the
            gradient of a parameter that has none.
        expected: on rank 0, all names; elsewhere None.

    Returns:
        The result on rank 0; elsewhere None.
    """
    rank = dist.get_rank(group)
    facts: list[Any] = [None] * dist.get_world_size(group)
    mine = [
        (stage, name, None if value is None else (tuple(value.shape), value.dtype))
        for stage, name, value in own
    ]
    dist.all_gather_object(facts, mine, group=group)
    found = Comparison()
    for holder, entries in enumerate(facts):
        for index, (stage, name, kind) in enumerate(entries):
            value = own[index][2] if holder == rank else None
            if kind is not None and holder > 0:
                value = _to_first(value, kind, holder=holder, rank=rank, group=group)
            if rank == 0:
                _judge(found, stage, name, value, expected, tolerance)
    if rank != 0:
        return None
    held = {name for entries in facts for _, name, kind in entries if kind is not None}
    listed = {name for entries in facts for _, name, _ in entries}
    for name, value in expected.items():
        if value is not None and name not in held | listed:
            found.differences.append(Difference(None, name, "the whole model has it"))
    return found


def _to_first(
    value: torch.Tensor | None,
    kind: tuple,
    *,
    holder: int,
    rank: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor | None:
    """Sends a tensor from its holder to rank 0; the tensor on rank 0."""
    if rank == holder:
        dist.send(value.detach().contiguous(), group=group, group_dst=0)
    elif rank == 0:
        buffer = torch.empty(kind[0], dtype=kind[1])
        dist.recv(buffer, group=group, group_src=holder)
        return buffer
    return None


def _judge(
    found: Comparison,
    stage: int,
    name: str,
    value: torch.Tensor | None,
    expected: Expected,
    tolerance: float,
) -> None:
    theirs = expected.get(name)
    if value is None and theirs is None:
        return
    if value is None or theirs is None:
        whose = "the whole model has one, this stage has none"
        if value is not None:
            whose = "this stage has one, the whole model has none"
        found.differences.append(Difference(stage, name, whose))
        return
    found.num_compared += 1
    fits, largest = measure(value.detach(), theirs.detach(), tolerance=tolerance)
    found.largest = max(found.largest, largest)
    if not fits:
        what = f"{largest:.1e} apart"
        if value.shape != theirs.shape or value.dtype != theirs.dtype:
            what = (
                f"{tuple(value.shape)} {value.dtype} here, {tuple(theirs.shape)} {theirs.dtype} "
                "in the whole model"
            )
        found.differences.append(Difference(stage, name, what))
