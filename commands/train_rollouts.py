"""The prompts, rewards and decoding of a run whose stages answer before each step (GRPO).

The engine's part is stageline/training/rollouts.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commands import say
from commands.train_data import Data, answers_of
from options.train import RunConfig
from parse_args import TrainArguments
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.batches.prompts import prompt_of
from stageline.data.batches.sampler import group_size_of
from stageline.data.batches.step_maker import PromptMaker, read_row
from stageline.data.text.processor import get_tokenizer
from stageline.distributed.process_group import DistributedContext
from stageline.inference.decoding.answer_groups import AnswerLoad, answer_cost
from stageline.inference.decoding.chain import make_wire
from stageline.inference.generation import stop_ids_of
from stageline.model_folder import find_folder, load_config, num_positions
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.estimate import Cost
from stageline.seeds import host_state_kept
from stageline.stage import Stage
from stageline.training.answers import StageAnswers
from stageline.training.replicas import Replicas
from stageline.training.resume import ResumePoint
from stageline.training.rewards import Reward, Rewards, try_rewards
from stageline.training.rollouts import RolloutOptions, Rollouts
from stageline.training.samples import SampleFile

MOST_TRIED = 32  # rows that rewards are tried on


def make_prompts(
    arguments: TrainArguments,
    data: Data,
    context: DistributedContext,
    dataset: Any,
    *,
    is_evaluation: bool,
    start_step: int = 0,
    position: object = None,
) -> MicroBatchLoader:
    """Return the loader of encoded prompts; its steps are the times that answers are drawn."""
    run, size = arguments.run, group_size_of(dataset)
    count = run.batch_size if is_evaluation else run.batch_size * run.accumulate_steps
    num_prompts = count // answers_of(arguments)
    return MicroBatchLoader(
        dataset,
        collate=functools.partial(data.collate, stage=context.pp_rank),
        batch_size=max(num_prompts // size, 1) * size,
        micro_batch_size=size,
        dp_rank=context.dp_rank,
        dp_degree=context.num_replicas,
        seed=run.seed,
        num_workers=run.num_workers,
        start_step=start_step,
        position=position,
        shuffle=not is_evaluation,
        eval=is_evaluation,
        pads=run.rows.last == "pad",
        order="given",
        maker=PromptMaker,
    )


def make_rollouts(
    arguments: TrainArguments,
    data: Data,
    context: DistributedContext,
    runner: PipelineRunner,
    replicas: Replicas,
    *,
    point: ResumePoint | None,
    start_stage: Callable[[int], Stage],
) -> Rollouts:
    """Return what gives the micro-batches of each step; all ranks call this together."""
    run = arguments.run
    start_step = point.step if point else 0
    facts: Mapping[str, Any] = point.state.facts if point else {}
    prompts = make_prompts(
        arguments,
        data,
        context,
        data.train,
        is_evaluation=False,
        start_step=start_step // run.rollouts.inner_steps,
        position=facts.get("position"),
    )
    samples = None
    if context.is_main and run.rollouts.keep_samples:
        samples = SampleFile(Path(run.output_dir).absolute(), start_step=start_step)
    wire = None
    if context.num_ranks > 1:
        wire = make_wire(
            context.rank,
            num_stages=context.num_ranks,
            num_replicas=context.num_replicas,
            device=context.device,
        )
    names = {item.name for item in dataclasses.fields(RolloutOptions)}
    options = RolloutOptions(
        **{name: value for name, value in vars(run.rollouts).items() if name in names},
        seed=run.seed,
        reference=run.reference,
        micro_batch_size=run.micro_batch_size,
        is_sorted=run.rows.order == "sorted",
        row_capacity=run.max_token_num if run.packing else None,
    )
    config = load_config(run.config_folder, trust_remote_code=run.trust_remote_code)
    answers = StageAnswers(
        runner,
        wire,
        processor=data.processor,
        pad_token_id=data.pad_token_id,
        stop_ids=stop_ids_of(find_folder(run.config_folder), config, data.processor),
        positions=num_positions(config),
    )
    return Rollouts(
        answers,
        make_rewards(arguments),
        options,
        prompts=prompts,
        collate=functools.partial(data.collate, stage=context.pp_rank),
        replicas=replicas,
        facts=getattr(runner.local.models[0], "host_facts", None),
        start_step=start_step,
        end_step=run.total_steps,
        saved=facts.get("answers"),
        start_stage=start_stage,
        saved_start=facts.get("start"),
        begun_as=facts.get("reference"),
        on_samples=samples,
    )


def weigh_answers(run: RunConfig, num_ranks: int, row_tokens: int) -> Callable[[Stage], Cost]:
    """Return the memory estimate of the answers that a pipeline draws.

    `row_tokens` is of the longest row, with a stand-in for the longest answer.
    """
    answer_tokens = min(run.rollouts.max_completion_length, row_tokens - 1)
    step = AnswerLoad(
        num_prompts=run.batch_size * run.accumulate_steps // run.rollouts.group_size,
        copies=run.rollouts.group_size,
        lot_size=run.rollouts.prompts_together,
        lots_at_once=num_ranks,
        prompt_tokens=row_tokens - answer_tokens,
        answer_tokens=answer_tokens,
    )
    held_out = dataclasses.replace(
        step,
        num_prompts=max(1, run.batch_size // run.rollouts.group_size),
        copies=1,
        lot_size=run.rollouts.prompts_together * run.rollouts.group_size,
    )
    loads = [step, held_out] if run.eval_samples else [step]
    return functools.partial(answer_cost, loads=loads)


def make_rewards(arguments: TrainArguments) -> Rewards:
    """Return the reward parts with their weights."""
    run, chosen = arguments.run, arguments.parts["reward"].part
    weights = run.rollouts.reward_weights or [1.0] * len(chosen)
    parts = [
        Reward(one.key, one.bound, weight, **one.facts)
        for one, weight in zip(chosen, weights, strict=True)
    ]
    return Rewards(parts, timeout=run.rollouts.reward_timeout)


def check_rewards(arguments: TrainArguments, data: Data) -> None:
    """Print what the rewards give for the first training rows, and how long the prompts are."""
    run, size = arguments.run, group_size_of(data.train)
    tokenizer = get_tokenizer(data.processor)
    count = min(len(data.train), max(1, MOST_TRIED // size) * size)
    with host_state_kept():
        items = [read_row(data.train, row) for row in range(count)]
        prompts = [prompt_of(data.encode(*item)).input_ids for item in items]
    told = try_rewards(
        make_rewards(arguments),
        [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts],
        [sample for _, sample in items],
        num_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    say(
        f"the first {count} prompts have at most {max(map(len, prompts))} tokens; with "
        f"--rollouts.max_completion_length {run.rollouts.max_completion_length} a row may have "
        "--max-token-num "
        f"{run.max_token_num}\n" + "\n".join(told)
    )
