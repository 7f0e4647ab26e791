"""Turn the orders of a schedule into actions of each rank: with transfers, without dead work.

Pure integers. Tensors from one rank to another are received in the order of sending. The two
directions between two ranks are two channels, so a receive that waits holds no other transfer up.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from stageline.errors import UserError


class Kind(StrEnum):
    """Kind of work of a stage on a micro-batch.

    FORWARD; BACKWARD in one piece; or in two: INPUT_GRAD, which the stage before waits for, and
    WEIGHT_GRAD, for which no stage waits.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Action(NamedTuple):
    """One pass; torch spells the forward pass of micro-batch 0 through stage 2 `2F0`."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_action(text: str) -> Action | None:
    """Read `2F0`; None for any other text."""
    if (match := _ACTION.fullmatch(text.strip())) is None:
        return None
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), Kind(kind), int(micro_batch))


class Transfer(NamedTuple):
    """A tensor, activations or gradient, on its way to the pass of `stage`, from or to `peer`."""

    is_send: bool
    is_grad: bool
    stage: int
    micro_batch: int
    peer: int


Plan = list[Action | Transfer]


@dataclass(frozen=True)
class GradFlow:
    """Work of each stage in the backward pass."""

    computes: tuple[bool, ...]  # something trains in this stage or before it
    sends: tuple[bool, ...]  # something trains before it, so the stage before waits for a gradient


def grad_flow(trains: Sequence[bool]) -> GradFlow:
    """Return what follows from which stages have trainable parameters."""
    before = [any(trains[:stage]) for stage in range(len(trains) + 1)]
    return GradFlow(computes=tuple(before[1:]), sends=tuple(before[:-1]))


def drop_dead_backward(orders: Sequence[Sequence[Action]], flow: GradFlow) -> list[list[Action]]:
    """Leave out the backward passes before the first trainable parameter.

    A stage that sends no gradient has no input gradient to compute first: its backward pass is
    done in one piece, where the schedule has its weight gradient.
    """
    kept: list[list[Action]] = []
    for order in orders:
        kept.append([])
        for action in order:
            if action.kind != Kind.FORWARD and not flow.computes[action.stage]:
                continue
            if action.kind in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD) and not flow.sends[action.stage]:
                if action.kind == Kind.INPUT_GRAD:
                    continue
                action = action._replace(kind=Kind.BACKWARD)
            kept[-1].append(action)
    return kept


def forward_orders(rank_of_stage: Sequence[int], num_micro_batches: int) -> list[list[Action]]:
    """Return an order for forward passes only: of all a rank could do, the deepest stage first."""
    num_stages = len(rank_of_stage)
    orders: list[list[Action]] = [[] for _ in range(max(rank_of_stage) + 1)]
    passed = [0] * num_stages  # micro-batches that went through each stage
    while passed[-1] < num_micro_batches:
        before = list(passed)
        for rank, order in enumerate(orders):
            ready = [
                stage
                for stage in range(num_stages)
                if rank_of_stage[stage] == rank
                and before[stage] < (num_micro_batches if stage == 0 else before[stage - 1])
            ]
            if ready:
                order.append(Action(ready[-1], Kind.FORWARD, passed[ready[-1]]))
                passed[ready[-1]] += 1
    return orders


def needs(action: Action, num_stages: int) -> list[list[Action]]:
    """Return what must be done before an action; of each inner list one will do."""
    stage, kind, micro_batch = action
    if kind == Kind.FORWARD:
        return [[Action(stage - 1, Kind.FORWARD, micro_batch)]] if stage > 0 else []
    if kind == Kind.WEIGHT_GRAD:
        return [[Action(stage, Kind.INPUT_GRAD, micro_batch)]]
    own = [Action(stage, Kind.FORWARD, micro_batch)]
    if stage == num_stages - 1:
        return [own]
    behind = [Action(stage + 1, half, micro_batch) for half in (Kind.BACKWARD, Kind.INPUT_GRAD)]
    return [own, behind]


def add_transfers(
    orders: Sequence[Sequence[Action]], rank_of_stage: Sequence[int], flow: GradFlow | None = None
) -> list[Plan]:
    """Put sends behind the passes that make a tensor, and receives opposite on the other rank.

    Raises:
        UserError: the orders wait for each other in a circle.
    """
    num_stages = len(rank_of_stage)
    plans: list[Plan] = [[] for _ in orders]
    places = [0] * len(orders)
    done: set[Action] = set()
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        # one action a rank and round, so that transfers come in about the order of time
        started = [
            (rank, order[places[rank]])
            for rank, order in enumerate(orders)
            if places[rank] < len(order)
            and all(done & {*ways} for ways in needs(order[places[rank]], num_stages))
        ]
        if not started:
            waiting = [str(o[places[r]]) for r, o in enumerate(orders) if places[r] < len(o)]
            raise UserError(
                f"the schedule waits for itself: ranks stand at {', '.join(waiting)}. Put every "
                "pass behind the ones it needs."
            )
        sends = []
        for rank, (stage, kind, micro_batch) in started:
            is_grad = kind != Kind.FORWARD
            if kind == Kind.WEIGHT_GRAD or (is_grad and not (flow and flow.sends[stage])):
                continue
            fed = stage - 1 if is_grad else stage + 1
            if 0 <= fed < num_stages and (peer := rank_of_stage[fed]) != rank:
                sends.append((rank, Transfer(True, is_grad, fed, micro_batch, peer)))
        # a device receives when the passes queued before are done: so before the pass of this
        # round, which does not need what another rank makes in the same round
        for rank, send in sends:
            plans[send.peer].append(send._replace(is_send=False, peer=rank))
        for rank, action in started:
            plans[rank].append(action)
            places[rank] += 1
            done.add(action)
        for rank, send in sends:
            plans[rank].append(send)
    return plans
