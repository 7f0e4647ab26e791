"""How many bytes cross the border behind a stage. Pure arithmetic on shapes."""

from collections.abc import Iterable
from typing import Protocol

import torch

from stageline.pipeline.live_bytes import tensor_bytes


class Sender(Protocol):
    """What is asked of a stage model."""

    def get_example_output(
        self, micro_batch_size: int, max_token_num: int
    ) -> tuple[torch.Tensor, ...]: ...


def border_bytes(stage_model: Sender, shapes: Iterable[tuple[int, int]]) -> list[int]:
    """Bytes that this stage sends on, forward, for each micro-batch; the gradient is as large.

    Zero for the last stage. What does not cross is not counted: ids, masks, positions, labels.

    Args:
        shapes: (rows, tokens) of each micro-batch: the shape of its input_ids.
    """
    return [tensor_bytes(stage_model.get_example_output(*shape)) for shape in shapes]
