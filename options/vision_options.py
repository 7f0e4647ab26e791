"""The options that place a vision tower on stages of its own, and what they must be together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from options.fields import OptionError, option

if TYPE_CHECKING:
    from options.run_options import RunConfig


@dataclass(kw_only=True)
class VisionOptions:
    """Vision tower"""

    vision_stages: int = option(
        0, "first stages that the vision tower has for itself; 0: it lies on stage 0", at_least=0
    )
    vision_partition: list[int] | None = option(
        None, "tower blocks of each of these stages, 12,12; default: equal numbers"
    )


def check_vision(run: "RunConfig") -> None:
    """Refuses two placements of one tower; a vision partition gives the number left open.

    Raises:
        OptionError: says which options do not go together.
    """
    counts = run.vision_partition
    if counts is not None:
        _check_counts(run, counts)
    if not run.vision_stages:
        return
    given = f"--vision-stages {run.vision_stages}"
    if run.visual_gpu_ratio > 0:
        raise OptionError(
            f"{given} and --visual-gpu-ratio {run.visual_gpu_ratio:g} were both given. One of them "
            "was expected, because a tower has one place: stages of its own, or a share of stage "
            "0. Leave one out."
        )
    if run.partition in ("parameters", "measured"):
        raise OptionError(
            f"{given} came with --partition {run.partition}. The planner places decoder layers "
            "behind a tower that lies on stage 0. Give the layers of the stages behind the tower "
            "as numbers (--partition 10,10,8), or leave --partition out for equal ones."
        )
    if run.plan:
        raise OptionError(
            f"{given} came with --plan, which measures a tower on stage 0 only. Leave one out; a "
            "run prints the stages and their weights when it starts."
        )
    if run.num_stages is not None and run.vision_stages >= run.num_stages:
        raise OptionError(
            f"{given} of --num-stages {run.num_stages} leaves no stage for the decoder, which "
            f"needs at least one. Use --num-stages {run.vision_stages + 1} or more, or fewer "
            "--vision-stages."
        )


def _check_counts(run: "RunConfig", counts: list[int]) -> None:
    shown = ",".join(map(str, counts))
    if not counts or min(counts) < 1:
        raise OptionError(
            f"--vision-partition {shown or '[]'} has a stage without a block. Each stage of the "
            "tower needs at least one, because a stage passes on what its blocks make. Give counts "
            "from 1 upwards."
        )
    run.vision_stages = run.vision_stages or len(counts)
    if len(counts) != run.vision_stages:
        raise OptionError(
            f"--vision-partition {shown} names {len(counts)} stages, --vision-stages is "
            f"{run.vision_stages}. One count a stage was expected, because it says how many blocks "
            "each stage gets. Change one of them; without --vision-stages it follows from "
            "--vision-partition."
        )
