"""Where a model that answers will lie: for the builder part, and for --plan."""

from typing import Any

from options.part_options import takes
from options.placement_options import device_memory
from stageline.errors import UserError
from stageline.inference.model_cutter import Wanted
from stageline.inference.pass_bytes import Load


def placement_arguments(run: Any, builder: Any) -> dict[str, Any]:
    """What the options say of devices, for a builder part; fewer for one that counts layers."""
    if takes(builder, "placement") == "no":
        return {"visual_gpu_ratio": run.visual_gpu_ratio or 0.0}
    load = Load(rows=getattr(run, "batch_size", 1), length=run.plan_length, images=run.plan_images)
    wanted = Wanted(memory=device_memory(run), load=load)
    return {"visual_gpu_ratio": run.visual_gpu_ratio, "placement": wanted}


def show_plan(builder: Any, model_path: str, **given: Any) -> None:
    """Prints what the builder part would place where.

    Raises:
        UserError: the part has no plan.
    """
    plan = getattr(builder.part, "plan", None)
    if plan is None:
        raise UserError(
            f"--plan came with --builder {builder.key}, which has no plan to show. A part with an "
            "attribute `plan` was expected: use --builder auto, or leave --plan out."
        )
    print(plan(model_path, **given))
