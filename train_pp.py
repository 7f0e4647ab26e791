"""Trains a hand-split model, its stages on several processes; every part is chosen by its key.

`python train_pp.py --num-stages 2 ...` starts its own processes; under torchrun it joins them.
`--help` lists the options, `--list` the parts.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset
from transformers import AutoConfig

from parse_args import TrainArguments, parse_train_args, save_config
from register import engine_register, freeze_registers, import_shelf
from stageline.checkpoint.save import save_split_model
from stageline.data.loader import MicroBatchLoader
from stageline.data.preflight import check_vocabulary, preflight
from stageline.data.processor import get_pad_token_id, load_processor
from stageline.distributed.failure import name_stages, run_entry
from stageline.distributed.interrupt import stop_requested
from stageline.distributed.launch import launch_if_needed
from stageline.distributed.process_group import DistributedContext, distributed_context
from stageline.distributed.seeds import replica_seed, seed_everything
from stageline.errors import UserError
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.topology import Topology, resolve_topology
from stageline.training.evaluation import evaluate
from stageline.training.optimizer_groups import optimizer_groups
from stageline.training.precision import LossScaler
from stageline.training.replicas import Replicas
from stageline.training.report import RunReport, summarize_stage
from stageline.training.sharding import ShardedReplicas
from stageline.training.step import TrainStep
from stageline.training.trainer import Trainer, TrainOptions

SHELF = ("pp_models", "prompt", "prompt_fn", "dataset", "loss_fn", "optimizer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_train_args()
    freeze_registers()
    topology = check_topology(arguments)
    launch_if_needed(topology.num_processes)
    data = check_data(arguments)
    if arguments.run.check_only:
        return 0
    return arguments.parts["engine"].part(arguments, data)


def check_topology(arguments: TrainArguments) -> Topology:
    """Stages, ranks and replicas of the run; refuses what the schedule cannot do.

    What was left open is filled in, so that the saved config says it.
    """
    run = arguments.run
    world_size = os.environ.get("WORLD_SIZE")
    topology = resolve_topology(
        schedule=run.schedule,
        num_stages=run.num_stages,
        stages_per_rank=run.stages_per_rank,
        dp_degree=run.dp_degree,
        world_size=int(world_size) if world_size else None,
    )
    topology.schedule.check(run.num_micro_batches)
    if run.dp_shard and topology.dp_degree == 1:
        raise UserError(
            "--dp-shard came with one replica, two or more were expected: replicas share the "
            "weights out among them. Add --dp-degree 2, or leave --dp-shard out."
        )
    run.num_stages = topology.num_stages
    run.stages_per_rank = topology.num_stages // topology.num_ranks
    run.dp_degree = topology.dp_degree
    return topology


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
        self.train = make(split="train")
        self.test = some_rows(make(split="test"), run.eval_samples) if run.eval_samples else None
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
            **collate.kwargs,
        )


def some_rows(dataset: Dataset, count: int) -> Dataset:
    """At most `count` rows, spread evenly over the set."""
    total = len(dataset)
    return Subset(dataset, [i * total // min(count, total) for i in range(min(count, total))])


def check_data(arguments: TrainArguments) -> Data:
    """Builds the datasets and refuses bad rows, images and tokenizers; loads no model."""
    run = arguments.run
    data = Data(arguments)
    config = AutoConfig.from_pretrained(
        run.config_path or run.model_path, trust_remote_code=run.trust_remote_code
    )
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if vocab_size is not None:
        check_vocabulary(data.processor, vocab_size)
    # a collate part of another kind than sft judges its rows by itself
    if "overlong" not in arguments.parts["collate_fn"].kwargs:
        return data
    for dataset in [data.train] + ([data.test] if data.test is not None else []):
        report = preflight(
            dataset,
            **data.texts,
            processor=data.processor,
            max_token_num=run.max_token_num,
            overlong=arguments.parts["collate_fn"].kwargs["overlong"],
            seed=run.seed,
        )
        if os.environ.get("RANK", "0") == "0":
            print(report, flush=True)
    return data


@engine_register("pipeline")
def pipeline(arguments: TrainArguments, data: Data) -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    topology = check_topology(arguments)
    with distributed_context(num_ranks=topology.num_ranks, device=arguments.run.device) as context:
        name_stages(topology.schedule.stages_of(context.pp_rank))
        train(arguments, data, context, topology.schedule)
    return 0


def train(
    arguments: TrainArguments, data: Data, context: DistributedContext, schedule: Schedule
) -> None:
    """Builds this rank's stages and runs the loop."""
    run, parts = arguments.run, arguments.parts
    seed_everything(replica_seed(run.seed, context.dp_rank))
    models = [
        build_stage(arguments, context, stage) for stage in schedule.stages_of(context.pp_rank)
    ]
    summaries = [summarize_stage(model, context) for model in models]
    replicas = join_replicas(arguments, context, models)
    runner = PipelineRunner(
        models, device=context.device, group=context.pp_group, schedule=schedule
    )
    loss_fn = functools.partial(parts["loss_fn"].part, **parts["loss_fn"].kwargs)
    train_step = TrainStep(
        runner,
        make_optimizer=functools.partial(make_optimizer, arguments),
        loss_fn=loss_fn,
        learning_rate=make_learning_rate(arguments),
        max_grad_norm=run.max_grad_norm,
        scaler=LossScaler(enabled=run.fp16),
        replicas=replicas,
    )
    folder = Path(run.output_dir)
    if context.is_main:
        save_config(arguments, folder / "config.yaml")
    report = RunReport(
        folder, context=context, total_steps=run.total_steps, log_steps=run.log_steps
    )
    with report:
        report.show_plan(summaries)
        loader = functools.partial(make_loader, arguments, data, context)
        held_out = loader(data.test, is_evaluation=True) if data.test is not None else None

        def evaluate_now(step: int) -> None:
            result = evaluate(
                runner, held_out, loss_fn=loss_fn, keep=report.num_pictures, replicas=replicas
            )
            report.evaluated(step, result, dataset=data.test, processor=data.processor)

        def save_now(step: int) -> None:
            target = folder / "checkpoints" / f"step-{step:08d}"
            groups = {"group": context.pp_group, "replicas": context.dp_group}
            save_split_model(models, data.processor, target, step=step, **groups)
            report.say(f"saved {target}")

        trainer = Trainer(
            train_step,
            batches=iter(loader(data.train, is_evaluation=False)),
            options=TrainOptions(run.total_steps, run.eval_steps, run.save_steps),
            on_step=report.stepped,
            evaluate=evaluate_now if held_out is not None else None,
            save=save_now,
            stop_requested=stop_requested,
        )
        stop_requested()  # from here on Ctrl-C ends the run after a step, with a checkpoint
        if not trainer.run():
            report.say("stopped before the last step; the checkpoint holds the weights")


def build_stage(
    arguments: TrainArguments, context: DistributedContext, stage: int
) -> torch.nn.Module:
    """Calls the train_model part for one stage of this rank."""
    run, part = arguments.run, arguments.parts["train_model"]
    names = (
        "frozen_vit frozen_mlp frozen_llm frozen_lm_head vit_lora_num mlp_lora_num llm_lora_num "
        "lora_rank lora_alpha lora_dropout lora_target visual_gpu_ratio seed "
        "gradient_checkpointing trust_remote_code"
    )
    model, _, _ = part.part(
        config_path=run.config_path,
        processor_path=run.processor_path,
        checkpoint_path=run.model_path,
        stage=stage,
        num_stages=run.num_stages,
        partition=None if run.partition == "uniform" else run.partition,
        dtype=DTYPES[run.precision],
        device=context.device,
        **{name: getattr(run, name) for name in names.split()},
        **part.kwargs,
    )
    return model


def join_replicas(
    arguments: TrainArguments, context: DistributedContext, models: list[torch.nn.Module]
) -> Replicas:
    """Checks that all replicas start alike and, if asked to, shares their weights out."""
    replicas = Replicas(context.dp_group, device=context.device)
    replicas.check_equal(models)
    if arguments.run.dp_shard:
        return ShardedReplicas(models, mesh=context.mesh["dp"], device=context.device)
    return replicas


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
    dataset: object,
    *,
    is_evaluation: bool,
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
        shuffle=not is_evaluation,
        eval=is_evaluation,
    )


if __name__ == "__main__":
    run_entry(main)
