"""Splits layers into stages and runs the stages on a schedule.

`from stageline.pipeline import StagelineStage, step_micro_batches` is for those who have a loop of
their own over a schedule of torch: examples/own_loop.py.
"""

from typing import Any

__all__ = ["StagelineStage", "step_micro_batches"]


def __getattr__(name: str) -> Any:  # who wants a plan alone imports no torch.distributed
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stageline.pipeline import torch_stage

    return getattr(torch_stage, name)
