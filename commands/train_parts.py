"""What a training run is made of: each chosen part, called with what it wants of the options.

Knows the options and the contract of each register; train_pp.py puts the objects together.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from commands import say
from commands.run_plan import RunPlan
from commands.stages import StageBuilder, dtype_of
from commands.train_data import Data, asks_for
from commands.train_vocabulary import rows_option
from options.fields import handed_to
from options.memory import attention_arguments, check_attention_device
from options.model import learning_rate_scales, method_arguments
from options.parts import ChosenPart, takes
from options.train import RunConfig
from parse_args import TrainArguments
from register import load_target
from stageline.checkpoint.layout import Ranks
from stageline.contracts import call, check_call
from stageline.data.batches.loader import example_micro_batch
from stageline.data.batches.preflight import check_encode
from stageline.data.batches.sampler import group_size_of
from stageline.data.batches.step_maker import read_row
from stageline.data.images.tiling import Tiling
from stageline.data.text.processor import num_token_ids
from stageline.data.text.tokenizers import NewTokens
from stageline.distributed.process_group import DistributedContext, wait_for_weights
from stageline.modules.chunked_loss import ChunkedLoss, LossByToken
from stageline.modules.lora_layer import PISSA
from stageline.modules.losses import without_reference
from stageline.modules.policy_loss import with_stand_ins
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import check_values_kept
from stageline.pipeline.topology import Topology
from stageline.planner.cost import device_capacity
from stageline.planner.planner import Planner, place_together
from stageline.seeds import host_state_kept
from stageline.stage import Stage
from stageline.stages.packing import check_packing
from stageline.training.loss_part import LossPart, StepLoss
from stageline.training.optimizers import optimizer_groups
from stageline.training.part_checks import (
    check_learning_rate,
    check_loss,
    check_optimizer,
    check_sim_fn,
)
from stageline.training.resume import ResumePoint
from stageline.verify.names import check_filled_stages

# of a loss, for the engine
PLAIN_FACTS = ("is_token_sum", "is_cross_entropy", "predicts_tokens", "weighs_by_itself")


def stage_builder(arguments: TrainArguments, *, images: Any = None) -> StageBuilder:
    """What builds the stages of a run.

    Args:
        images: the processor of the data.
    """
    run = arguments.run
    options = {
        **handed_to("train_model", run),
        **method_arguments(run),
        **attention_arguments(run),
        "dtype": dtype_of(run),
    }
    return StageBuilder(
        arguments.parts["train_model"],
        run.config_path or run.model_path,
        run.num_stages or 1,
        checkpoint_path=run.model_path,
        partition=run.partition if isinstance(run.partition, list) else None,
        trust_remote_code=run.trust_remote_code,
        options=options,
        images=images if Tiling(**run.images.tiling()).is_given else None,
    )


def build_stages(
    arguments: TrainArguments,
    context: DistributedContext,
    schedule: Schedule,
    *,
    images: Any = None,
    point: ResumePoint | None = None,
    new_tokens: NewTokens | None = None,
    is_packed: bool = False,
) -> list[Stage]:
    """Calls the train_model part for each stage of this rank.

    Args:
        is_packed: rows of the data hold several samples.
        new_tokens: what `Data` added to the tokenizer.
        images: the processor of the data.
        point: a checkpoint in which whole models are. What is trained besides the weights of an
            adapter's base comes later, by `resume_step`.
    """
    run = arguments.run
    check_attention_device(run, context.devices[0].type)
    weights, processor = run.model_path, run.processor_path
    if point is not None:
        weights = str(point.folder) if point.base is None else run.model_path or point.base
        processor = processor or run.model_path or run.config_path
    builder = stage_builder(arguments, images=images)
    stages_here = list(schedule.stages_of(context.pp_rank))
    is_known = builder.check_names(
        stages_here, ranks=Ranks.of(context.pp_group), checkpoint=weights
    )
    stages = [
        builder.build(
            stage,
            checkpoint_path=weights,
            processor_path=processor,
            device=context.device,
            **rows_option(run, new_tokens, is_known=point is not None and point.base is None),
            **taken_option(run, point),
        )
        for stage in stages_here
    ]
    wait_for_weights(weights)
    if not is_known:
        check_filled_stages(stages, ranks=Ranks.of(context.pp_group), checkpoint=weights)
    check_values_kept(stages)
    for stage in stages:
        if point is not None and point.base is not None:
            stage.loaded_from = getattr(stage, "loaded_from", None) or point.base
        if stage.stage == 0 and getattr(stage, "cast_note", None):
            say(f"{run.model_path}: {stage.cast_note}")
    if is_packed:
        for stage in stages:
            if not getattr(stage, "is_tower", False):  # no row crosses a tower
                check_packing(stage, rows=run.micro_batch_size, device=context.device)
    return stages


def start_stages(
    arguments: TrainArguments, data: Data, context: DistributedContext, point: ResumePoint | None
) -> Callable[[int], Stage]:
    """Gives a stage as this run's first start filled it, from `model_path` or at random."""
    run = arguments.run

    def build(stage: int) -> Stage:
        with host_state_kept():
            made = stage_builder(arguments, images=data.processor).build(
                stage,
                checkpoint_path=run.model_path,
                processor_path=run.processor_path,
                device=context.device,
                **rows_option(run, data.new_tokens),
                **taken_option(run, point),
            )
        wait_for_weights(run.model_path)
        return made

    return build


def check_parts(arguments: TrainArguments, data: Data) -> None:
    """Refuses parts that do not keep their contracts, on the first rows; loads no model."""
    parts = arguments.parts
    given = handed_to("optimizer", arguments.run)
    check_call("optimizer", parts["optimizer"].bound, [], **given)
    check_call("tracker", parts["tracker"].bound, folder=Path(), config={}, start_step=0)
    stage: dict[str, Any] = {"config_path": None, "processor_path": None, "checkpoint_path": None}
    stage |= {"dtype": None, "device": None, "stage": 0, "num_stages": 1, "seed": 0}
    check_call("train_model", parts["train_model"].part, **stage)
    make_learning_rate(arguments)
    if "sim_fn" in parts:
        check_sim_fn(parts["sim_fn"].bound)
    with host_state_kept():
        rows = range(min(2 * group_size_of(data.train), len(data.train)))
        samples = [read_row(data.train, row) for row in rows]
        collate = functools.partial(data.collate, stage=min(1, (arguments.run.num_stages or 1) - 1))
        batch = collate([check_encode(collate, sample) for sample in samples])
    if arguments.parts["loss_fn"].facts["samples_answers"]:
        batch = with_stand_ins(batch)
    problem = check_loss(
        bind_loss(arguments),
        batch,
        vocab_size=data.vocab_size or num_token_ids(data.processor),
    )
    if problem is not None:
        say(problem)


def taken_option(run: RunConfig, point: ResumePoint | None) -> dict[str, Any]:
    """The checkpoint that knows what PiSSA took out of the weights, of a run that goes on."""
    if point is None or point.base is None or not run.lora.init.startswith(PISSA):
        return {}
    return {"lora_taken_from": str(point.folder)}


def bind_loss(arguments: TrainArguments) -> LossPart:
    """The loss_fn part with its options and facts, and the sim_fn part where it takes one."""
    sim_fn = arguments.parts.get("sim_fn")
    similar = {} if sim_fn is None else {"sim_fn": sim_fn.bound}
    given = taken_options("loss_fn", arguments)
    return make_loss_part(arguments.parts["loss_fn"], **similar, **given)


def taken_options(register: str, arguments: TrainArguments) -> dict[str, Any]:
    """The options of the run that a part of a register is handed, where it takes them."""
    part = arguments.parts[register].part
    handed = handed_to(register, arguments.run)
    return {name: value for name, value in handed.items() if takes(part, name) != "no"}


def make_loss_part(part: ChosenPart, **given: Any) -> LossPart:
    """What the engine calls for a loss_fn part: its facts are plain arguments there."""
    counts = {name: load_target(count) for name, count in part.facts["counts"].items()}
    asked = {name: asks_for(part, name) for name in ("needs_reference", "needs_kl")}
    loss_fn = functools.partial(part.part, **part.kwargs, **given)
    facts = {name: part.facts[name] for name in PLAIN_FACTS}
    return LossPart(loss_fn, **facts, **asked, counts=counts)


def make_loss(arguments: TrainArguments, model: Stage) -> LossPart:
    """The loss_fn part; where `model` is a last stage that keeps its logits back, over chunks."""
    loss = bind_loss(arguments)
    chunk = arguments.run.logits_chunk
    if chunk and model.is_last:
        by_token = arguments.parts["loss_fn"].facts["reads_by_token"]
        kind = LossByToken if by_token else ChunkedLoss
        return loss.over(kind(loss.loss_fn, whole=model.whole, chunk=chunk))
    return loss


def make_optimizer(
    arguments: TrainArguments,
    parameters: dict[str, torch.nn.Parameter],
    *,
    part_of: Callable[[str], str | None] = lambda name: None,
) -> torch.optim.Optimizer | None:
    """The optimizer part over this stage's trainable parameters; None where there are none.

    Args:
        part_of: a parameter's name -> the part of the model, which may have a rate of its own.
    """
    if not parameters:
        return None
    run, part = arguments.run, arguments.parts["optimizer"]
    scales = learning_rate_scales(run)
    groups = optimizer_groups(
        parameters,
        weight_decay=run.weight_decay,
        lr_scale_of=lambda name: scales.get(part_of(name) or "", 1.0),
    )
    optimizer = call("optimizer", part.bound, groups, **handed_to("optimizer", run))
    check_optimizer(optimizer, parameters, part=part.part)
    return optimizer


def make_tracker(arguments: TrainArguments, folder: Path, *, start_step: int) -> object | None:
    """The tracker part, which starts to follow the run."""
    part = arguments.parts["tracker"]
    config = arguments.as_config()
    given = {"folder": folder, "config": config, "start_step": start_step}
    return call("tracker", part.bound, **given)


def make_learning_rate(arguments: TrainArguments) -> Callable[[int], float]:
    """The lr_scheduler part: step -> learning rate."""
    run, part = arguments.run, arguments.parts["lr_scheduler"]
    rate_of = call("lr_scheduler", part.bound, **handed_to("lr_scheduler", run))
    check_learning_rate(rate_of, part=part.part)
    return rate_of


def make_planner(
    arguments: TrainArguments, data: Data, topology: Topology, device: torch.device
) -> Planner:
    """The planner of this run; it measures on `device`."""
    run, answers_of = arguments.run, None
    if arguments.parts["loss_fn"].facts["samples_answers"]:
        from commands.train_rollouts import weigh_answers

        answers_of = functools.partial(weigh_answers, run, topology.schedule.num_ranks)

    def loss_for(model: Stage) -> StepLoss:
        return StepLoss(
            make_loss(arguments, model),
            num_targets=1,
            num_micro_batches=1,
            scale=1.0,
            device=device,
        )

    return Planner(
        functools.partial(
            stage_builder(arguments, images=data.processor).build,
            checkpoint_path=None,
            is_piece=True,
            **rows_option(run, data.new_tokens),
        ),
        topology.schedule,
        num_samples=run.batch_size * run.accumulate_steps,
        micro_batch_size=run.micro_batch_size,
        shards=topology.dp_degree if run.dp_shard else 1,
        visual_gpu_ratio=run.visual_gpu_ratio,
        group_size=group_size_of(data.train),
        answers_of=answers_of,
        micro_batch_of=lambda num_rows: with_stand_ins(
            without_reference(
                example_micro_batch(
                    data.train, functools.partial(data.collate, stage=0), num_rows, seed=run.seed
                )
            )
        ),
        loss_for=loss_for,
        make_optimizer=functools.partial(make_optimizer, arguments),
        device=device,
    )


def place_layers(plan: RunPlan, data: Data, context: DistributedContext) -> RunPlan:
    """The plan with the layers of each stage, settled on all ranks."""
    run = plan.run
    if run.vision_stages:
        return plan  # the planner knows no tower but one on stage 0
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    partition = place_together(
        functools.partial(make_planner, plan, data, plan.topology, context.device),
        run.partition,
        capacity=device_capacity(
            context.device, num_local_ranks=local_ranks, gib=run.device_memory
        ),
    )
    if partition is None or run.partition not in ("parameters", "measured"):
        return plan
    return dataclasses.replace(plan, run=dataclasses.replace(run, partition=partition))
