"""Splits layers into stages. Pure integers: knows neither torch nor ranks."""

from stageline.errors import UserError


def uniform_partition(
    num_layers: int, num_stages: int, *, visual_gpu_ratio: float = 0.0
) -> list[int]:
    """Places `num_layers` on `num_stages` as evenly as whole layers allow.

    Args:
        visual_gpu_ratio: the share of stage 0 that a vision tower takes, 0 <= ratio <= 1; stage 0
            then counts as `1 - ratio` of a stage. Every stage gets at least one layer all the same.

    Returns:
        Layers per stage; the sum is `num_layers` and no entry is 0.

    Raises:
        UserError: more stages than layers, or a ratio out of range.
    """
    if num_stages < 1:
        raise UserError(f"{num_stages} stages: expected at least 1; set --num-stages to 1 or more.")
    if num_stages > num_layers:
        raise UserError(
            f"{num_layers} layers can't fill {num_stages} stages: each stage needs at least one "
            f"layer; set --num-stages to {num_layers} or less."
        )
    if not 0 <= visual_gpu_ratio <= 1:
        raise UserError(
            f"visual_gpu_ratio {visual_gpu_ratio} is not between 0 and 1: it is the share of stage "
            "0 that the vision tower takes; pass --visual-gpu-ratio 0 for a language model."
        )
    capacities = [1.0 - visual_gpu_ratio] + [1.0] * (num_stages - 1)
    if sum(capacities) == 0:  # one stage that holds everything
        return [num_layers]
    return _largest_remainder(num_layers, capacities)


def explicit_partition(
    counts: list[int], *, num_layers: int, num_stages: int, least: int = 1
) -> list[int]:
    """Checks layer counts that the user gave, such as `--partition 8,8,7,9`.

    Args:
        least: layers of a stage; 0 for the pieces that the planner measures.
    """
    shown = ",".join(str(count) for count in counts)
    if len(counts) != num_stages:
        raise UserError(
            f"--partition {shown} names {len(counts)} stages, the run has {num_stages}: give one "
            "count per stage or change --num-stages."
        )
    if min(counts) < least or sum(counts) != num_layers:
        raise UserError(
            f"--partition {shown} sums to {sum(counts)}, the model has {num_layers} layers: the "
            "counts must be at least 1 each and sum to the number of layers."
        )
    return list(counts)


def stage_layers(
    counts: list[int] | None,
    *,
    num_layers: int,
    num_stages: int,
    vision_stages: int = 0,
    visual_gpu_ratio: float = 0.0,
    least: int = 1,
) -> list[int]:
    """Layers of each stage: as given, or evenly.

    Args:
        counts: of the stages behind those of a vision tower, which have none.
        vision_stages: how many stages the tower has for itself.
        least: as in `explicit_partition`.

    Raises:
        UserError: the counts do not fit, or no stage is left for the layers.
    """
    rest = num_stages - vision_stages
    if rest < 1:
        raise UserError(
            f"--vision-stages {vision_stages} of {num_stages} stages leaves none for the decoder: "
            f"its layers need at least one. Use --num-stages {vision_stages + 1} or more, or fewer "
            "--vision-stages."
        )
    if counts is None:
        counts = uniform_partition(num_layers, rest, visual_gpu_ratio=visual_gpu_ratio)
    counts = explicit_partition(counts, num_layers=num_layers, num_stages=rest, least=least)
    return [0] * vision_stages + counts


def layer_range(partition: list[int], stage: int) -> range:
    """The global indices of the layers that `stage` owns."""
    start = sum(partition[:stage])
    return range(start, start + partition[stage])


def _largest_remainder(num_layers: int, capacities: list[float]) -> list[int]:
    """Apportions layers to capacities, one each first; ties go to the middle of the pipeline.

    The first stage also embeds and the last one has the head, so a layer too many is best placed
    between them.
    """
    total = sum(capacities)
    ideal = [num_layers * capacity / total for capacity in capacities]
    counts = [max(1, int(share)) for share in ideal]
    middle = (len(capacities) - 1) / 2

    def gain(stage: int) -> tuple[float, float]:
        return (round(ideal[stage] - counts[stage], 9), -abs(stage - middle))

    while sum(counts) < num_layers:
        counts[max(range(len(counts)), key=gain)] += 1
    while sum(counts) > num_layers:  # the guaranteed layer of a small stage came from a large one
        shrinkable = [stage for stage, count in enumerate(counts) if count > 1]
        counts[min(shrinkable, key=gain)] -= 1
    return counts
