"""One training run: its folder, where it goes on, its loop and its checkpoints.

train_pp.py builds the stages; the chosen parts are called in train_parts.py.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from commands import say
from commands.train_data import READ_ANEW, START, Data, make_loader, read_anew, start_weights
from commands.train_parts import bind_loss, make_learning_rate, make_loss, make_optimizer
from options.command_line import with_new_names
from options.fields import absolute, option_fields, spelled
from options.memory import check_streaming
from options.train import RunConfig, on_resume
from parse_args import TrainArguments
from stageline import progress
from stageline.checkpoint.layout import Ranks
from stageline.checkpoint.save import save_split_model
from stageline.checkpoint.writer import CheckpointWriter
from stageline.data.batches.loader import MicroBatchLoader
from stageline.data.rows.readers import data_fingerprint
from stageline.distributed.process_group import DistributedContext
from stageline.distributed.stop import stop_requested
from stageline.errors import NonFiniteError, UserError
from stageline.hub import PREFIX
from stageline.model_folder import load_config
from stageline.pipeline.recorder import bubble
from stageline.pipeline.runner import MicroBatch, PipelineRunner
from stageline.pipeline.topology import Topology
from stageline.stage import Stage
from stageline.streaming.host_weights import check_host_memory, host_bytes
from stageline.streaming.lanes import Lane
from stageline.streaming.runner import StreamingRunner, even_plan, streaming_schedule
from stageline.terminal import terminal
from stageline.training.evaluation import (
    BestCheckpoint,
    EarlyStop,
    EvalResult,
    evaluate,
    figure_of,
)
from stageline.training.nonfinite import Skips
from stageline.training.precision import LossScaler, MasterWeights
from stageline.training.reference import (
    Mode,
    Reference,
    TableMaker,
    choose_mode,
    from_columns,
)
from stageline.training.replicas import Replicas, share_rows
from stageline.training.resume import (
    ResumePoint,
    check_same_run,
    claim_run_folder,
    clear_way,
    find_resume_point,
)
from stageline.training.run_log import RunReport
from stageline.training.step import StepResult, TrainStep, train
from stageline.training.timeline import StepTimeline

if TYPE_CHECKING:
    from stageline.training.rollouts import Rollouts


LONGEST_SAVE = timedelta(hours=2)  # that a rank waits for the others while they write


def open_run_folder(
    arguments: TrainArguments, data: Data, context: DistributedContext
) -> ResumePoint | None:
    """Takes the run folder for this run; finds where it goes on, if it does."""
    run = arguments.run
    folder = Path(run.output_dir).absolute()
    ranks = Ranks.of(None)
    check_same_commits(ranks.gather(arguments.as_config()))
    ranks.together(lambda: claim_run_folder(folder, say=say) if context.is_main else None)
    if context.is_main:
        terminal.keep(folder / "run.log")
    point = find_resume_point(run.resume, folder / "checkpoints", ranks=ranks, say=say)
    if point is None:
        return None
    saved = with_new_names(point.state.facts["settings"])
    is_longer, why = rates_stay(arguments, saved, point.step)
    free = {"free", "length"} if is_longer else {"free"}
    now = settings(arguments, data)
    # the same passes in the same order, to the bit
    is_alike = {saved.get("engine"), now["engine"]} <= {"pipeline", "torch"}
    # whole weights need no others; of a base that started at random there are no files
    has_start = point.base is not None and run.model_path and saved.get("model-path")
    check_same_run(
        {**newer_options(run, now), **saved},
        now,
        may_change=lambda name: (
            on_resume(name, arguments.parts) in free
            or (name == START and not has_start)
            or (name == "engine" and is_alike)
        ),
        allows_changes=run.allow_changes,
        say=say,
        why=why,
    )
    if context.is_main:
        clear_way(point, folder / "checkpoints", say=say)
    say(f"resumed from {point.folder}: {point.step} of {run.total_steps} steps are done")
    return point


def newer_options(run: RunConfig, now: Mapping[str, Any]) -> dict[str, Any]:
    """What is newer than a checkpoint: options had their defaults, and files are believed."""
    named = {spelled(item.name)[2:]: item for item in option_fields(run).values()}
    options = {name: absolute(item, item.default) for name, item in named.items() if name in now}
    return {**options, **{name: now[name] for name in READ_ANEW if name in now}}


def check_same_commits(configs: Sequence[Mapping[str, object]]) -> None:
    """Refuses ranks that found a name on a hub at different commits, as torchrun's may."""
    for name, value in configs[0].items():
        found = {str(config[name]) for config in configs}
        if PREFIX in str(value) and len(found) > 1:
            raise UserError(
                f"--{name} is {' and '.join(sorted(found))} on ranks of this run. One commit was "
                "expected: its branch moved while they started. Give one of these names."
            )


def rates_stay(arguments: TrainArguments, saved: Mapping[str, Any], step: int) -> tuple[bool, str]:
    """Whether the steps done had the learning rates that this run would give them; why not.

    Then a run of another length is, to the bit, the one that had this length from the start.

    Args:
        saved: the settings of the run that is resumed.
        step: how many steps are done.
    """
    run = arguments.run
    names = ("total_steps", "warmup_steps")
    then: dict[str, Any] = {name: saved.get(spelled(name)[2:]) for name in names}
    now = {name: getattr(run, name) for name in then}
    if then == now or None in then.values():
        return then == now, ""
    if run.total_steps < step:
        return False, f" The run would end at step {run.total_steps}, and {step} are done."
    before = dataclasses.replace(arguments, run=dataclasses.replace(run, **then))
    rates = make_learning_rate(before), make_learning_rate(arguments)
    for done in range(step):
        one, other = (rate_of(done) for rate_of in rates)
        if one != other:
            return False, (
                f" With another length, step {done + 1}, which is done, would have had the "
                f"learning rate {other:g} in place of {one:g}; with --lr-scheduler constant and "
                "the same --warmup-steps a run may be made longer."
            )
    return True, ""


def settings(arguments: TrainArguments, data: Data) -> dict[str, object]:
    """What decides the course of training; saved with a checkpoint, compared when it is resumed."""
    run = arguments.run
    return {
        **arguments.as_config(),
        "samples of a step": run.batch_size * run.accumulate_steps * (run.dp_degree or 1),
        "training samples": len(data.train),
        "training data": data_fingerprint(data.train),
        **read_anew(arguments, data),
    }


def make_writer(
    arguments: TrainArguments, data: Data, context: DistributedContext, train_step: TrainStep
) -> CheckpointWriter:
    """What saves the checkpoints of the run, over a process group of its own."""
    run, weights = arguments.run, train_step.weights
    return CheckpointWriter(
        Path(run.output_dir) / "checkpoints",
        stages=train_step.runner.local.models,
        processor=data.processor,
        optimizer=train_step.optimizer,
        parameters=weights.parameters,
        rows=share_rows(weights),
        with_weights=run.precision != "fp32",
        group=dist.new_group(backend="gloo", timeout=LONGEST_SAVE),
        dp_rank=context.dp_rank,
        keep=run.keep_last,
        waits=run.sync_save,
    )


def resume_step(train_step: TrainStep, point: ResumePoint) -> None:
    """Gives optimizer, masters and adapters back what the checkpoint knows of them."""
    weights = train_step.weights
    names = Ranks.of(train_step.runner.group).gather(list(weights.parameters))
    point.state.check_names(name for rank_names in names for name in rank_names)
    point.state.restore(train_step.optimizer, weights.parameters, rows=share_rows(weights))
    weights.write_back()
    train_step.load_state_dict(point.state.facts["numbers"])


def make_references(
    arguments: TrainArguments,
    data: Data,
    context: DistributedContext,
    runner: PipelineRunner,
    replicas: Replicas,
    report: RunReport,
    point: ResumePoint | None,
) -> tuple[dict[str, Reference], Mode | None]:
    """What tells the loss of the start model, for training and held-out rows, and how it knows.

    Computes what has to be computed before the first step. Without a question there is no mode.
    """
    run, loss = arguments.run, bind_loss(arguments)
    make = functools.partial(Reference, runner, loss=loss, replicas=replicas)
    plain = make()
    sets = {"train": data.train, "test": data.test}
    if not plain.needs_reference:
        return dict.fromkeys(sets, plain), None
    known = {"ref_chosen_logps", "ref_logps"}
    mode, why = choose_mode(
        run.reference,
        runner,
        has_columns=not known.isdisjoint(data.train[0][1]) and not plain.needs_kl,
        begun_as=point.state.facts.get("reference") if point else None,
    )
    report.say(f"reference of the loss: {mode} ({why})")
    if mode != "precompute":
        columns = make(source=functools.partial(from_columns, runner))
        return dict.fromkeys(sets, columns if mode == "columns" else plain), mode
    table_of = functools.partial(
        TableMaker, runner, needs_kl=plain.needs_kl, replicas=replicas, say=report.say
    )
    loader_of = functools.partial(
        make_loader, arguments, data, context, runner.schedule, is_evaluation=True
    )
    found = dict.fromkeys(sets, plain)
    for name, dataset in sets.items():
        if dataset is None:
            continue
        path = Path(run.output_dir).absolute() / "reference" / f"{name}.safetensors"
        table = table_of(path=path, key=reference_key(arguments, dataset))
        loader = loader_of(dataset, facts=facts_of(runner))
        size = {"num_samples": len(dataset), "num_batches": len(loader)}
        found[name] = make(source=table(loader, **size, is_start=point is None))
    return found, mode


def facts_of(runner: PipelineRunner) -> Callable[[MicroBatch], MicroBatch] | None:
    """What the stages want to be told of each micro-batch; a stage of one's own need not say."""
    return getattr(runner.local.models[0], "host_facts", None)


def reference_key(arguments: TrainArguments, dataset: object) -> str:
    """Tells apart what the log-probabilities of a dataset under the start model depend on."""
    config = arguments.as_config()
    told: Mapping[str, object] = {
        name: value
        for name, value in config.items()
        if on_resume(name, arguments.parts) == "course"
    }
    run = arguments.run
    words = (data_fingerprint(dataset), start_weights(run), run.max_token_num)
    return hashlib.sha256(json.dumps([told, words], default=str).encode()).hexdigest()


class TrainingRun:
    """The loop of a run, and what happens beside its steps."""

    def __init__(
        self,
        arguments: TrainArguments,
        data: Data,
        context: DistributedContext,
        runner: PipelineRunner,
        replicas: Replicas,
        report: RunReport,
        point: ResumePoint | None,
    ) -> None:
        run = self.options = arguments.run
        self.settings = settings(arguments, data)
        self.data, self.runner, self.replicas, self.report = data, runner, replicas, report
        self.held_out_rows = data_fingerprint(data.test) if data.test is not None else None
        self.start_step = point.step if point else 0
        self.is_evaluated = False  # after that step
        self.loss_fn = make_loss(arguments, runner.local.models[-1])
        self.timeline = StepTimeline(runner, step=min(run.timeline_step, run.total_steps) - 1)
        self.train_step = TrainStep(
            runner,
            make_optimizer=functools.partial(
                make_optimizer, arguments, part_of=runner.local.part_of
            ),
            loss_fn=self.loss_fn,
            learning_rate=make_learning_rate(arguments),
            max_grad_norm=run.max_grad_norm,
            scaler=LossScaler(enabled=run.fp16),
            timeline=self.timeline,
            replicas=replicas,
            skips=Skips(
                max_in_a_row=run.bad_steps.max_skipped,
                spike_sigma=run.bad_steps.spike_sigma,
                spike_action=run.bad_steps.spike_action,
            ),
            make_weights=getattr(runner, "make_weights", MasterWeights),
        )
        self.make_batches(arguments, context, point)
        self.checkpoints = Path(run.output_dir).absolute() / "checkpoints"
        self.writer = make_writer(arguments, data, context, self.train_step)
        if point is not None:
            resume_step(self.train_step, point)
        # behind the optimizer: passes put shared-out weights together, which it must not see
        references, mode = make_references(
            arguments, data, context, runner, replicas, report, point
        )
        self.train_step.prepare, self.reference = references["train"], references["test"]
        self.reference_mode = mode if self.rollouts is None else self.rollouts.start_mode
        self.judge_evaluations(context, point)

    def make_batches(
        self, arguments: TrainArguments, context: DistributedContext, point: ResumePoint | None
    ) -> None:
        """Prepares what gives the micro-batches of each step, and the held-out ones."""
        data, runner = self.data, self.runner
        loader = functools.partial(
            make_loader, arguments, data, context, runner.schedule, facts=facts_of(runner)
        )
        self.rollouts: Rollouts | None = None
        self.batches: MicroBatchLoader | Rollouts
        if arguments.parts["loss_fn"].facts["samples_answers"]:
            # what decodes is imported where something is decoded
            from commands.train_rollouts import make_prompts, make_rollouts

            self.batches = self.rollouts = make_rollouts(
                arguments, data, context, runner, self.replicas, point=point
            )
            if self.rollouts.start_mode:
                mode, why = self.rollouts.start_mode, self.rollouts.start_reason
                self.report.say(f"reference of the loss: {mode} ({why})")
            loader = functools.partial(make_prompts, arguments, data, context)
        else:
            self.batches = loader(
                data.train,
                is_evaluation=False,
                start_step=self.start_step,
                position=point.state.facts.get("position") if point else None,
            )
        self.held_out = None if data.test is None else loader(data.test, is_evaluation=True)

    def judge_evaluations(self, context: DistributedContext, point: ResumePoint | None) -> None:
        """Prepares what held-out figures decide: the best weights, and whether it goes on."""
        run = self.options
        save = functools.partial(
            save_split_model,
            self.runner.local.models,
            self.data.processor,
            group=context.pp_group,
            replicas=context.dp_group,
        )
        facts: Mapping[str, Any] = point.state.facts if point else {}
        is_known = facts.get("held_out", self.held_out_rows) == self.held_out_rows
        if not is_known and (run.early_stop.patience or run.save_best != "none"):
            self.report.say("other held-out rows than before: the best figure is looked for anew")
        self.best = BestCheckpoint(
            self.checkpoints,
            metric=run.save_best,
            save=save,
            start_step=self.start_step if is_known else 0,
        )
        self.early_stop = EarlyStop(
            run.early_stop.patience, metric=run.early_stop.metric, delta=run.early_stop.delta
        )
        if point is not None and is_known:  # it may be of a run in another folder
            earlier = self.report.evaluations(point.folder.parent.parent)
            self.is_evaluated = any(one["step"] == self.start_step for one in earlier)
            self.early_stop.see_log(earlier, until=self.start_step)

    def run(self) -> None:
        """Trains to the end, or until somebody asks to stop."""
        run = self.options
        if self.early_stop.is_over:
            self.report.say(str(self.early_stop))
            return
        stop_requested()  # from here on Ctrl-C ends the run after a step, with a checkpoint
        asked = (
            stop_requested if self.rollouts is None else self.rollouts.when_between(stop_requested)
        )
        try:
            is_done = train(
                self.train_step,
                iter(self.batches),
                total_steps=run.total_steps,
                start_step=self.start_step,
                is_evaluated=self.is_evaluated,
                eval_steps=self.steps_between(run.eval_steps),
                save_steps=self.steps_between(run.save_steps),
                on_step=self.after_step,
                evaluate=self.evaluate_now if self.held_out is not None else None,
                save=self.save_now,
                stop_requested=asked,
            )
        except NonFiniteError:  # all ranks raise it: the last checkpoint is still to be written
            self.writer.finish()
            raise
        self.writer.finish()
        self.tell_saved()
        if not is_done:
            self.report.say("stopped before the last step; --resume auto goes on from there")

    def steps_between(self, interval: Literal["epoch"] | int) -> int:
        """The steps between evaluations or checkpoints."""
        return len(self.batches) if interval == "epoch" else interval

    def after_step(self, step: int, result: StepResult, seconds: float) -> None:
        """Logs a step, with its bubble where it was timed; draws the one that is to be drawn."""
        if self.rollouts is not None:
            result = self.rollouts.told(result)
        with progress.doing("log"):
            events = self.timeline.measured() if self.timeline.is_timed(step - 1) else []
            self.report.stepped(step, result, seconds, bubble=bubble(events) if events else None)
            self.tell_saved()
        if step == self.start_step + 1:
            self.report.transfers(self.runner.sent_bytes, self.runner.num_micro_batches)
        if step == self.timeline.step + 1:
            self.report.timeline(step, events, self.timeline.ideal(events))

    def evaluate_now(self, step: int) -> bool:
        """Evaluates on the held-out set; keeps the weights if they are the best.

        Returns:
            Whether the run is to end, because it no longer improves.
        """
        assert self.held_out is not None, "the trainer asks only where there are such rows"
        with progress.doing("evaluation"):
            result = self.held_out_figures(step)
        is_best = self.best.improves(result)
        # first: a run that is killed here makes an evaluation again that is not in the log
        kept = self.best.keep(step, result) if is_best else ""
        self.report.evaluated(
            step, result, dataset=self.data.test, processor=self.data.processor, is_best=is_best
        )
        if kept:
            self.report.say(kept)
        if self.options.early_stop.patience:
            self.early_stop.see(step, figure_of(result, self.early_stop.metric))
            if self.early_stop.is_over:
                self.report.say(str(self.early_stop))
        return self.early_stop.is_over

    def held_out_figures(self, step: int) -> EvalResult:
        """The loss on held-out rows, or what answers to held-out prompts are worth."""
        assert self.held_out is not None
        if self.rollouts is not None:
            return self.rollouts.judge(self.held_out)
        return evaluate(
            self.runner,
            self.held_out,
            loss_fn=self.loss_fn,
            step=step,
            keep=self.report.num_pictures,
            replicas=self.replicas,
            prepare=self.reference,
        )

    def save_now(self, step: int) -> None:
        """Copies a checkpoint; it is written while training goes on."""
        self.train_step.weights.settle()
        facts = {
            "settings": self.settings,
            "numbers": self.train_step.state_dict(),
            "position": self.batches.state_after(step),
            "reference": self.reference_mode,
            "held_out": self.held_out_rows,
        }
        if self.rollouts is not None:
            facts["answers"] = self.rollouts.answers_ahead()
            facts["start"] = self.rollouts.start_fingerprint()
        self.writer.save(step, facts)
        self.tell_saved()

    def tell_saved(self) -> None:
        """Says what was saved since the last call; raises if it could not be."""
        for line in self.writer.news():
            self.report.say(line)


GIB = 2**30
SHARE_OF_FREE = 0.5  # of a GPU, for weights and gradients; activations take what they need
SHARE_OF_INPUTS = 0.1  # for layers' inputs that wait for the backward pass


def streaming_topology(arguments: TrainArguments) -> Topology:
    """One process with all stages, a decoder layer each unless the user says otherwise."""
    run = arguments.run
    check_streaming(run, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    num_stages = run.num_stages or _count_layers(run) + run.vision_stages
    return Topology(streaming_schedule(num_stages), dp_degree=1)


def make_streaming_runner(
    arguments: TrainArguments, models: list[Stage], context: DistributedContext
) -> StreamingRunner:
    """The runner over the stages; says what they take."""
    run = arguments.run
    lanes = make_lanes(context.devices, budget=run.streaming.budget)
    plan = None
    if run.streaming.stages:
        plan = even_plan(len(models), min(run.streaming.stages, len(models)))
    runner = StreamingRunner(
        models,
        lanes=lanes,
        group=context.pp_group,
        seed=run.seed,
        plan=plan,
        by_layer=run.recompute_grain == "layer",
        stale=run.stale_step,
        pin_model=run.pin_model,
    )
    _check_budget(runner, run.num_micro_batches)
    try:
        check_host_memory(runner.pipe._hosted_layers, torch.float32)
    except MemoryError as error:
        raise UserError(f"the model does not fit the host's memory: {error}") from None
    host = host_bytes(runner.pipe._hosted_layers, torch.float32) / GIB
    names = ", ".join(str(lane.device) for lane in lanes)
    budget = lanes[0].pool.budget
    limit = "all that is there" if budget is None else f"{budget / GIB:.2f} GiB"
    say(
        f"streaming: {len(models)} stages in host memory through {names}; {limit} for weights and "
        f"gradients of each; {host:.2f} GiB of host memory without the optimizer's state"
    )
    return runner


def _check_budget(runner: StreamingRunner, num_micro_batches: int) -> None:
    try:
        runner.check_plan(num_micro_batches)
    except ValueError as error:
        raise UserError(
            f"the budget of a device (--streaming.budget) is too small: {error}. Raise it, or "
            "cut the model into more stages (--num-stages), a large tower into some of its own "
            "(--vision-stages)."
        ) from None


def make_lanes(devices: Sequence[torch.device], *, budget: float | None) -> list[Lane]:
    """What stages stream through.

    Args:
        budget: GiB for weights and gradients on each; None: half of what is free on an accelerator.
    """
    num_bytes = None if budget is None else int(budget * GIB)
    if devices[0].type == "cpu":
        return [Lane.cpu(budget=num_bytes)]
    module = torch.get_device_module(devices[0])
    free = {device: module.mem_get_info(device)[0] for device in devices}
    return [
        Lane.streams(
            device,
            budget=num_bytes or int(free[device] * SHARE_OF_FREE),
            inputs_budget=int(free[device] * SHARE_OF_INPUTS),
        )
        for device in devices
    ]


def _count_layers(run: RunConfig) -> int:
    path = run.config_path or run.model_path
    config = None if path is None else load_config(path, trust_remote_code=run.trust_remote_code)
    text = None if config is None else config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise UserError(
            f"{path or 'no --model-path and no --config-path'} does not say how many decoder "
            "layers the model has; --engine streaming cuts it into stages of one layer each. Give "
            "--num-stages."
        )
    return count
