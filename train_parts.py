"""What a training run is made of: each chosen part, called with what it wants of the options.

Knows the options and the contract of each register; train_pp.py puts the objects together.
"""

import functools
import os
from collections.abc import Callable

import torch
from torch.utils.data import Dataset, Subset

from options.part_options import ChosenPart
from options.part_training_options import learning_rate_scales, part_options
from options.run_options import RunConfig
from parse_args import TrainArguments
from stageline.data.bad_rows import BadRows, leaving_out
from stageline.data.check_batch import CheckedCollate
from stageline.data.example import example_micro_batch
from stageline.data.groups import (
    check_batch_sizes,
    group_size_of,
    some_rows,
    whole_groups,
)
from stageline.data.image_settings import make_image_settings, using_images
from stageline.data.lengths import padding_argument
from stageline.data.loader import MicroBatchLoader
from stageline.data.new_tokens import NewTokens
from stageline.data.preflight import check_vocabulary, preflight
from stageline.data.prepare_images import prepare_images
from stageline.data.processor import get_pad_token_id, load_processor
from stageline.data.sampler import StepSampler
from stageline.data.tiling import Tiling, match_config
from stageline.distributed.process_group import DistributedContext
from stageline.errors import UserError
from stageline.model_folder import load_config
from stageline.modules.chunked_loss import ChunkedLoss, check_token_sum
from stageline.pipeline.packing_check import check_packing
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.topology import Topology
from stageline.training.optimizer_groups import optimizer_groups
from stageline.training.planner import PlannedRun, Planner
from stageline.training.resume import ResumePoint
from stageline.training.step_loss import StepLoss
from train_vocabulary import add_tokens, check_tied_head, num_rows_of, rows_option

SHELF = ("pp_models", "prompt", "prompt_fn", "dataset", "loss_fn", "optimizer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Data:
    """Datasets, processor and collate function of a run, checked before any model is loaded."""

    def __init__(self, arguments: TrainArguments) -> None:
        run, parts = arguments.run, arguments.parts
        path = run.processor_path or run.model_path or run.config_path
        if path is None:
            raise UserError(
                "neither --model-path nor --config-path came: a folder with config.json and a "
                "tokenizer was expected; --model-path continues from its weights, --config-path "
                "starts at random."
            )
        self.processor = load_processor(path, trust_remote_code=run.trust_remote_code)
        self.new_tokens = add_tokens(arguments, self.processor, path)
        images = make_image_settings(**run.image_limits())
        prepare_images(self.processor, images, Tiling(**run.tiling()))
        self.pad_token_id = get_pad_token_id(self.processor)
        dataset = parts["dataset"]
        make = functools.partial(dataset.part, dataset_path=run.dataset_path, **dataset.kwargs)
        self.bad_rows = BadRows(run.skip_bad_rows)
        with leaving_out(self.bad_rows), using_images(images):
            self.train = make(split="train")
            self.test = make(split="test") if run.eval_samples else None
        if self.test is not None and run.eval_samples != "all":
            self.test = some_rows(self.test, run.eval_samples)
        check_groups(arguments, self.train, self.test)
        collate, prompt_fn = parts["collate_fn"], parts["prompt_fn"]
        image_token = parts["image_token"]
        self.texts = {
            "prompt": parts["prompt"].part,
            "prompt_fn": functools.partial(prompt_fn.part, **prompt_fn.kwargs),
            "image_token": functools.partial(image_token.part, **image_token.kwargs),
        }
        self.collate: Callable = functools.partial(
            collate.part,
            **self.texts,
            processor=self.processor,
            pad_token_id=self.pad_token_id,
            max_token_num=run.max_token_num,
            num_stages=run.num_stages,
            **padding_argument(collate.part, run.pad_to_multiple_of),
            **collate.kwargs,
        )


def check_groups(arguments: TrainArguments, *datasets: Dataset | None) -> None:
    """Refuses batches that would cut groups, and a collate part without the groups it needs."""
    run, parts = arguments.run, arguments.parts
    for dataset in filter(None, datasets):
        size = group_size_of(dataset)
        check_batch_sizes(
            batch_size=run.batch_size,
            micro_batch_size=run.micro_batch_size,
            group_size=size,
            is_packed=run.packing,
        )
        if size == 1 and getattr(parts["collate_fn"].part, "needs_groups", False):
            raise UserError(
                f"--collate-fn {parts['collate_fn'].key} came with --dataset "
                f"{parts['dataset'].key}, which has no groups. A dataset with group_size was "
                "expected, because the samples of a group are compared: use --dataset groups, a "
                "dataset of your own with groups (docs/add_a_part.md), or --collate-fn sft."
            )


def check_data(arguments: TrainArguments) -> Data:
    """Builds the datasets and refuses bad rows, images and tokenizers; loads no model."""
    run = arguments.run
    if run.logits_chunk:
        check_token_sum(arguments.parts["loss_fn"].part)
    data = Data(arguments)
    config = load_config(run.config_path or run.model_path, trust_remote_code=run.trust_remote_code)
    check_tied_head(run, config)
    vocab_size = num_rows_of(run, config, new_tokens=data.new_tokens)
    if vocab_size is not None:
        check_vocabulary(data.processor, vocab_size)
        data.collate = CheckedCollate(data.collate, vocab_size)
    # a collate part of another kind than sft judges its rows by itself
    if "overlong" in arguments.parts["collate_fn"].kwargs:
        data.train = check_rows(arguments, data, data.train, vocab_size)
        if data.test is not None:
            data.test = check_rows(arguments, data, data.test, vocab_size)
    report = left_over_rows(run, data.train)
    if data.bad_rows.reasons:
        report += f"{len(data.bad_rows)} bad rows are left out:\n{data.bad_rows.listed()}\n"
    if os.environ.get("RANK", "0") == "0":
        print(report, end="", flush=True)
    return data


def check_rows(
    arguments: TrainArguments, data: Data, dataset: Dataset, vocab_size: int | None
) -> Dataset:
    """The dataset without rows that are bad and may be left out."""
    run = arguments.run
    report = preflight(
        dataset,
        **data.texts,
        processor=data.processor,
        max_token_num=run.max_token_num,
        overlong=arguments.parts["collate_fn"].kwargs["overlong"],
        vocab_size=vocab_size,
        bad_rows=data.bad_rows,
        seed=run.seed,
    )
    bad = set(whole_groups(report.bad, group_size_of(dataset)))
    with_them = len(bad) - len(report.bad)
    if os.environ.get("RANK", "0") == "0":
        print(f"{report}, {with_them} more of their groups" if with_them else report, flush=True)
    if not bad:
        return dataset
    return Subset(dataset, [row for row in range(len(dataset)) if row not in bad])


def left_over_rows(run: RunConfig, dataset: Dataset) -> str:
    """Says how many rows an epoch leaves out because steps are whole.

    Raises:
        UserError: there are too few rows for one step.
    """
    num_rows = len(dataset)
    sampler = StepSampler(
        num_rows,
        step_samples=run.batch_size * run.accumulate_steps,
        dp_degree=run.dp_degree or 1,
        seed=run.seed,
        group_size=group_size_of(dataset),
    )
    rest = num_rows % (sampler.step_samples * sampler.dp_degree)
    if rest == 0:
        return ""
    return f"{rest} of {num_rows} rows are left over in each epoch (others each time)\n"


def build_stages(
    arguments: TrainArguments,
    context: DistributedContext,
    schedule: Schedule,
    *,
    images: object = None,
    point: ResumePoint | None = None,
    new_tokens: NewTokens | None = None,
) -> list[torch.nn.Module]:
    """Calls the train_model part for each stage of this rank.

    Args:
        new_tokens: what `Data` added to the tokenizer.
        images: the processor of the data.
        point: a checkpoint in which whole models are. What is trained besides the weights of an
            adapter's base comes later, by `resume_step`.
    """
    run = arguments.run
    weights, processor = run.model_path, run.processor_path
    if point is not None:
        weights = str(point.folder) if point.base is None else run.model_path or point.base
        processor = processor or run.model_path or run.config_path
    stages = [
        build_part(
            arguments,
            images=images,
            stage=stage,
            num_stages=run.num_stages,
            partition=run.partition if isinstance(run.partition, list) else None,
            checkpoint_path=weights,
            processor_path=processor,
            device=context.device,
            **rows_option(run, new_tokens, is_known=point is not None and point.base is None),
        )
        for stage in schedule.stages_of(context.pp_rank)
    ]
    for stage in stages:
        note = getattr(stage, "cast_note", None)
        if note and stage.stage == 0:
            print(f"{run.model_path}: {note}", flush=True)
    if run.packing:
        for stage in stages:
            if getattr(stage, "is_tower", False):
                continue  # no row crosses it
            check_packing(stage, rows=run.micro_batch_size, device=context.device)
    return stages


def build_part(
    arguments: TrainArguments, *, images: object = None, **changes: object
) -> torch.nn.Module:
    """Calls the train_model part with the options of the run, and `changes` of them.

    Args:
        images: the processor of the data, where the model has to know of its tiles.
    """
    run, part = arguments.run, arguments.parts["train_model"]
    names = (
        "frozen_vit frozen_mlp frozen_llm frozen_lm_head vit_lora_num mlp_lora_num llm_lora_num "
        "lora_rank lora_alpha lora_dropout lora_target visual_gpu_ratio seed "
        "gradient_checkpointing checkpoint_every checkpoint_mode offload_activations "
        "compile_layers logits_chunk trust_remote_code"
    )
    if run.vision_stages:  # parts without a tower need not know the names
        names += " vision_stages vision_partition"
    options = {
        "config_path": run.config_path or run.model_path,
        "processor_path": run.processor_path,
        "checkpoint_path": run.model_path,
        "dtype": DTYPES[run.precision],
        **{name: getattr(run, name) for name in names.split()},
        **part_options(run),
        **part.kwargs,
    }
    model, _, _ = part.part(**{**options, **changes})
    if Tiling(**run.tiling()).is_given:
        match_config(model.config, images)
    return model


def bind_loss(arguments: TrainArguments) -> Callable[..., torch.Tensor]:
    """The loss_fn part with its options, and the sim_fn part where it takes one."""
    part, sim_fn = arguments.parts["loss_fn"], arguments.parts.get("sim_fn")
    similar = {} if sim_fn is None else {"sim_fn": _bound(sim_fn)}
    return functools.partial(part.part, **part.kwargs, **similar)


def _bound(part: ChosenPart) -> Callable:
    return functools.partial(part.part, **part.kwargs)


def make_loss(arguments: TrainArguments, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The loss_fn part; where `model` is a last stage that keeps its logits back, over chunks."""
    loss_fn = bind_loss(arguments)
    chunk = arguments.run.logits_chunk
    if chunk and model.is_last:
        return ChunkedLoss(loss_fn, whole=model.whole, chunk=chunk)
    return loss_fn


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
        lr_scale_of=lambda name: scales.get(part_of(name), 1.0) if scales else 1.0,
    )
    return part.part(
        groups, learning_rate=run.learning_rate, weight_decay=run.weight_decay, **part.kwargs
    )


def make_learning_rate(arguments: TrainArguments) -> Callable[[int], float]:
    """The lr_scheduler part: step -> learning rate."""
    run, part = arguments.run, arguments.parts["lr_scheduler"]
    names = "learning_rate min_lr warmup_steps warmup_start_lr total_steps"
    return part.part(**{name: getattr(run, name) for name in names.split()}, **part.kwargs)


def make_loader(
    arguments: TrainArguments,
    data: Data,
    context: DistributedContext,
    schedule: Schedule,
    dataset: object,
    *,
    is_evaluation: bool,
    start_step: int = 0,
) -> MicroBatchLoader:
    """Batches of micro-batches; the same samples on every stage, pixels on the first one."""
    run = arguments.run
    return MicroBatchLoader(
        dataset,
        collate=functools.partial(data.collate, stage=context.pp_rank),
        batch_size=run.batch_size,
        micro_batch_size=run.micro_batch_size,
        accumulate_steps=1 if is_evaluation else run.accumulate_steps,
        dp_rank=context.dp_rank,
        dp_degree=context.num_replicas,
        seed=run.seed,
        num_workers=run.num_workers,
        pins=context.device.type == "cuda",
        start_step=start_step,
        shuffle=not is_evaluation,
        eval=is_evaluation,
        order=run.micro_batch_order,
        packing=run.max_token_num if run.packing and not is_evaluation else None,
        legal_counts=schedule.legal_micro_batches,
    )


def make_planner(
    arguments: TrainArguments, data: Data, topology: Topology, device: torch.device
) -> Planner:
    """The planner of this run; it measures on `device`."""
    run = arguments.run

    def loss_for(model: torch.nn.Module) -> StepLoss:
        return StepLoss(
            make_loss(arguments, model),
            num_targets=1,
            num_micro_batches=1,
            scale=1.0,
            device=device,
        )

    return Planner(
        functools.partial(
            build_part,
            arguments,
            images=data.processor,
            checkpoint_path=None,
            is_piece=True,
            **rows_option(run, data.new_tokens),
        ),
        PlannedRun(
            topology.schedule,
            num_samples=run.batch_size * run.accumulate_steps,
            micro_batch_size=run.micro_batch_size,
            shards=topology.dp_degree if run.dp_shard else 1,
            visual_gpu_ratio=run.visual_gpu_ratio,
            group_size=group_size_of(data.train),
        ),
        micro_batch_of=functools.partial(
            example_micro_batch,
            data.train,
            functools.partial(data.collate, stage=0),
            seed=run.seed,
        ),
        loss_for=loss_for,
        make_optimizer=functools.partial(make_optimizer, arguments),
        device=device,
    )
