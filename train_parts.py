"""What a training run is made of: each chosen part, called with what it wants of the options.

Knows the options and the contract of each register; train_pp.py puts the objects together.
"""

import functools
import os
from collections.abc import Callable
from typing import Literal

import torch
from torch.utils.data import Dataset, Subset

from options.run_options import RunConfig
from parse_args import TrainArguments
from stageline.data.bad_rows import BadRows, leaving_out
from stageline.data.check_batch import CheckedCollate
from stageline.data.example import example_micro_batch
from stageline.data.lengths import padding_argument
from stageline.data.loader import MicroBatchLoader
from stageline.data.preflight import check_vocabulary, preflight
from stageline.data.processor import get_pad_token_id, load_processor
from stageline.data.sampler import StepSampler
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
        self.pad_token_id = get_pad_token_id(self.processor)
        dataset = parts["dataset"]
        make = functools.partial(dataset.part, dataset_path=run.dataset_path, **dataset.kwargs)
        self.bad_rows = BadRows(run.skip_bad_rows)
        with leaving_out(self.bad_rows):
            self.train = make(split="train")
            self.test = make(split="test") if run.eval_samples else None
        if self.test is not None:
            self.test = some_rows(self.test, run.eval_samples)
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


def some_rows(dataset: Dataset, count: int | Literal["all"]) -> Dataset:
    """At most `count` rows, spread evenly over the set."""
    if count == "all":
        return dataset
    total = len(dataset)
    return Subset(dataset, [i * total // min(count, total) for i in range(min(count, total))])


def check_data(arguments: TrainArguments) -> Data:
    """Builds the datasets and refuses bad rows, images and tokenizers; loads no model."""
    run = arguments.run
    if run.logits_chunk:
        check_token_sum(arguments.parts["loss_fn"].part)
    data = Data(arguments)
    config = load_config(run.config_path or run.model_path, trust_remote_code=run.trust_remote_code)
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if vocab_size is not None:
        check_vocabulary(data.processor, vocab_size)
        data.collate = CheckedCollate(data.collate, vocab_size)
    # a collate part of another kind than sft judges its rows by itself
    if "overlong" in arguments.parts["collate_fn"].kwargs:
        data.train = check_rows(arguments, data, data.train, vocab_size)
        if data.test is not None:
            data.test = check_rows(arguments, data, data.test, vocab_size)
    report = left_over_rows(run, len(data.train))
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
    if os.environ.get("RANK", "0") == "0":
        print(report, flush=True)
    if not report.bad:
        return dataset
    bad = set(report.bad)
    return Subset(dataset, [row for row in range(len(dataset)) if row not in bad])


def left_over_rows(run: RunConfig, num_rows: int) -> str:
    """Says how many rows an epoch leaves out because steps are whole.

    Raises:
        UserError: there are too few rows for one step.
    """
    sampler = StepSampler(
        num_rows,
        step_samples=run.batch_size * run.accumulate_steps,
        dp_degree=run.dp_degree or 1,
        seed=run.seed,
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
    point: ResumePoint | None = None,
) -> list[torch.nn.Module]:
    """Calls the train_model part for each stage of this rank.

    Args:
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
            stage=stage,
            num_stages=run.num_stages,
            partition=run.partition if isinstance(run.partition, list) else None,
            checkpoint_path=weights,
            processor_path=processor,
            device=context.device,
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


def build_part(arguments: TrainArguments, **changes: object) -> torch.nn.Module:
    """Calls the train_model part with the options of the run, and `changes` of them."""
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
        **part.kwargs,
    }
    model, _, _ = part.part(**{**options, **changes})
    return model


def make_loss(arguments: TrainArguments, model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The loss_fn part; where `model` is a last stage that keeps its logits back, over chunks."""
    part = arguments.parts["loss_fn"]
    loss_fn = functools.partial(part.part, **part.kwargs)
    chunk = arguments.run.logits_chunk
    if chunk and model.is_last:
        return ChunkedLoss(loss_fn, whole=model.whole, chunk=chunk)
    return loss_fn


def make_optimizer(
    arguments: TrainArguments, parameters: dict[str, torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The optimizer part over this stage's trainable parameters; None where there are none."""
    if not parameters:
        return None
    run, part = arguments.run, arguments.parts["optimizer"]
    groups = optimizer_groups(parameters, weight_decay=run.weight_decay)
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
        functools.partial(build_part, arguments, checkpoint_path=None, is_piece=True),
        PlannedRun(
            topology.schedule,
            num_samples=run.batch_size * run.accumulate_steps,
            micro_batch_size=run.micro_batch_size,
            shards=topology.dp_degree if run.dp_shard else 1,
            visual_gpu_ratio=run.visual_gpu_ratio,
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
