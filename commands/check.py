"""Check that a split model computes what the whole one does; on the CPU, no GPU is needed.

`python check_model.py` takes the options of a training command, as they are. It builds the stages
with the functions that train_pp.py uses. Exit code 0: equal; 1: a difference, the table says which;
2: a wrong option. With `--exported` it compares an exported folder with its checkpoint instead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commands import importing, quiet_transformers, start
from commands.stages import with_family_key
from commands.train import SHELF  # the import registers the engines of training commands
from options.fields import given_options, spelled
from options.model import check_vision
from options.train import NOT_CHECKED, for_check
from parse_args import CheckArguments, parse_check_args
from stageline.errors import UserError

if TYPE_CHECKING:
    from stageline.distributed.process_group import DistributedContext
    from stageline.pipeline.schedules import Schedule
    from stageline.verify.batches import MicroBatch
    from stageline.verify.whole_model import ModelSource, Preparation, WholeModel

LEAST_MICRO_BATCHES = 4
MOST_MICRO_BATCHES = 8  # a difference shows in a few micro-batches of a dataset


def main() -> int:
    """Run the check; return the exit code."""
    arguments = start(parse_check_args, *SHELF)
    if arguments.run.exported is not None:
        from commands.export import check_exported

        return check_exported(arguments)
    from stageline.distributed.launch import launch_if_needed  # after the options: --help

    arguments, schedule = resolve_schedule(with_family_key(arguments))
    launch_if_needed(schedule.num_ranks)
    with importing():  # not in the process that starts the others
        from stageline.distributed.failure import name_stages
        from stageline.distributed.process_group import distributed_context
    quiet_transformers()
    # rank 0 also trains the whole model, for which the others may have to wait
    with distributed_context(num_ranks=schedule.num_ranks, device="cpu", timeout=7200.0) as context:
        name_stages(schedule.stages_of(context.pp_rank))
        return check(arguments, context, schedule)


def resolve_schedule(arguments: CheckArguments) -> tuple[CheckArguments, Schedule]:
    """Return the options with the number of stages, and their pipeline, of two ranks by default."""
    from stageline.pipeline.schedules import default_stages_per_rank
    from stageline.pipeline.topology import resolve_topology

    run = arguments.run
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
    return dataclasses.replace(arguments, run=run), topology.schedule


def check(arguments: CheckArguments, context: DistributedContext, schedule: Schedule) -> int:
    """Check the split of one pipeline; print the report on rank 0."""
    with importing():
        from commands.train_data import check_scores
        from commands.train_parts import bind_loss
        from stageline.verify.checker import check_split
        from stageline.verify.compare import Report
        from stageline.verify.whole_model import ModelSource

    run, model = arguments.run, arguments.parts["train_model"]
    check_scores(arguments)
    if model.kwargs.get("output_router_logits"):
        raise UserError(
            "--train-model.output_router_logits is unknown to the unsplit model. Set "
            "output_router_logits in config.json for a check."
        )
    report = Report(notes=notes_of(arguments))
    passed = check_split(
        context,
        schedule=schedule,
        source=ModelSource(run.config_path, run.model_path, run.processor_path),
        build=functools.partial(build, arguments, context),
        make_batches=functools.partial(make_batches, arguments, context, schedule),
        loss_fn=bind_loss(arguments),
        steps=run.check.steps,
        tolerance=run.check.tolerance,
        layers=run.check.layers,
        # transformers' own class would predict tokens
        reference="part" if model.facts.gives_scores else run.check.reference,
        seed=run.seed,
        trust_remote_code=run.trust_remote_code,
        report=report,
    )
    if context.is_main:
        print(report, flush=True)
        if run.output_dir:
            print(f"saved {report.save(run.output_dir)}", flush=True)
    return 0 if passed else 1


def notes_of(arguments: CheckArguments) -> list[str]:
    """Return what of the training command is done otherwise here."""
    run = arguments.run
    given = [name for name in given_options(run) if name in NOT_CHECKED]
    notes = [f"{spelled(name)} is left out of a check" for name in given]
    if run.precision != "fp32":
        notes.append("compared in float32: other types round more than a mistake may change")
    if run.device not in ("auto", "cpu"):
        notes.append(f"--device {run.device}: a check runs on the CPU")
    if (run.dp_degree or 1) > 1:
        notes.append("--dp-degree: one replica is checked")
    if "dataset" in arguments.parts and arguments.parts["dataset"].kwargs.get("rows") == "packed":
        notes.append("--dataset.rows packed: a segment a row is checked, as --packing would be")
    return notes


def build(
    arguments: CheckArguments,
    context: DistributedContext,
    *,
    stage: int,
    num_stages: int,
    source: ModelSource,
) -> Any:
    """Build a stage as train_pp.py does; with `num_stages` of 1 the whole component."""
    from commands.train_parts import stage_builder

    run = arguments.run
    changed = for_check(
        run,
        config_path=source.config_path,
        model_path=source.model_path,
        processor_path=source.processor_path,
        gradient_checkpointing=run.gradient_checkpointing and num_stages == run.num_stages,
    )
    builder = stage_builder(dataclasses.replace(arguments, run=changed))
    return builder.build(stage, num_stages=num_stages, device=context.device)


def make_batches(
    arguments: CheckArguments,
    context: DistributedContext,
    schedule: Schedule,
    preparation: Preparation,
    whole: WholeModel | None,
) -> Callable[[int], list[MicroBatch]]:
    """Return step -> its micro-batches: of the dataset, of random ids, or pictures."""
    import torch

    from commands.train_data import Data, make_loader
    from stageline.distributed.ranks import Ranks
    from stageline.verify.batches import drop_pixels, probe_batches, random_batches

    run, config = arguments.run, preparation.config
    if "dataset" not in arguments.parts:
        count = schedule.legal_micro_batches(LEAST_MICRO_BATCHES)
        ranks = Ranks.of(context.pp_group)
        has_images = 0 in schedule.stages_of(context.pp_rank)

        def pictures(seed: int) -> list[MicroBatch] | None:
            """Draw pictures and ids on rank 0, which has the tower; None: a family without."""
            assert whole is not None
            model = getattr(whole.model, "whole", whole.model)
            try:
                return probe_batches(
                    model, "vision", torch.float32, num_micro_batches=count, seed=seed
                )
            except (UserError, AttributeError):
                return None

        @functools.cache
        def drawn(step: int) -> list[MicroBatch]:
            made = None
            if getattr(config, "vision_config", None) is not None:
                made = ranks.on_first(lambda: pictures(run.seed + step * count))
            if made is None:
                return random_batches(config, num_micro_batches=count, seed=run.seed + step)
            return made if has_images else [drop_pixels(batch) for batch in made]

        return drawn

    changes: dict[str, Any] = {
        "eval_samples": 0,
        "processor_path": preparation.source.processor_path,
    }
    num_micro_batches = schedule.legal_micro_batches(min(run.num_micro_batches, MOST_MICRO_BATCHES))
    changes["batch_size"] = num_micro_batches * run.micro_batch_size
    changed = dataclasses.replace(arguments, run=for_check(run, **changes))
    data = Data(changed)
    if getattr(data.train, "packed", None) is not None:
        data.train = data.train.unpacked()
    steps = iter(make_loader(changed, data, context, schedule, data.train, is_evaluation=False))
    made: list[list[MicroBatch]] = []

    def batches(step: int) -> list[MicroBatch]:
        while len(made) <= step:
            made.append(next(steps))
        return made[step]

    return batches
