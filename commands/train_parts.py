"""The components of a training run, each called with the options that it takes.

`TrainingParts` gives them to the trainer (stageline/training/trainer.py).
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from commands import say, train_data
from commands.decode_run import wire_of
from commands.stages import StageBuilder, dtype_of, family_key
from commands.train import RunPlan
from commands.train_data import Data
from options.command_line import with_new_names
from options.fields import absolute, given_options, handed_to, option_fields, spelled
from options.model import learning_rate_scales, method_arguments
from options.parts import ChosenPart, chosen_part, takes
from options.train import RunConfig, attention_arguments, check_attention_device, on_resume
from parse_args import TrainArguments, save_config
from stageline.checkpoint.resume import ResumePoint, check_same_run
from stageline.contracts import call, check_call
from stageline.data.batches.batch import MicroBatch, render_sample
from stageline.data.batches.collate_part import as_collate_part
from stageline.data.batches.loader import MicroBatchLoader, example_micro_batch
from stageline.data.batches.prompts import encode_question, prompt_of
from stageline.data.batches.sampler import group_size_of
from stageline.data.batches.step_maker import PromptMaker, read_row
from stageline.data.rows.readers import data_fingerprint
from stageline.data.text.processor import get_tokenizer, num_token_ids
from stageline.distributed.process_group import DistributedContext, wait_for_weights
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.evaluation.report import check_metric, score_answers
from stageline.inference.decoding.answer_groups import AnswerLoad, answer_cost
from stageline.inference.generation import num_positions, stop_ids_of
from stageline.model_folder import find_folder, load_config
from stageline.modules.chunked_loss import ChunkedLoss, LossByToken
from stageline.modules.lora_layer import PISSA
from stageline.modules.losses import IGNORE, next_labels, without_reference
from stageline.modules.policy_loss import with_stand_ins
from stageline.pipeline.runner import PipelineRunner
from stageline.planner.estimate import Cost, device_capacity, outline_of
from stageline.planner.planner import Planner, place_together, teacher_bytes
from stageline.seeds import host_state_kept, seed_everything
from stageline.stage import Stage
from stageline.stages.packing import check_packing
from stageline.training import part_checks, rollouts
from stageline.training.distillation import (
    OwnAnswers,
    Teacher,
    TeacherServer,
    TeacherStages,
    TeacherTable,
)
from stageline.training.loss_part import LossPart, StepLoss
from stageline.training.optimizers import optimizer_groups
from stageline.training.replicas import Replicas
from stageline.training.rewards import Reward, Rewards, try_rewards
from stageline.training.trainer import TrainerConfig
from stageline.training.turns import Episodes, MessageTokens
from stageline.verify.names import check_filled_stages

MOST_TRIED = 32  # rows that rewards are tried on


def stage_builder(config: TrainArguments, *, images: Any = None) -> StageBuilder:
    """Return what builds the stages of a run; `images`: the processor of the data."""
    run = config.run
    options = {**handed_to("train_model", run), **method_arguments(run), **attention_arguments(run)}
    return StageBuilder(
        config.parts["train_model"],
        run.config_path or run.model_path,
        run.num_stages or 1,
        checkpoint_path=run.model_path,
        partition=run.partition if isinstance(run.partition, list) else None,
        trust_remote_code=run.trust_remote_code,
        options={**options, "dtype": dtype_of(run)},
        images=images if {*run.images.tiling().values()} != {None} else None,
    )


def teacher_builder(config: TrainArguments) -> StageBuilder:
    """Return what builds the stages of the teacher, whose architecture its config.json names."""
    run, path = config.run, config.run.teacher.path
    assert path is not None
    key = family_key(path, trust_remote_code=run.trust_remote_code)
    processor = run.processor_path or run.model_path or run.config_path
    options = {"dtype": dtype_of(run), "device": run.device, "processor_path": processor}
    return StageBuilder(
        chosen_part("train_model", key),
        path,
        run.num_stages or 1,
        checkpoint_path=path,
        trust_remote_code=run.trust_remote_code,
        options={**options, **attention_arguments(run)},
    )


def check_parts(config: TrainArguments, data: Data) -> None:
    """Refuse parts that do not keep their contracts, on the first rows; loads no model."""
    parts = config.parts
    check_call("optimizer", parts["optimizer"].bound, [], **handed_to("optimizer", config.run))
    make_learning_rate(config)
    if "sim_fn" in parts:
        part_checks.check_sim_fn(parts["sim_fn"].bound)
    with host_state_kept():
        rows = range(min(2 * group_size_of(data.train), len(data.train)))
        samples = [read_row(data.train, row) for row in rows]
        collate = functools.partial(data.collate, stage=min(1, (config.run.num_stages or 1) - 1))
        encode = as_collate_part(collate).encode
        batch = collate([encode(*sample) if encode else sample for sample in samples])
    if parts["loss_fn"].facts.samples_answers:
        batch = with_stand_ins(batch)
    vocab_size = data.vocab_size or num_token_ids(data.processor)
    problem = part_checks.check_loss(bind_loss(config), batch, vocab_size=vocab_size)
    if problem is not None:
        say(problem)


def bind_loss(config: TrainArguments) -> LossPart:
    """Return the loss_fn part with its options and facts, and the sim_fn part if it takes one."""
    loss, sim_fn = config.parts["loss_fn"], config.parts.get("sim_fn")
    similar = {} if sim_fn is None else {"sim_fn": sim_fn.bound}
    handed = handed_to("loss_fn", config.run)
    given = {name: value for name, value in handed.items() if takes(loss.part, name) != "no"}
    return make_loss_part(loss, **similar, **given)


def make_loss_part(part: ChosenPart, **given: Any) -> LossPart:
    """Return a loss_fn component with its facts as the engine takes them."""
    facts = part.facts
    bound = functools.partial(part.part, **part.kwargs, **given)
    return LossPart(
        bound() if inspect.isclass(part.part) else bound,  # a class may keep a state
        counts=facts.counts,
        is_token_sum=facts.is_token_sum,
        is_cross_entropy=facts.is_cross_entropy,
        predicts_tokens=facts.predicts_tokens,
        weighs_by_itself=facts.weighs_by_itself,
        needs_reference=train_data.asks_for(part, facts.needs_reference),
        needs_kl=train_data.asks_for(part, facts.needs_kl),
    )


def make_loss(config: TrainArguments, model: Stage) -> LossPart:
    """Return the loss_fn part; with --logits-chunk over chunks of the hidden states of `model`.

    Logits stay whole, at the default of that option, where the loss or the head needs them so.
    """
    loss, facts = bind_loss(config), config.parts["loss_fn"].facts
    if not model.is_last:
        return loss
    chunk, is_given = getattr(model, "logits_chunk", 0), "logits_chunk" in given_options(config.run)
    if not chunk and config.run.logits_chunk and is_given:
        raise UserError(
            f"the head of {type(model).__name__} can't run over a few tokens. Drop `logits_chunk`."
        )
    if chunk and (facts.reads_by_token or facts.is_token_sum):
        if not is_given:  # 32 MiB of float32: with a small vocabulary the head runs once
            size = model.config.get_text_config().vocab_size
            chunk = vars(model)["logits_chunk"] = max(chunk, 2**23 // size)
        kind = LossByToken if facts.reads_by_token else ChunkedLoss
        return loss.over(kind(loss.loss_fn, whole=model.whole, chunk=chunk))
    if chunk:
        vars(model)["logits_chunk"] = 0
    return loss


def make_optimizer(
    config: TrainArguments,
    parameters: dict[str, torch.nn.Parameter],
    *,
    part_of: Callable[[str], str | None] = lambda name: None,
) -> torch.optim.Optimizer | None:
    """Return the optimizer over trainable parameters; None where there are none.

    `part_of` gives the part of the model that a parameter is of, which may have its own rate.
    """
    if not parameters:
        return None
    run, part = config.run, config.parts["optimizer"]
    scales = learning_rate_scales(run)
    groups = optimizer_groups(
        parameters,
        weight_decay=run.weight_decay,
        lr_scale_of=lambda name: scales.get(part_of(name) or "", 1.0),
    )
    optimizer = call("optimizer", part.bound, groups, **handed_to("optimizer", run))
    part_checks.check_optimizer(optimizer, parameters, part=part.part)
    return optimizer


def make_learning_rate(config: TrainArguments) -> Callable[[int], float]:
    """Return the lr_scheduler part: step -> learning rate."""
    run, part = config.run, config.parts["lr_scheduler"]
    rate_of = call("lr_scheduler", part.bound, **handed_to("lr_scheduler", run))
    part_checks.check_learning_rate(rate_of, part=part.part)
    return rate_of


def make_planner(config: RunPlan, data: Data, device: torch.device) -> Planner:
    """Return the planner of this run; it measures on `device`."""
    run, topology, answers_of, teacher = config.run, config.topology, None, None
    if config.parts["loss_fn"].facts.samples_answers:
        answers_of = functools.partial(weigh_answers, run, topology.schedule.num_ranks)

    def loss_for(model: Stage) -> StepLoss:
        return StepLoss(
            make_loss(config, model), num_targets=1, num_micro_batches=1, scale=1.0, device=device
        )

    def micro_batch_of(num_rows: int) -> MicroBatch:
        collate = functools.partial(data.collate, stage=0)
        batch = example_micro_batch(data.train, collate, num_rows, seed=run.seed)
        return with_stand_ins(without_reference(batch))

    if config.parts["loss_fn"].facts.needs_teacher:
        own, half = run.teacher, run.precision != "fp32"
        labels_BT = next_labels(micro_batch_of(run.micro_batch_size))
        num_targets = int((labels_BT != IGNORE).sum()) * run.num_micro_batches
        width = 12 * own.top_k or (0 if own.table else (data.vocab_size or 0) * (2 if half else 4))
        costs = None
        if own.path:
            build = teacher_builder(config).build
            costs = outline_of(functools.partial(build, checkpoint_path=None, is_piece=True))
        teacher = teacher_bytes(costs, num_targets * width)

    return Planner(
        functools.partial(
            stage_builder(config, images=data.processor).build,
            checkpoint_path=None,
            is_piece=True,
            **train_data.rows_option(run, data.new_tokens),
        ),
        topology.schedule,
        num_samples=run.batch_size * run.accumulate_steps,
        micro_batch_size=run.micro_batch_size,
        shards=topology.dp_degree if run.dp_shard else 1,
        visual_gpu_ratio=run.visual_gpu_ratio,
        group_size=group_size_of(data.train),
        answers_of=answers_of,
        teacher=teacher,
        micro_batch_of=micro_batch_of,
        loss_for=loss_for,
        make_optimizer=functools.partial(make_optimizer, config),
        device=device,
    )


def trainer_config(run: RunConfig) -> TrainerConfig:
    """Return the settings that the trainer reads."""
    given = {**vars(run), **vars(run.bad_steps), **vars(run.early_stop), "precision": run.precision}
    given |= {"stop_metric": run.early_stop.metric, "stop_delta": run.early_stop.delta}
    names = [item.name for item in dataclasses.fields(TrainerConfig)]
    return TrainerConfig(**{name: given[name] for name in names})


@dataclasses.dataclass(eq=False)
class TrainingParts:
    """Components of a run, for the trainer."""

    config: RunPlan
    data: Data
    context: DistributedContext
    make_runner: Callable[[Sequence[Stage]], Any]
    _: dataclasses.KW_ONLY
    places_layers: bool

    def __post_init__(self) -> None:
        config, schedule = self.config, self.config.topology.schedule
        self.stages_here = list(schedule.stages_of(self.context.pp_rank))
        self.make_loss: Callable[[Stage], LossPart] = functools.partial(make_loss, config)
        self.make_optimizer: Callable[..., Any] = functools.partial(make_optimizer, config)
        self.make_learning_rate: Callable[[], Any] = functools.partial(make_learning_rate, config)
        self.lr_scales: Mapping[str, float] = learning_rate_scales(config.run)
        self.samples_answers = bool(config.parts["loss_fn"].facts.samples_answers)

    def summary(self) -> dict[str, str]:
        """Return label -> text of the lines that begin the log of a run."""
        run, parts, schedule = self.config.run, self.config.parts, self.config.topology.schedule
        replicas, size = run.dp_degree or 1, run.micro_batch_size
        samples = run.batch_size * run.accumulate_steps * replicas
        turns = run.total_steps * samples / max(len(self.data.train), 1)
        epochs = "" if self.samples_answers else f", {turns:.3g} epochs"
        steps = {"steps": f"{run.total_steps:,} of {samples} samples{epochs}"}
        teacher = {}
        if parts["loss_fn"].facts.needs_teacher:
            own, kept = run.teacher, "all tokens"
            if own.top_k or own.table:
                count = f"{own.top_k} " if own.top_k else ""
                kept = f"the {count}likeliest tokens, the rest lumped into one"
            teacher["teacher"] = f"{own.path or own.url or own.table}, {kept}"
        return {
            "run folder": f"{Path(run.output_dir).absolute()} (run.log, log.jsonl, config.yaml)",
            "parallelism": f"{schedule.num_stages} stages on {schedule.num_ranks} ranks, "
            f"{replicas} x data, {schedule.name}, {run.num_micro_batches} micro-batches of {size}",
            **(steps if run.num_train_epochs is None else {}),  # `settle_steps` counted them
            "optimizer": f"{parts['optimizer'].key}, {run.precision}, lr {run.learning_rate:g}, "
            f"{parts['lr_scheduler'].key}, {run.warmup_steps} warm-up steps",
            **teacher,
            "checkpoints": f"--save-steps {run.save_steps}, --save-best {run.save_best}",
        }

    def settings(self) -> dict[str, object]:
        """Return what decides the course of training; saved with a checkpoint, compared later."""
        run = self.config.run
        return {
            **self.config.as_config(),
            "samples of a step": run.batch_size * run.accumulate_steps * (run.dp_degree or 1),
            "training samples": len(self.data.train),
            "training data": data_fingerprint(self.data.train),
            **train_data.read_anew(self.config, self.data),
        }

    def check_same_run(self, point: ResumePoint) -> None:
        """Refuse to resume a checkpoint of a run with other settings."""
        config, now = self.config, self.settings()
        saved = with_new_names(point.state.facts["settings"])
        is_longer, why = rates_stay(config, saved, point.step)
        free = {"free", "length"} if is_longer else {"free"}
        # the same passes in the same order, to the bit
        is_alike = {saved.get("engine"), now["engine"]} <= {"pipeline", "torch"}
        # whole weights need a base only for a reference model; one at random has no files
        needs_start = bool(self.samples_answers and config.run.rollouts.kl_beta)
        has_start = bool(config.run.model_path and saved.get("model-path"))
        has_start = has_start and (needs_start or point.base is not None)
        check_same_run(
            {**newer_options(config.run, now), **saved},
            now,
            may_change=lambda name: (
                on_resume(name, config.parts) in free
                or (name == train_data.START and not has_start)
                or (name == "engine" and is_alike)
            ),
            allows_changes=config.run.allow_changes,
            say=say,
            why=why,
        )

    def build_stages(self, point: ResumePoint | None) -> list[Stage]:
        """Place the layers, check the split, then call the train_model component for each stage.

        Trained parameters of a checkpoint with an adapter are loaded later, its base here.
        """
        run, data, context = self.config.run, self.data, self.context
        if self.places_layers and not run.vision_stages:  # the planner has the tower on stage 0
            device, local_ranks = context.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            capacity = device_capacity(device, num_local_ranks=local_ranks, gib=run.device_memory)
            planner = functools.partial(make_planner, self.config, data, device)
            partition = place_together(planner, run.partition, capacity=capacity)
            if partition is not None and run.partition in ("parameters", "measured"):
                run = dataclasses.replace(run, partition=partition)
                self.config = dataclasses.replace(self.config, run=run)
        is_packed = run.packing or getattr(data.train, "packed", None) is not None
        stage_builder(self.config).verify(
            run.prove_split,
            say=say,
            answers=self.samples_answers or run.teacher.lmbda > 0,
            packed_rows=run.micro_batch_size if is_packed else 0,
        )
        seed_everything(run.seed)
        check_attention_device(run, context.devices[0].type)

        weights, processor, is_whole = run.model_path, run.processor_path, False
        if point is not None:
            is_whole = point.base is None
            weights = str(point.folder) if is_whole else run.model_path or point.base
            processor = processor or run.model_path or run.config_path
        ranks = Ranks.of(context.pp_group)
        builder = stage_builder(self.config, images=data.processor)
        is_known = builder.check_names(self.stages_here, ranks=ranks, checkpoint=weights)
        source: dict[str, Any] = {"weights": weights, "processor": processor, "is_whole": is_whole}
        stages = [self._build_stage(stage, point, **source) for stage in self.stages_here]
        wait_for_weights(weights)
        if not is_known:
            check_filled_stages(stages, ranks=ranks, checkpoint=weights)
        for stage in stages:
            if point is not None and not is_whole:
                stage.loaded_from = getattr(stage, "loaded_from", None) or point.base
            if stage.stage == 0 and getattr(stage, "cast_note", None):
                say(f"{run.model_path}: {stage.cast_note}")
            if is_packed and not getattr(stage, "is_tower", False):  # no row crosses a tower
                check_packing(stage, rows=run.micro_batch_size, device=context.device)
        return stages

    def make_loader(
        self, dataset: Any, runner: PipelineRunner, replicas: Replicas | None = None, **place: Any
    ) -> Any:
        """Return the batches of a dataset; `place`: is_evaluation, start_step, position."""
        run = self.config.run
        if self.samples_answers:
            return self._prompts(dataset, **place)
        if replicas is not None and run.teacher.lmbda:  # the stages answer a share of the rows
            return OwnAnswers(
                self._stage_answers(runner),
                rollout_options(run),
                prompts=self._prompts(dataset, **place),
                collate=functools.partial(self.data.collate, stage=self.context.pp_rank),
                share=run.teacher.lmbda,
                max_token_num=run.max_token_num,
                replicas=replicas,
                start_step=place["start_step"],
            )
        place["facts"] = host_facts(runner)
        return train_data.make_loader(
            self.config, self.data, self.context, runner.schedule, dataset, **place
        )

    def make_rollouts(
        self, runner: PipelineRunner, replicas: Replicas, point: ResumePoint | None
    ) -> rollouts.Rollouts | None:
        """Return the answers of training; None: the loss draws none."""
        if not self.samples_answers:
            return None
        run, data = self.config.run, self.data

        def start_stage(stage: int) -> Stage:
            """Build a stage as this run's first start filled it, from `model_path` or at random."""
            with host_state_kept():
                made = self._build_stage(stage, point, weights=run.model_path)
            wait_for_weights(run.model_path)
            return made

        start_step = point.step if point else 0
        facts: Mapping[str, Any] = point.state.facts if point else {}
        prompts = self._prompts(
            data.train,
            is_evaluation=False,
            start_step=start_step // run.rollouts.inner_steps,
            position=facts.get("position"),
        )
        samples = None
        if self.context.is_main and run.rollouts.keep_samples:
            samples = rollouts.SampleFile(Path(run.output_dir).absolute(), start_step=start_step)
        answers, environment = self._stage_answers(runner), None
        if (chosen := self.config.parts.get("environment")) is not None:
            environment = Episodes(
                answers,
                chosen.bound,
                message_tokens(data, answers.groups.stop_ids),
                shared=answers.shared,
                max_turns=run.rollouts.max_turns,
            )
        return rollouts.Rollouts(
            answers,
            make_rewards(self.config),
            rollout_options(run),
            prompts=prompts,
            collate=functools.partial(data.collate, stage=self.context.pp_rank),
            replicas=replicas,
            start_step=start_step,
            end_step=run.total_steps,
            saved=facts,
            start_stage=start_stage,
            on_samples=samples,
            episodes=environment,
        )

    def make_completions(
        self, runner: PipelineRunner, replicas: Replicas, start_step: int
    ) -> rollouts.Completions | None:
        """Return what answers and scores held-out rows at each evaluation; None: none is."""
        run, data, rows = self.config.run, self.data, []
        if not run.eval_completions:
            return None
        assert data.test is not None
        for row in range(min(run.eval_completions, len(data.test))):
            images, sample = read_row(data.test, row)
            if (chosen := sample.get("chosen")) is not None:  # the right answer of a pair
                text = chosen if isinstance(chosen, str) else chosen[-1]["content"]
                sample = {"answer": text, **sample}
            rows.append((images, sample))
        given = {**data.texts, "processor": data.processor, "pad_token_id": data.pad_token_id}
        with host_state_kept():
            prompts = [encode_question(*row, **given) for row in rows]
        metric, samples = self.config.parts["metric"], None
        if self.context.is_main:
            check_metric(metric.bound, [sample for _, sample in rows[:2]])
            samples = rollouts.SampleFile(Path(run.output_dir).absolute(), start_step=start_step)
        return rollouts.Completions(
            self._stage_answers(runner),
            prompts,
            functools.partial(score_answers, metric.key, metric.bound),
            replicas,
            max_new_tokens=run.eval_max_new_tokens,
            lot_size=run.batch_size,
            on_samples=samples,
        )

    def _prompts(self, dataset: Any, *, is_evaluation: bool, **place: Any) -> MicroBatchLoader:
        """Return the loader of encoded prompts; its steps are the times that answers are drawn."""
        run, size = self.config.run, group_size_of(dataset)
        count = run.batch_size if is_evaluation else run.batch_size * run.accumulate_steps
        num_prompts = count // train_data.answers_of(self.config)
        return MicroBatchLoader(
            dataset,
            **train_data.shared_loading(run, self.data, self.context, is_evaluation=is_evaluation),
            batch_size=max(num_prompts // size, 1) * size,
            micro_batch_size=size,
            order="given",
            maker=PromptMaker,
            **place,
        )

    def _stage_answers(self, runner: PipelineRunner) -> rollouts.StageAnswers:
        run, data = self.config.run, self.data
        model_config = load_config(run.config_folder, trust_remote_code=run.trust_remote_code)
        return rollouts.StageAnswers(
            runner,
            wire_of(self.context),
            processor=data.processor,
            pad_token_id=data.pad_token_id,
            stop_ids=stop_ids_of(find_folder(run.config_folder), model_config, data.processor),
            positions=num_positions(model_config),
        )

    def make_teacher(self, runner: PipelineRunner) -> Teacher | None:
        """Return what adds the teacher's distributions to micro-batches; None: no loss asks."""
        run, own, rows = self.config.run, self.config.run.teacher, self.data.train
        if not self.config.parts["loss_fn"].facts.needs_teacher:
            return None
        if own.url:
            return Teacher(runner, TeacherServer(runner, own.url, top_k=own.top_k, model=own.model))
        if own.table:
            numbers = rows.indices if isinstance(rows, Subset) else None
            return Teacher(runner, TeacherTable(runner, own.table, rows=numbers))
        builder = teacher_builder(self.config)
        builder.verify(run.prove_split, say=say)
        ranks, device = Ranks.of(self.context.pp_group), self.context.device
        builder.check_names(self.stages_here, ranks=ranks, checkpoint=own.path)
        with host_state_kept():
            stages = [builder.build(stage, device=device) for stage in self.stages_here]
        for stage in stages:
            stage.requires_grad_(False)
        wait_for_weights(own.path)
        return Teacher(runner, TeacherStages(self.make_runner(stages), top_k=own.top_k))

    def _build_stage(
        self,
        stage: int,
        point: ResumePoint | None,
        *,
        weights: str | Path | None,
        processor: str | None = None,
        is_whole: bool = False,
    ) -> Any:
        run = self.config.run
        given = train_data.rows_option(run, self.data.new_tokens, is_known=is_whole)
        if point is not None and point.base is not None and run.lora.init.startswith(PISSA):
            given["lora_taken_from"] = str(point.folder)  # PiSSA took these out of the weights
        return stage_builder(self.config, images=self.data.processor).build(
            stage,
            checkpoint_path=weights,
            processor_path=processor or run.processor_path,
            device=self.context.device,
            **given,
        )

    def reference_key(self, dataset: Any) -> str:
        """Return a hash of all that the reference log-probabilities of a dataset depend on."""
        run = self.config.run
        told = {
            name: value
            for name, value in self.config.as_config().items()
            if on_resume(name, self.config.parts) == "course"
        }
        words = (data_fingerprint(dataset), train_data.start_weights(run), run.max_token_num)
        return hashlib.sha256(json.dumps([told, words], default=str).encode()).hexdigest()

    def save_config(self, folder: Path) -> None:
        """Write the settled options and the rows that are left out."""
        save_config(self.config, folder / "config.yaml")
        self.data.bad_rows.write(folder / "bad_rows.jsonl")

    def make_tracker(self, folder: Path, start_step: int) -> object | None:
        """Return the tracker part, which starts to follow the run."""
        given = {"folder": folder, "config": self.config.as_config(), "start_step": start_step}
        return call("tracker", self.config.parts["tracker"].bound, **given)


def rollout_options(run: RunConfig) -> rollouts.RolloutOptions:
    """Return the options of drawing and using answers."""
    names = {item.name for item in dataclasses.fields(rollouts.RolloutOptions)}
    return rollouts.RolloutOptions(
        **{name: value for name, value in vars(run.rollouts).items() if name in names},
        seed=run.seed,
        reference=run.reference,
        micro_batch_size=run.micro_batch_size,
        is_sorted=run.rows.order == "sorted",
        row_capacity=run.max_token_num if run.packing else None,
    )


def host_facts(runner: PipelineRunner) -> Callable[[Any], Any] | None:
    """Return what the stages need of each micro-batch on the host; None for a custom stage."""
    return getattr(runner.local.models[0], "host_facts", None)


def newer_options(run: RunConfig, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is newer than a checkpoint: options had their defaults, files are believed."""
    named = {spelled(item.name)[2:]: item for item in option_fields(run).values()}
    options = {name: absolute(item, item.default) for name, item in named.items() if name in now}
    return {**options, **{name: now[name] for name in train_data.READ_ANEW if name in now}}


def rates_stay(config: TrainArguments, saved: Mapping[str, Any], step: int) -> tuple[bool, str]:
    """Return whether `step` past steps had the learning rates of this run, and why not.

    Then a run of another length is, to the bit, the one that had this length from the start.
    """
    run = config.run
    names = ("total_steps", "warmup_steps")
    then: dict[str, Any] = {name: saved.get(spelled(name)[2:]) for name in names}
    now = {name: getattr(run, name) for name in names}
    if then == now or None in then.values():
        return then == now, ""
    if run.total_steps < step:
        return False, f" The run would end at step {run.total_steps}, and {step} are done."
    before = dataclasses.replace(config, run=dataclasses.replace(run, **then))
    earlier, current = make_learning_rate(before), make_learning_rate(config)
    for done in range(step):
        if earlier(done) != current(done):
            return False, (
                f" The finished step {done + 1} would have had the learning rate "
                f"{current(done):g}, not {earlier(done):g}; --lr-scheduler constant may be longer."
            )
    return True, ""


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


def make_rewards(config: TrainArguments) -> Rewards:
    """Return the reward parts with their weights."""
    run, chosen = config.run, config.parts["reward"].part
    weights = run.rollouts.reward_weights or [1.0] * len(chosen)
    parts = [
        Reward(one.key, one.bound, weight, one.facts.takes_lots, one.facts.is_dear)
        for one, weight in zip(chosen, weights, strict=True)
    ]
    return Rewards(parts, timeout=run.rollouts.reward_timeout)


def message_tokens(data: Data, end_ids: Sequence[int]) -> MessageTokens:
    """Return what makes tokens of an environment's messages, by the template of the run."""
    text_of: Callable[..., Any] = functools.partial(
        render_sample, processor=data.processor, for_generation=True, **data.texts
    )

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        return text_of(None, {"messages": list(messages)}).text

    is_chat = text_of(*read_row(data.train, 0)).is_chat
    return MessageTokens(get_tokenizer(data.processor), render if is_chat else None, end_ids)


def check_rewards(config: TrainArguments, data: Data) -> None:
    """Print what the rewards give for the first training rows, and how long the prompts are."""
    run, size = config.run, group_size_of(data.train)
    tokenizer = get_tokenizer(data.processor)
    count = min(len(data.train), max(1, MOST_TRIED // size) * size)
    with host_state_kept():
        items = [read_row(data.train, row) for row in range(count)]
        prompts = [prompt_of(data.encode(*item)).input_ids for item in items]
    told = try_rewards(
        make_rewards(config),
        [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts],
        [sample for _, sample in items],
        num_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
    )
    say(
        f"the first {count} prompts have at most {max(map(len, prompts))} tokens; with "
        f"--rollouts.max_completion_length {run.rollouts.max_completion_length} a row may have "
        f"--max-token-num {run.max_token_num}\n" + "\n".join(told)
    )
