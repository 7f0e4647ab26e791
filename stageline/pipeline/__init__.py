"""Split layers into stages and run the stages on a schedule.

`from stageline.pipeline import StagelineStage, step_micro_batches` serves a custom training
loop over a schedule of PyTorch: examples/own_loop.py.
"""

from typing import Any

__all__ = ["StagelineStage", "step_micro_batches"]


def __getattr__(name: str) -> Any:
    # on demand: a module that needs only the plan does not import torch.distributed
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stageline.pipeline import torch_stage

    return getattr(torch_stage, name)
