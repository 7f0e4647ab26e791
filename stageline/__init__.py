"""The engine of Stageline. It takes objects, never register keys, and imports nothing above it.

`from stageline import PipelineRunner` gets what a training loop of one's own needs; see
docs/from_python.md. A name is imported when it is asked for: `import stageline` stays light.
"""

import importlib
from typing import Any

_HOMES = {
    "CausalLMStage": "stages.causal_lm",
    "MicroBatchLoader": "data.batches.loader",
    "Ownership": "training.grad_norm",
    "PipelineRunner": "pipeline.runner",
    "RewardStage": "stages.causal_lm",
    "StageModel": "stages.base",
    "TrainStep": "training.step",
    "StagelineStage": "pipeline.torch_stage",
    "UserError": "errors",
    "VisionLanguageStage": "stages.vision_language",
    "distributed_context": "distributed.process_group",
    "evaluate": "training.evaluation",
    "folder_loader": "training.folders",
    "launch_if_needed": "distributed.launch",
    "load_split_model": "checkpoint.load",
    "make_schedule": "pipeline.schedules",
    "optimizer_groups": "training.optimizers",
    "run_entry": "distributed.failure",
    "save_split_model": "checkpoint.save",
    "seed_everything": "seeds",
    "step_micro_batches": "pipeline.torch_stage",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
