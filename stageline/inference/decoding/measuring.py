"""Steps through an engine's stages that nobody asked for, to see how long they take."""

from collections.abc import Callable

import torch

from stageline.inference.decoding.order import Order
from stageline.inference.decoding.request import EngineError


def timed_steps(
    start: Callable[[Order, dict[str, torch.Tensor]], object],
    result: Callable[[], Order],
    columns: int,
    num_rows: int,
    count: int,
) -> list[list[float]]:
    """What each of some steps, one close behind the other, takes on each stage.

    Args:
        start: sends an order on its way.
        result: waits for the oldest one.
        columns: tokens that each row has already.

    Raises:
        EngineError: a stage could not.
    """
    for _ in range(count):
        order = Order("measure", rows=list(range(num_rows)), lengths=[columns] * num_rows)
        start(order, {"input_ids": torch.zeros(num_rows, 1, dtype=torch.long)})
    done = [result() for _ in range(count)]
    if errors := [order.error for order in done if order.error is not None]:
        raise EngineError(f"a step of {num_rows} rows failed: {errors[0]}")
    return [order.seconds for order in done]
