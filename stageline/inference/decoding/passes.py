"""What the engine sends through the stages for what the scheduler chose: orders with their inputs.

A model that keeps no keys and values reads whole rows ("whole") where others read prompts and take
steps.
"""

import torch

from stageline.inference.decoding import prompts
from stageline.inference.decoding.order import Order, settings_of
from stageline.inference.decoding.rows import Prefill, RunningGroup

Inputs = dict[str, torch.Tensor]


def prefill_pass(found: Prefill, *, has_cache: bool) -> tuple[Order, Inputs]:
    """Reads prompts, or a piece of one."""
    owners = [one.owner for one in found.chosen]
    order = Order(
        "prefill" if has_cache else "whole",
        group=found.group.number,
        rows=[one.row for one in found.chosen],
        lengths=[one.length for one in found.chosen],
    )
    if found.piece is not None:
        order.piece = [found.piece.start, found.piece.stop]
    if not order.is_part:
        order.settings = [settings_of(owner.request.sampling) for owner in owners]
    if not has_cache:
        return order, prompts.padded_right([owner.row_ids() for owner in owners])
    read = [owner.request.prompt for owner in owners]
    if found.piece is not None:
        read = [prompts.part_of(prompt, found.piece) for prompt in read]
    return order, prompts.together(read)


def step_pass(
    group: RunningGroup, joins: list[tuple[int, int]], *, has_cache: bool
) -> tuple[Order, Inputs]:
    """One more token of each row of a group."""
    rows, owners = zip(*((one.row, one.owner) for one in group.members), strict=True)
    order = Order("decode", group=group.number, rows=list(rows), join=joins)
    if not has_cache:
        order.kind, order.join = "whole", []
        order.lengths = [len(owner.row_ids()) for owner in owners]
        return order, prompts.padded_right([owner.row_ids() for owner in owners])
    return order, {"input_ids": torch.tensor([[owner.last_token] for owner in owners])}
