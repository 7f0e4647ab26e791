"""One training run: the constructor builds it in reading order, `train` is the loop over steps.

What a run is made of comes from commands/train_parts.py. Streaming, GRPO and preference training
enter at two seams: `make_batch` (a loader, or answers that the stages draw) and
`TrainStep.run_passes` (the runner, and what `prepare` adds to the micro-batches).
"""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from stageline import progress
from stageline.checkpoint.resume import claim_run_folder, find_resume_point
from stageline.checkpoint.save import save_split_model
from stageline.checkpoint.writer import CheckpointWriter, set_aside, step_name
from stageline.data.rows.readers import data_fingerprint
from stageline.distributed.failure_record import open_log
from stageline.distributed.process_group import DistributedContext
from stageline.distributed.ranks import Ranks
from stageline.distributed.stop import stop_requested
from stageline.distributed.terminal import terminal
from stageline.errors import NonFiniteError, spelled
from stageline.pipeline.recorder import bubble
from stageline.pipeline.runner import MicroBatch
from stageline.training.evaluation import BestCheckpoint, EarlyStop, evaluate, figure_of
from stageline.training.memory import MemoryAccount
from stageline.training.nonfinite import Skips
from stageline.training.precision import LossScaler, MasterWeights
from stageline.training.reference import Mode, Reference, choose_mode, from_columns, reference_table
from stageline.training.replicas import Replicas, ShardedReplicas, share_rows
from stageline.training.run_log import RunLog, show_stages
from stageline.training.step import StepResult, TrainStep
from stageline.training.timeline import StepTimeline

COLUMNS = {"ref_chosen_logps", "ref_logps"}  # the reference model computes these columns
LONGEST_SAVE = timedelta(hours=2)  # a rank waits at most this long for others that write


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The settings of the loop, named as the options that set them (docs/options.md)."""

    output_dir: str
    resume: str | None
    precision: Literal["fp32", "bf16", "fp16"]
    dp_shard: bool
    total_steps: int
    max_grad_norm: float
    max_skipped: int
    spike_sigma: float
    spike_action: Literal["warn", "skip"]
    timeline_step: int
    log_steps: int
    eval_steps: int | Literal["epoch"]
    patience: int
    stop_metric: str
    stop_delta: float
    save_steps: int | Literal["epoch"]
    save_best: str
    keep_last: int
    sync_save: bool
    reference: Mode


class Trainer:
    """A run from its folder to its last checkpoint; every rank makes one and calls `run`.

    Args:
        parts: the components with their options bound, `TrainingParts` of commands/train_parts.py.
        memory: is told the step, whose tensors it counts when memory runs out.
    """

    def __init__(self, config: TrainerConfig, parts: Any, *, memory: MemoryAccount) -> None:
        context: DistributedContext = parts.context
        self.config, self.parts, self.context, self.data = config, parts, context, parts.data
        folder = Path(config.output_dir).absolute()
        self.checkpoints = folder / "checkpoints"

        # The run folder, and the checkpoint that this run continues
        ranks = Ranks.of(None)
        ranks.on_first(lambda: claim_run_folder(folder))
        if context.is_main:
            terminal.keep(folder / "run.log")
        point = find_resume_point(config.resume, self.checkpoints, ranks=ranks)
        if point is not None:
            parts.check_same_run(point)
            for path in set_aside(self.checkpoints, after=point.step) if context.is_main else ():
                terminal.say(f"kept a checkpoint of a later step as {path.name}")
            steps = f"{point.step} of {config.total_steps} steps are done"
            terminal.say(f"resumed from {point.folder}: {steps}")
        self.start_step = self.saved_step = point.step if point else 0
        facts: Mapping[str, Any] = point.state.facts if point else {}

        # Stages, shared out among replicas, and their runner
        stages = parts.build_stages(point)
        show_stages(stages, group=context.pp_group)
        for label, text in parts.summary().items():
            terminal.say(f"{label:<12} {text}")
        self.replicas = Replicas(context.dp_group)
        self.replicas.check_equal(stages)
        if config.dp_shard:
            self.replicas = ShardedReplicas(stages, mesh=context.mesh["dp"])
        self.runner = runner = parts.make_runner(stages)
        if context.is_main:
            parts.save_config(folder)
        open_log()

        # Loss, optimizer, and the step that uses them
        self.settings = parts.settings()
        self.loss_fn = parts.make_loss(runner.local.models[-1])
        self.timeline = StepTimeline(runner, step=min(config.timeline_step, config.total_steps) - 1)
        self.train_step = memory.train_step = TrainStep(
            runner,
            make_optimizer=lambda named: parts.make_optimizer(named, part_of=runner.local.part_of),
            loss_fn=self.loss_fn,
            learning_rate=parts.make_learning_rate(),
            max_grad_norm=config.max_grad_norm,
            scaler=LossScaler(enabled=config.precision == "fp16"),
            timeline=self.timeline,
            replicas=self.replicas,
            skips=Skips(config.max_skipped, config.spike_sigma, config.spike_action),
            make_weights=getattr(runner, "make_weights", MasterWeights),
        )

        # Batches: rows of the data, or prompts that the stages answer
        held_out = self.data.test
        self.held_out_rows = data_fingerprint(held_out) if held_out is not None else None
        self.batches = self.rollouts = parts.make_rollouts(runner, self.replicas, point)
        if self.rollouts is None:
            self.batches = parts.make_loader(
                self.data.train,
                runner,
                self.replicas,
                is_evaluation=False,
                start_step=self.start_step,
                position=facts.get("position"),
            )
        self.held_out = None
        if held_out is not None:
            self.held_out = parts.make_loader(held_out, runner, is_evaluation=True)
        self.completions = parts.make_completions(runner, self.replicas, self.start_step)

        # Checkpoints; a resumed run takes over optimizer, masters, adapters and counters
        weights = self.train_step.weights
        self.writer = CheckpointWriter(
            self.checkpoints,
            stages=runner.local.models,
            processor=self.data.processor,
            optimizer=self.train_step.optimizer,
            parameters=weights.parameters,
            rows=share_rows(weights),
            with_weights=config.precision != "fp32",
            group=dist.new_group(backend="gloo", timeout=LONGEST_SAVE),
            dp_rank=context.dp_rank,
            keep=config.keep_last,
            waits=config.sync_save,
        )
        if point is not None:
            names = Ranks.of(runner.group).gather(list(weights.parameters))
            point.state.check_names(name for rank_names in names for name in rank_names)
            point.state.restore(
                self.train_step.optimizer, weights.parameters, rows=share_rows(weights)
            )
            weights.write_back()
            self.train_step.load_state_dict(facts["numbers"])
            if facts.get("loss") is not None:
                self.train_step.part.load_state_dict(facts["loss"])

        # The reference model of a preference loss; its passes put shared-out weights together, so
        # it comes after the optimizer, which must not see them
        self.reference_mode = self._prepare_reference(begun_as=facts.get("reference"))

        # Evaluation: the best weights so far, and whether the run continues
        is_known = facts.get("held_out", self.held_out_rows) == self.held_out_rows
        if not is_known and (config.patience or config.save_best != "none"):
            terminal.say("other held-out rows than before: the search for the best starts again")
        self.best = BestCheckpoint(
            self.checkpoints,
            metric=config.save_best,
            save=lambda path, **given: save_split_model(
                runner.local.models,
                self.data.processor,
                path,
                group=context.pp_group,
                replicas=context.dp_group,
                **given,
            ),
            start_step=self.start_step if is_known else 0,
        )
        self.report = RunLog(
            folder,
            context=context,
            total_steps=config.total_steps,
            start_step=self.start_step,
            log_steps=config.log_steps,
            lr_scales=parts.lr_scales,
            tracker=parts.make_tracker(folder, self.start_step) if context.is_main else None,
        )
        self.early_stop = EarlyStop(config.patience, config.stop_metric, config.stop_delta)
        self.is_evaluated = False  # after `start_step`
        if point is not None and is_known:  # the checkpoint may be of a run in another folder
            earlier = self.report.evaluations(point.folder.parent.parent)
            self.is_evaluated = any(one["step"] == self.start_step for one in earlier)
            self.early_stop.see_log(earlier, until=self.start_step)

    def _prepare_reference(self, begun_as: Mode | None) -> Mode | None:
        """Compute what the loss needs of the reference model before the first step.

        Returns:
            Where it comes from; None: the loss needs none.
        """
        runner, rollouts = self.runner, self.rollouts
        if rollouts is not None:  # they ask it themselves
            if rollouts.start_mode is not None:
                why = rollouts.start_reason
                terminal.say(f"reference of the loss: {rollouts.start_mode} ({why})")
            return rollouts.start_mode
        if (teacher := self.parts.make_teacher(runner)) is not None:
            self.train_step.prepare = self.prepare_held_out = teacher
            return None
        plain = Reference(runner, loss=self.loss_fn, replicas=self.replicas)
        self.train_step.prepare = self.prepare_held_out = plain
        if not plain.needs_reference:
            return None
        mode, why = choose_mode(
            self.config.reference,
            runner,
            has_columns=not plain.needs_kl and not COLUMNS.isdisjoint(self.data.train[0][1]),
            begun_as=begun_as,
        )
        terminal.say(f"reference of the loss: {mode} ({why})")
        prepared = []
        for name, dataset in (("train", self.data.train), ("test", self.data.test)):
            source: Any = functools.partial(from_columns, runner) if mode == "columns" else None
            if mode == "precompute" and dataset is not None:
                source = reference_table(
                    runner,
                    self.parts.make_loader(dataset, runner, is_evaluation=True),
                    path=self.checkpoints.parent / "reference" / f"{name}.safetensors",
                    key=self.parts.reference_key(dataset),
                    num_samples=len(dataset),
                    needs_kl=plain.needs_kl,
                    is_start=self.start_step == 0,
                    replicas=self.replicas,
                )
            given = {"loss": self.loss_fn, "source": source, "replicas": self.replicas}
            prepared.append(Reference(runner, **given))
        self.train_step.prepare, self.prepare_held_out = prepared
        return mode

    def run(self) -> None:
        """Train to the end, or until a signal asks to stop."""
        with self.report:
            if self.early_stop.is_over:
                terminal.say(str(self.early_stop))
                return
            stop_requested()  # from here on Ctrl-C ends the run after a step, with a checkpoint
            try:
                is_done = self.train()
            except NonFiniteError:  # all ranks raise it: the last checkpoint is still to be written
                self.writer.finish()
                raise
            self.writer.finish()
            self.tell_saved()
            if is_done:
                self.report.ended(self.checkpoints / step_name(self.saved_step), self.best)
            else:
                text = "stopped before the last step; `resume` auto goes on from there"
                terminal.say(spelled(text))

    def train(self) -> bool:
        """Run the loop over steps.

        Returns:
            False when a signal ended it before the last step; the weights are saved then too.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
        """
        first, last = self.start_step, self.config.total_steps
        eval_steps, save_steps = (
            len(self.batches) if steps == "epoch" else steps
            for steps in (self.config.eval_steps, self.config.save_steps)
        )

        def is_due(done: int, interval: int, *, is_end: bool) -> bool:
            return is_end or (interval > 0 and done % interval == 0)

        self._iterator = iter(self.batches)
        evaluates = self.held_out is not None
        # Before the first step, or where a run was stopped between a checkpoint and an evaluation
        is_first_due = first == 0 or is_due(first, eval_steps, is_end=first == last)
        if evaluates and is_first_due and not self.is_evaluated and self.evaluate(first) and first:
            return True
        progress.at_step(first)
        for step in range(first, last):
            start = time.perf_counter()
            with progress.doing("data"):
                micro_batches = self.make_batch()
            data_wait = time.perf_counter() - start
            # Passes, reduce, clip, update
            result = self.train_step(
                micro_batches, step=step, stop_requested=self.asks_to_stop, data_wait=data_wait
            )
            done = step + 1
            progress.at_step(done)
            self.log(done, result, time.perf_counter() - start)
            self.train_step.skips.check(result.problem, step=done)
            is_end = done == last
            is_saved = is_due(done, save_steps, is_end=is_end or result.wants_stop)
            if is_saved:
                self.save(done)
            if result.wants_stop and not is_end:  # it may be in a hurry
                return False
            if evaluates and is_due(done, eval_steps, is_end=is_end) and self.evaluate(done):
                if not is_saved:
                    self.save(done)
                return True
        return True

    def make_batch(self) -> Sequence[MicroBatch]:
        """Return the micro-batches of the next step: of the loader, or answers of the stages."""
        return next(self._iterator)

    def asks_to_stop(self) -> bool:
        """Whether this rank was asked to stop; answers that are half used are not saved."""
        return (self.rollouts is None or self.rollouts.is_last) and stop_requested()

    def log(self, step: int, result: StepResult, seconds: float) -> None:
        """Log a step, with its bubble where it was timed; draw the one that is to be drawn."""
        if self.rollouts is not None:
            result = self.rollouts.told(result)
        with progress.doing("log"):
            events = self.timeline.measured() if self.timeline.is_timed(step - 1) else []
            self.report.stepped(
                step,
                result,
                seconds,
                bubble=bubble(events) if events else None,
                read_expert_tokens=self.train_step.read_expert_tokens,
            )
            self.tell_saved()
        if step == self.timeline.step + 1:
            self.report.timeline(step, events, self.timeline.ideal(events))

    def evaluate(self, step: int) -> bool:
        """Evaluate on the held-out rows; keep the weights if they are the best.

        Returns:
            Whether the run is to end, because it no longer improves.
        """
        assert self.held_out is not None
        with progress.doing("evaluation"):
            if self.rollouts is not None:  # rewards of answers to held-out prompts
                result = self.rollouts.judge(self.held_out)
            else:
                result = evaluate(
                    self.runner,
                    self.held_out,
                    loss_fn=self.loss_fn,
                    step=step,
                    keep=self.report.num_pictures,
                    replicas=self.replicas,
                    prepare=self.prepare_held_out,
                )
                if self.completions is not None:
                    figures, result.completions = self.completions(step)
                    result.figures.update(figures)
        is_best = self.best.improves(result)
        # first: a run that is killed here makes an evaluation again that is not in the log
        kept = self.best.keep(step, result) if is_best else ""
        self.report.evaluated(
            step, result, dataset=self.data.test, processor=self.data.processor, is_best=is_best
        )
        if kept:
            terminal.say(kept)
        if self.config.patience:
            self.early_stop.see(step, figure_of(result, self.early_stop.metric))
        if self.early_stop.is_over:
            terminal.say(str(self.early_stop))
        return self.early_stop.is_over

    def save(self, step: int) -> None:
        """Copy a checkpoint; it is written while training continues."""
        self.train_step.weights.settle()
        facts = {
            "settings": self.settings,
            "numbers": self.train_step.state_dict(),
            "position": self.batches.state_after(step),
            "reference": self.reference_mode,
            "held_out": self.held_out_rows,
        }
        if (own := self.train_step.part.state_dict()) is not None:
            is_last = self.runner.local.models[-1].is_last  # its passes call the loss
            states = Ranks.of(self.runner.group).gather(own if is_last else None)
            facts["loss"] = next(state for state in states if state is not None)
        if self.rollouts is not None:
            facts["answers"] = self.rollouts.answers_ahead()
        self.saved_step = step
        self.writer.save(step, facts)
        self.tell_saved()

    def tell_saved(self) -> None:
        """Print what was saved since the last call; raise if it could not be."""
        for line in self.writer.news():
            terminal.say(line)
