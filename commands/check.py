"""Checks that a split model computes what the whole one does; on the CPU, no GPU is needed.

`python check_model.py` takes the options of a training command, as they are. It builds the stages
with the functions that train_pp.py uses. Exit code 0: equal; 1: a difference, the table says which;
2: a wrong option.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from commands.train import SHELF  # which registers the engine that a training command names
from options.model import check_vision, without_methods
from options.parts import ChosenPart, chosen_part
from parse_args import CheckArguments, parse_check_args
from register import freeze_registers, import_shelf
from stageline.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from stageline.checking.batches import MicroBatch, RandomPictures
    from stageline.checking.setup import ModelSource, Preparation
    from stageline.distributed.process_group import DistributedContext
    from stageline.pipeline.schedules import Schedule

LEAST_MICRO_BATCHES = 4
MOST_MICRO_BATCHES = 8  # of a dataset: a difference shows in a few
PICTURE_PROMPT = "[IMAGE]\n[QUESTION]\n[ANSWER]"
DEFAULT_PICTURE_SIZE = 112


def main() -> int:
    """Runs the check; returns the exit code."""
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_check_args()
    freeze_registers()
    import transformers  # after the options: --help answers at once

    from stageline.distributed.failure import name_stages
    from stageline.distributed.launch import launch_if_needed
    from stageline.distributed.process_group import distributed_context

    schedule = resolve_schedule(arguments)
    launch_if_needed(schedule.num_ranks)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # rank 0 also trains the whole model: the others may have to wait for it
    with distributed_context(num_ranks=schedule.num_ranks, device="cpu", timeout=7200.0) as context:
        name_stages(schedule.stages_of(context.pp_rank))
        return check(arguments, context, schedule)


def resolve_schedule(arguments: CheckArguments) -> Schedule:
    """The pipeline of the run, without replicas; two ranks where no number is given."""
    from stageline.pipeline.schedules import default_stages_per_rank
    from stageline.pipeline.topology import resolve_topology

    run = arguments.run
    if run.num_stages is None and not run.schedule.endswith(".csv"):
        per_rank = run.stages_per_rank or default_stages_per_rank(run.schedule)
        run.num_stages = 2 * per_rank
    check_vision(run)
    if isinstance(run.partition, list) and run.check_layers not in (None, sum(run.partition)):
        raise UserError(
            f"--partition {','.join(map(str, run.partition))} names {sum(run.partition)} layers, "
            f"--check-layers leaves {run.check_layers}. Both must be the same number, because "
            "every layer lies on a stage: change one of them, or leave --partition out."
        )
    topology = resolve_topology(
        schedule=run.schedule,
        num_stages=run.num_stages,
        stages_per_rank=run.stages_per_rank,
        dp_degree=1,
    )
    run.num_stages = topology.num_stages
    return topology.schedule


def check(arguments: CheckArguments, context: DistributedContext, schedule: Schedule) -> int:
    """Checks the split of one pipeline and prints the report on rank 0."""
    from commands.train_data import check_scores
    from commands.train_parts import bind_loss
    from stageline.checking.checker import CheckSettings, check_split
    from stageline.checking.compare import Report
    from stageline.checking.setup import ModelSource

    run, model = arguments.run, arguments.parts["train_model"]
    check_scores(arguments)
    # the library's own class would predict tokens
    reference = "part" if model.facts["gives_scores"] else run.check_reference
    if model.kwargs.get("output_router_logits"):
        raise UserError(
            "--train-model.output_router_logits came, which the unsplit model of the library knows "
            "from its config.json alone: set output_router_logits there for a check."
        )
    report = Report(notes=list(notes_of(arguments)))
    passed = check_split(
        context,
        schedule=schedule,
        source=ModelSource(run.config_path, run.model_path, run.processor_path),
        build=functools.partial(build, arguments, context),
        make_batches=functools.partial(make_batches, arguments, context, schedule),
        loss_fn=bind_loss(arguments),
        settings=CheckSettings(
            steps=run.check_steps,
            tolerance=run.check_tolerance,
            layers=run.check_layers,
            reference=reference,
            seed=run.seed,
            trust_remote_code=run.trust_remote_code,
        ),
        report=report,
    )
    if context.is_main:
        print(report, flush=True)
        if run.output_dir:
            print(f"saved {report.save(run.output_dir)}", flush=True)
    return 0 if passed else 1


def notes_of(arguments: CheckArguments) -> list[str]:
    """What of the training command is done otherwise here."""
    run = arguments.run
    notes = []
    if run.precision != "fp32":
        notes.append(
            f"compared in float32: --{run.precision} rounds more than a mistake may change"
        )
    if run.device == "cuda":
        notes.append("--device cuda: a check runs on the CPU")
    if (run.dp_degree or 1) > 1:
        notes.append("--dp-degree: one replica was checked")
    notes += [
        f"--{name.replace('_', '-')} was left out: it was checked where it is tested, not here"
        for name in ("packing", "logits_chunk", "compile_layers")
        if getattr(run, name)
    ]
    if "dataset" in arguments.parts and arguments.parts["dataset"].kwargs.get("rows") == "packed":
        notes.append("--dataset.rows packed: a segment a row was checked, as --packing would be")
    if run.lora_dropout > 0:
        notes.append("--lora-dropout was set to 0: random numbers can't be compared")
    return notes


def build(
    arguments: CheckArguments,
    context: DistributedContext,
    *,
    stage: int,
    num_stages: int,
    source: ModelSource,
) -> object:
    """A stage as train_pp.py builds it; with `num_stages` of 1 the part as a whole."""
    from commands.train_parts import build_part

    run = arguments.run
    changed = dataclasses.replace(
        run,
        config_path=source.config_path,
        model_path=source.model_path,
        processor_path=source.processor_path,
        logits_chunk=0,
        compile_layers=False,
        gradient_checkpointing=run.gradient_checkpointing and num_stages == run.num_stages,
        bf16=False,
        fp16=False,
        lora_dropout=0.0,
        **without_methods(),
    )
    is_given = num_stages == run.num_stages and isinstance(run.partition, list)
    if num_stages != run.num_stages:  # on one stage, to compare with
        changed.vision_stages = 0
    return build_part(
        dataclasses.replace(arguments, run=changed),
        stage=stage,
        num_stages=num_stages,
        partition=run.partition if is_given else None,
        device=context.device,
    )


def make_batches(
    arguments: CheckArguments,
    context: DistributedContext,
    schedule: Schedule,
    preparation: Preparation,
) -> Callable[[int], list[MicroBatch]]:
    """Number of a step -> its micro-batches: of the dataset, of random pictures, or random ids."""
    from commands.train_data import Data, make_loader
    from stageline.checking.batches import random_batches

    config, source = preparation.config, preparation.source
    has_tower = getattr(config, "vision_config", None) is not None
    if "dataset" not in arguments.parts and not (has_tower and source.has_processor):
        count = schedule.legal_micro_batches(LEAST_MICRO_BATCHES)
        seed = arguments.run.seed
        return functools.cache(
            lambda step: random_batches(config, num_micro_batches=count, seed=seed + step)
        )
    # a split is as right without new tokens, whose rows no library model would have
    changes = {"eval_samples": 0, "accumulate_steps": 1, "packing": False, "new_tokens": None}
    changes |= {"resize_vocab": False, "global_batch_distributed": None}  # of other batches
    run = dataclasses.replace(arguments.run, **changes)
    if "dataset" in arguments.parts:
        wanted = min(arguments.run.num_micro_batches, MOST_MICRO_BATCHES)
        parts = arguments.parts
    else:
        wanted, run.micro_batch_size, run.max_token_num = LEAST_MICRO_BATCHES, 2, 1 << 16
        parts = {**arguments.parts, **picture_parts(arguments, config)}
    run.batch_size = schedule.legal_micro_batches(wanted) * run.micro_batch_size
    run.processor_path = source.processor_path
    changed = dataclasses.replace(arguments, run=run, parts=parts)
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


def picture_parts(arguments: CheckArguments, config: PretrainedConfig) -> dict[str, ChosenPart]:
    """Parts in place of those of a dataset: random pictures with a question and an answer."""
    from stageline.checking.batches import RandomPictures

    size = getattr(config.vision_config, "image_size", None) or DEFAULT_PICTURE_SIZE
    size = max(size) if isinstance(size, list | tuple) else size

    def pictures(*, dataset_path: str | None, split: str) -> RandomPictures:
        return RandomPictures(size=size)

    chosen = {
        "image_token": chosen_part("image_token", "auto"),
        "collate_fn": chosen_part("collate_fn", "sft"),
    }
    return {
        "dataset": ChosenPart("dataset", "random", pictures),
        "prompt": ChosenPart("prompt", "random", PICTURE_PROMPT),
        "prompt_fn": chosen_part("prompt_fn", "fill"),
        **{name: arguments.parts.get(name, part) for name, part in chosen.items()},
    }
