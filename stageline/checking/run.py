"""Runs a check on all ranks: prepares, builds, compares, and tells every rank the verdict."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline.checking.batches import MicroBatch
from stageline.checking.checker import SplitCheck
from stageline.checking.coverage import stage_facts
from stageline.checking.report import Report
from stageline.checking.setup import (
    Preparation,
    ReferenceKind,
    WholeModel,
    load_whole,
    prepare,
    start_lora,
)
from stageline.checking.split import Split
from stageline.checking.whole_model import Build, Source
from stageline.checkpoint.load import CheckpointMismatch
from stageline.distributed.process_group import DistributedContext
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import Schedule


@dataclass(frozen=True)
class CheckSettings:
    """What is compared, and how strictly.

    Attributes:
        layers: cut to so many; None: the whole model.
        tolerance: None: 0, or 1e-6 where stages share a weight.
    """

    steps: int = 3
    tolerance: float | None = None
    layers: int | None = None
    reference: ReferenceKind = "auto"
    seed: int = 0
    trust_remote_code: bool = False


def check_split(
    context: DistributedContext,
    *,
    schedule: Schedule,
    source: Source,
    build: Build,
    make_batches: Callable[[Preparation], Callable[[int], list[MicroBatch]]],
    loss_fn: Callable[..., torch.Tensor],
    settings: CheckSettings,
    report: Report,
) -> bool:
    """Checks a split; all ranks call this, rank 0 fills the report.

    Args:
        source: paths of config, weights and processor.
        build: (stage=, num_stages=, source=) -> a stage model, as training builds it.
        make_batches: what was prepared -> (number of a step -> its micro-batches).

    Returns:
        Whether it passed, the same on all ranks.

    Raises:
        UserError: there is nothing to check: wrong paths, keys or numbers of stages.
    """
    options = {"seed": settings.seed, "trust_remote_code": settings.trust_remote_code}
    with _shared_folder(context) as folder:
        preparation: Preparation | None = None
        if context.pp_rank == 0:
            preparation = prepare(
                source,
                folder,
                layers=settings.layers,
                reference=settings.reference,
                build=build,
                **options,
            )
        preparation = _first(preparation, context)
        report.notes += preparation.notes
        whole, problem = _try(
            lambda: load_whole(preparation, build=build, **options), context.pp_rank == 0
        )
        problem = _first(problem, context)
        models, problems = [], [problem]
        if problem is None:
            models, problem = _try(lambda: _build_stages(context, schedule, build, preparation))
            problems = _all(problem, context)
        found = [text for text in problems if text is not None]
        if found:
            report.add("checkpoint fits the model", False, "it does not load", found)
        else:
            check = _make_check(
                context, models, whole, preparation, schedule, loss_fn, settings, report,
                batches=make_batches(preparation),
            )  # fmt: skip
            check.run(steps=settings.steps)
        return _first(report.passed, context)


def _build_stages(
    context: DistributedContext, schedule: Schedule, build: Build, preparation: Preparation
) -> list[nn.Module]:
    return [
        build(stage=stage, num_stages=schedule.num_stages, source=preparation.source)
        for stage in schedule.stages_of(context.pp_rank)
    ]


def _make_check(
    context: DistributedContext,
    models: Sequence[nn.Module],
    whole: WholeModel | None,
    preparation: Preparation,
    schedule: Schedule,
    loss_fn: Callable[..., torch.Tensor],
    settings: CheckSettings,
    report: Report,
    *,
    batches: Callable[[int], list[MicroBatch]],
) -> SplitCheck:
    for model in models:
        start_lora(model, seed=settings.seed)
    own = [stage_facts(model, preparation.files) for model in models]
    gathered = _all(own, context)
    facts = sorted((fact for facts in gathered for fact in facts), key=lambda fact: fact.stage)
    runner = PipelineRunner(
        list(models), device=context.device, group=context.pp_group, schedule=schedule
    )
    made = batches(0)
    lengths = ", ".join("x".join(map(str, batch["input_ids"].shape)) for batch in made)
    compared = type(whole.model).__name__ if whole is not None else ""
    origin = "of transformers, in plain PyTorch" if preparation.is_library else "on one stage"
    report.facts |= {
        "model": f"{preparation.config.model_type}, {sum(fact.layers for fact in facts)} layers",
        "split": f"{schedule.num_stages} stages of {', '.join(str(f.layers) for f in facts)} "
        f"layers on {schedule.num_ranks} processes, {schedule.name}",
        "compared with": f"{compared} {origin}",
        "micro-batches": f"{len(made)} of {lengths} tokens",
    }
    return SplitCheck(
        Split(runner, loss_fn=loss_fn),
        whole=whole,
        preparation=preparation,
        facts=facts,
        batches=batches,
        tolerance=settings.tolerance,
        report=report,
    )


def _try(make: Callable[[], Any], wanted: bool = True) -> tuple[Any, str | None]:
    """(what was made, None), or (None, why the checkpoint does not fit)."""
    if not wanted:
        return None, None
    try:
        return make(), None
    except CheckpointMismatch as error:
        return None, str(error)


@contextmanager
def _shared_folder(context: DistributedContext) -> Iterator[Path]:
    """A folder of rank 0 that all ranks of this machine see, while the block lasts."""
    if context.pp_rank > 0:
        yield Path(_first(None, context))
        dist.barrier(group=context.pp_group)
        return
    with tempfile.TemporaryDirectory(prefix="stageline_check_") as name:
        _first(name, context)
        yield Path(name)
        # before it is removed
        dist.barrier(group=context.pp_group)


def _first(value: Any, context: DistributedContext) -> Any:
    box = [value]
    dist.broadcast_object_list(box, group=context.pp_group, group_src=0)
    return box[0]


def _all(value: Any, context: DistributedContext) -> list[Any]:
    values: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(values, value, group=context.pp_group)
    return values
