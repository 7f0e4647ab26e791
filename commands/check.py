"""Check that a split model computes what the whole one does; on the CPU, no GPU is needed.

`stageline check` takes the options of a training command, as they are. It builds the stages with
the functions that train_pp.py uses. Exit code 0: equal; 1: a difference, the table says which; 2: a
wrong option. With `--exported` it compares an exported folder with its checkpoint instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commands import quiet_transformers, start
from commands.stages import with_family_key
from commands.train import SHELF  # the import registers the engines of training commands
from options.fields import given_options, spelled
from options.model import check_vision
from options.train import NOT_CHECKED, for_check
from parse_args import CheckArguments, parse_check_args
from stageline.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from stageline.pipeline.schedules import Schedule
    from stageline.verify.batches import MicroBatch
    from stageline.verify.whole_model import ModelSource, Preparation

LEAST_MICRO_BATCHES = 4
MOST_MICRO_BATCHES = 8  # a difference shows in a few micro-batches of a dataset


def main() -> int:
    """Run the check; return the exit code."""
    config = start(parse_check_args, *SHELF)
    if config.run.exported is not None:
        from commands.export import check_exported

        return check_exported(config)
    config, schedule = resolve_schedule(with_family_key(config))
    quiet_transformers()
    return check(config, schedule)


def resolve_schedule(config: CheckArguments) -> tuple[CheckArguments, Schedule]:
    """Return the options with the number of stages, and their pipeline, of two ranks by default."""
    from stageline.pipeline.schedules import default_stages_per_rank
    from stageline.pipeline.topology import resolve_topology

    run = config.run
    num_stages = run.num_stages
    if num_stages is None and not run.schedule.endswith(".csv"):
        num_stages = 2 * (run.stages_per_rank or default_stages_per_rank(run.schedule))
    check_vision(dataclasses.replace(run, num_stages=num_stages))
    if isinstance(run.partition, list) and run.check.layers not in (None, sum(run.partition)):
        raise UserError(
            f"--partition {','.join(map(str, run.partition))} names {sum(run.partition)} layers, "
            f"--check.layers leaves {run.check.layers}. Change one of them, or drop --partition."
        )
    topology = resolve_topology(
        schedule=run.schedule,
        num_stages=num_stages,
        stages_per_rank=run.stages_per_rank,
        dp_degree=1,
    )
    run = dataclasses.replace(run, num_stages=topology.num_stages)
    return dataclasses.replace(config, run=run), topology.schedule


def check(config: CheckArguments, schedule: Schedule) -> int:
    """Check the split of one pipeline in this process; print the report."""
    from commands.train_data import check_scores
    from commands.train_parts import bind_loss
    from stageline.verify.checker import Report, check_split
    from stageline.verify.whole_model import ModelSource

    run, model = config.run, config.parts["train_model"]
    check_scores(config)
    if model.kwargs.get("output_router_logits"):
        raise UserError(
            "--train-model.output_router_logits is unknown to the unsplit model. Set "
            "output_router_logits in config.json for a check."
        )
    report = Report(notes=notes_of(config))
    check_split(
        schedule,
        source=ModelSource(run.config_path, run.model_path, run.processor_path),
        build=functools.partial(build, config),
        make_batches=functools.partial(make_batches, config, schedule),
        loss_fn=bind_loss(config),
        steps=run.check.steps,
        tolerance=run.check.tolerance,
        layers=run.check.layers,
        # transformers' own class would predict tokens
        reference="part" if model.facts.gives_scores else run.check.reference,
        seed=run.seed,
        trust_remote_code=run.trust_remote_code,
        report=report,
    )
    print(report, flush=True)
    if run.output_dir:
        print(f"saved {report.save(run.output_dir)}", flush=True)
    return 0 if report.passed else 1


def notes_of(config: CheckArguments) -> list[str]:
    """Return what of the training command is done otherwise here."""
    run = config.run
    given = [name for name in given_options(run) if name in NOT_CHECKED]
    notes = [f"{spelled(name)} is left out of a check" for name in given]
    if run.precision != "fp32":
        notes.append("compared in float32: other types round more than a mistake may change")
    if run.device not in ("auto", "cpu"):
        notes.append(f"--device {run.device}: a check runs on the CPU")
    if (run.dp_degree or 1) > 1:
        notes.append("--dp-degree: one replica is checked")
    if "dataset" in config.parts and config.parts["dataset"].kwargs.get("rows") == "packed":
        notes.append("--dataset.rows packed: a segment a row is checked, as --packing would be")
    return notes


def build(config: CheckArguments, *, stage: int, num_stages: int, source: ModelSource) -> Any:
    """Build a stage as train_pp.py does; with `num_stages` of 1 the whole component."""
    from commands.train_parts import stage_builder

    run = config.run
    recomputes = run.gradient_checkpointing and num_stages == run.num_stages
    changed = for_check(run, **vars(source), gradient_checkpointing=recomputes)
    builder = stage_builder(dataclasses.replace(config, run=changed))
    return builder.build(stage, num_stages=num_stages, device="cpu")


def make_batches(
    config: CheckArguments, schedule: Schedule, preparation: Preparation, whole: nn.Module
) -> Callable[[int], list[MicroBatch]]:
    """Return step -> its micro-batches: of the dataset, of random ids, or pictures."""
    import torch

    from commands.train_data import Data, make_loader
    from stageline.distributed.process_group import DistributedContext
    from stageline.verify.batches import probe_batches

    run, model_config = config.run, preparation.config
    if "dataset" not in config.parts:
        count = schedule.legal_micro_batches(LEAST_MICRO_BATCHES)
        has_tower = getattr(model_config, "vision_config", None) is not None

        @functools.cache
        def drawn(step: int) -> list[MicroBatch]:
            numbers: dict[str, int] = {"num_micro_batches": count, "seed": run.seed + step * count}
            make = functools.partial(probe_batches, model_config, torch.float32, **numbers)
            if has_tower:
                with contextlib.suppress(UserError, AttributeError):  # a family without pictures
                    return make(tower=getattr(whole, "whole", whole))
            return make()

        return drawn

    count = schedule.legal_micro_batches(min(run.num_micro_batches, MOST_MICRO_BATCHES))
    changed = for_check(
        run,
        eval_samples=0,
        processor_path=preparation.source.processor_path,
        batch_size=count * run.micro_batch_size,
    )
    config = dataclasses.replace(config, run=changed)
    data = Data(config)
    if getattr(data.train, "packed", None) is not None:
        data.train = data.train.unpacked()
    alone = DistributedContext()
    steps = iter(make_loader(config, data, alone, schedule, data.train, is_evaluation=False))

    @functools.cache
    def batches(step: int) -> list[MicroBatch]:  # steps are asked for in their order
        return next(steps)

    return batches
