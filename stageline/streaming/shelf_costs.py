"""What layers cost, before anything was timed: work grows with the weights."""

from collections.abc import Sequence

from stageline.streaming.plan_choice import LayerCost
from stageline.streaming.shelf import Shelf, offsets


def costs_of(shelves: Sequence[Shelf]) -> list[LayerCost]:
    """A cost a layer, in bytes; activations are not known yet."""
    costs = []
    for shelf in shelves:
        parameters = [home.parameter for home in shelf.homes]
        _, weight_bytes = offsets([*parameters, *shelf.buffers])
        _, gradient_bytes = offsets([each for each in parameters if each.requires_grad])
        work = float(max(weight_bytes, 1))
        costs.append(LayerCost(work, 2 * work, weight_bytes, gradient_bytes))
    return costs
