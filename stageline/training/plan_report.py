"""What `--plan` prints, and the refusal of a run that cannot fit. Pure formatting."""

from collections.abc import Sequence

from stageline.pipeline.advice import Choice
from stageline.pipeline.cost import ModelCosts
from stageline.pipeline.expect import Expectation
from stageline.pipeline.memory_plan import RankMemory, most_in_flight
from stageline.training.stage_table import human_bytes, human_count

MOST_CHOICES = 3

_STAGES = (
    *("stage", "rank", "layers", "with", "parameters", "trainable", "weights"),
    *("kept", "forward", "backward", "of slowest"),
)
_RANKS = ("rank", "weights", "state", "activations", "inputs", "peak", "device", "used")


def format_plan(
    expectation: Expectation,
    costs: ModelCosts,
    *,
    kind: str,
    capacities: Sequence[int] | None,
    choices: Sequence[Choice] = (),
) -> str:
    """Tables of stages and ranks, the expected step, and advice."""
    rows, tokens = costs.shape
    count = expectation.num_micro_batches
    schedule = expectation.schedule
    lines = [
        f"plan: --schedule {schedule.name}, {schedule.num_stages} stages on {schedule.num_ranks} "
        f"ranks, {count} micro-batches, measured with {rows} x {tokens} tokens",
        f"partition ({kind}): {','.join(map(str, expectation.partition))}",
        "",
        format_table([_STAGES, *_stage_rows(expectation, costs.front)], first_number=4),
        "",
        format_table([_RANKS, *_rank_rows(expectation.memory, capacities)], first_number=1),
        "",
        f"expected: {seconds_text(expectation.seconds)} for forward and backward of a step, "
        f"bubble {expectation.bubble:.1%}, slowest rank {seconds_text(expectation.slowest)} a "
        f"micro-batch, peak {human_bytes(max(rank.peak for rank in expectation.memory))}",
    ]
    if overshoots(expectation.memory, capacities):
        lines += ["", refusal(expectation, capacities or ())]
    return "\n".join([*lines, *_advice(expectation, choices)])


def refusal(expectation: Expectation, capacities: Sequence[int]) -> str:
    """Why a run cannot be started, with the figures of each rank that is too full."""
    figures = [
        f"rank {rank} needs {human_bytes(memory.peak)} (weights {human_bytes(memory.weights)}, "
        f"gradients and optimizer {human_bytes(_state(memory))}, activations "
        f"{human_bytes(memory.activations)}) and has {human_bytes(capacity)}"
        for rank, (memory, capacity) in enumerate(zip(expectation.memory, capacities, strict=True))
        if memory.peak > capacity
    ]
    return (
        f"this run can't fit: {'; '.join(figures)}. It was expected to fit, because a run that is "
        "ended in the middle of a step loses its work. Use more stages, --partition measured, a "
        "smaller --micro-batch-size or --max-token-num, --gradient-checkpointing, --bf16 or LoRA; "
        "--plan shows all figures, and --device-memory corrects what a device has."
    )


def overshoots(memory: Sequence[RankMemory], capacities: Sequence[int] | None) -> bool:
    """Whether some rank needs more than it has."""
    pairs = zip(memory, capacities or (), strict=bool(capacities))
    return any(rank.peak > capacity for rank, capacity in pairs)


def seconds_text(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def format_table(rows: Sequence[Sequence[str]], *, first_number: int) -> str:
    """Aligned columns under a rule; from `first_number` on to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column >= first_number else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _stage_rows(expectation: Expectation, front: str) -> list[tuple[str, ...]]:
    schedule = expectation.schedule
    kept = most_in_flight(schedule, expectation.num_micro_batches)
    splits = schedule.splits_backward
    times = [cost.seconds(splits_backward=splits) for cost in expectation.stages]
    rows, start = [], 0
    for stage, (count, cost) in enumerate(
        zip(expectation.partition, expectation.stages, strict=True)
    ):
        rows.append(
            (
                str(stage),
                str(schedule.rank_of_stage[stage]),
                f"{start}-{start + count - 1} ({count})",
                _ends(stage, schedule.num_stages, front),
                human_count(cost.num_parameters),
                human_count(cost.num_trainable),
                human_bytes(cost.weights),
                f"{kept[stage] if cost.saved else 0} x {human_bytes(cost.saved)}",
                seconds_text(cost.forward),
                seconds_text(times[stage] - cost.forward),
                f"{times[stage] / max(max(times), 1e-12):.0%}",
            )
        )
        start += count
    return rows


def _ends(stage: int, num_stages: int, front: str) -> str:
    ends = [front] if stage == 0 else []
    return "+".join([*ends, *(["head"] if stage == num_stages - 1 else [])])


def _rank_rows(
    memory: Sequence[RankMemory], capacities: Sequence[int] | None
) -> list[tuple[str, ...]]:
    return [
        (
            str(rank),
            human_bytes(held.weights),
            human_bytes(_state(held)),
            human_bytes(held.activations),
            human_bytes(held.inputs),
            human_bytes(held.peak),
            human_bytes(capacities[rank]) if capacities else "?",
            f"{held.peak / max(capacities[rank], 1):.0%}" if capacities else "?",
        )
        for rank, held in enumerate(memory)
    ]


def _state(memory: RankMemory) -> int:
    return memory.gradients + memory.masters + memory.optimizer


def _advice(expectation: Expectation, choices: Sequence[Choice]) -> list[str]:
    """The best ways with their gain over the planned one."""
    lines = ["", "the same step on these ranks, by simulation (hand-overs assumed):"]
    for choice in choices[:MOST_CHOICES]:
        gain = expectation.seconds / max(choice.expectation.seconds, 1e-12)
        fits = "" if not choice.overshoot else ", DOES NOT FIT"
        lines.append(
            f"  {seconds_text(choice.expectation.seconds)} ({gain:.2f} x as fast), bubble "
            f"{choice.expectation.bubble:.1%}, peak {human_bytes(choice.peak)}{fits}: "
            f"{choice.options()}"
        )
    return lines if choices else []
