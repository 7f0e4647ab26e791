"""Compares the stages of all ranks with the whole model on rank 0: `stageline check`.

Every rank runs the same methods in the same order; only rank 0 judges and reports.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline.checkpoint.load import CheckpointMismatch
from stageline.distributed.process_group import DistributedContext
from stageline.distributed.ranks import Ranks
from stageline.errors import spelled
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.training.loss_part import logits_of
from stageline.training.optimizers import optimizer_groups
from stageline.training.step import TrainStep
from stageline.verify.batches import add_padding, change_first_token, change_images, has_pixels
from stageline.verify.compare import Comparison, Expected, Report, StageTensors, compare_named
from stageline.verify.names import check_filled_stages
from stageline.verify.whole_model import (
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Build,
    ModelSource,
    Preparation,
    ReferenceKind,
    WholeModel,
    WholeModelRun,
    layers_behind_borders,
    load_whole,
    on_hidden_states,
    prepare,
    start_lora,
)

TIED_TOLERANCE = 1e-6
PADDING_TOLERANCE = 1e-5  # other shapes, so sums in another order


def _border_name(stage: int) -> str:
    return f"stage {stage} -> {stage + 1}"


class SplitCheck:
    """One check of this rank's stages, which are trained as `train_pp.py` trains them.

    Args:
        runner: holds the stages.
        whole: on rank 0 the model to compare with, elsewhere None.
        loss_fn: a loss_fn part.
        batches: number of a step -> its micro-batches.
        tolerance: None: 0, or 1e-6 where stages share a weight.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        whole: WholeModel | None,
        preparation: Preparation,
        *,
        loss_fn: Callable[..., torch.Tensor],
        batches: Callable[[int], list[MicroBatch]],
        tolerance: float | None,
        report: Report,
    ) -> None:
        self.runner, self.preparation = runner, preparation
        self.models: list[Any] = list(runner.local)
        self.ranks, self.batches, self.report = Ranks.of(runner.group), batches, report

        def make_optimizer(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer | None:
            groups = optimizer_groups(parameters, weight_decay=WEIGHT_DECAY)
            return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS) if groups else None

        self.train_step = TrainStep(
            runner,
            make_optimizer=make_optimizer,
            loss_fn=loss_fn,
            learning_rate=lambda step: LEARNING_RATE,
        )
        told = [
            (
                model.stage,
                model.partition[model.stage],
                [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
            )
            for model in self.models
        ]
        stages = sorted(one for some in self.ranks.gather(told) for one in some)
        held = [name for _, _, named in stages for name, _ in named]
        self.trained = [
            (stage, name) for stage, _, named in stages for name, is_trained in named if is_trained
        ]
        if tolerance is None:
            tolerance = TIED_TOLERANCE if len(held) > len(set(held)) else 0.0
        self.tolerance = tolerance
        self.reference: WholeModelRun | None = None
        if whole is not None:
            # a sum depends on its order; transformers' own model has its own
            order = None if preparation.is_library else held
            self.reference = WholeModelRun(whole, loss_fn=loss_fn, order=order)
        schedule, all_layers = runner.schedule, [layers for _, layers, _ in stages]
        made = batches(0)
        shapes = ", ".join("x".join(map(str, batch["input_ids"].shape)) for batch in made)
        origin = "of transformers, in plain PyTorch" if preparation.is_library else "on one stage"
        report.facts |= {
            "model": f"{preparation.config.model_type}, {sum(all_layers)} layers",
            "split": f"{schedule.num_stages} stages of {', '.join(map(str, all_layers))} layers on "
            f"{schedule.num_ranks} processes, {schedule.name}",
            "compared with": f"{type(whole.model).__name__ if whole else ''} {origin}",
            "micro-batches": f"{len(made)} of {shapes} tokens",
        }

    def run(self, *, steps: int) -> None:
        """All checks, in the order of the table."""
        self._add("weights before step 1", self._compare_weights())
        if self.preparation.is_library and self.runner.schedule.num_stages > 1:
            self._check_borders()
        self._check_inputs()
        # where something random acts in training (dropout), both sides are checked without it
        is_random = False
        if self.reference is not None:
            first, second = (self.reference.loss(self.batches(0)[:1]) for _ in range(2))
            is_random = first != second and not math.isnan(first)
        if self._first(is_random):
            self.runner.local.train(False)
            if self.reference is not None:
                self.reference.model.eval()
                self.report.notes.append(
                    "two forward passes in training mode differ (dropout): compared in evaluation "
                    "mode"
                )
        self._check_steps(steps)

    @torch.no_grad()
    def _check_borders(self) -> None:
        """Says at which stage a difference begins; some models do not name their layers."""
        batch, states = self.batches(0)[0], dict[str, torch.Tensor]()
        own: list[tuple[int, str, torch.Tensor]] = []

        def keep(model: Any, _: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            own.append((model.stage, _border_name(model.stage), value))

        senders = [model for model in self.models if model.layers and not model.is_last]
        hooks = [model.register_forward_hook(keep) for model in senders]
        self._loss([batch])
        model = None if self.reference is None else self.reference.model
        layers = None if model is None else layers_behind_borders(model, self.models[0])
        if model is not None and layers is not None:
            # compare the input of the layer behind a border: some models add to the sent states
            hooks += [
                on_hidden_states(layer, functools.partial(states.__setitem__, _border_name(stage)))
                for stage, layer in layers.items()
            ]
            was_training = model.training
            model.eval()
            model(**model_inputs(batch), use_cache=False)
            model.train(was_training)
        for hook in hooks:
            hook.remove()
        if self._first(layers is not None):
            found = self._compare(own, None if model is None else states)
            self._add("hidden states between stages", found)

    def _check_inputs(self) -> None:
        """Every input of a stage must reach the loss; padding must not."""
        batches, config = self.batches(0), self.preparation.config
        loss = self._loss(batches)
        changes = {"first token": change_first_token(batches, config)}
        if self._first(has_pixels(batches)):
            changes["image"] = change_images(batches)
        for name, changed in changes.items():
            other = self._loss(changed)
            differs = loss != other and math.isfinite(loss) and math.isfinite(other)
            self._row(f"{name} changes the loss", differs, f"{loss:.6f} -> {other:.6f}")
        if "image" not in changes and getattr(config, "vision_config", None) is not None:
            missing = "there is no image: add a `dataset` with images"
            self._row("image changes the loss", None, spelled(missing))
        if all("attention_mask" in batch for batch in batches):
            apart = abs(loss - self._loss(add_padding(batches)))
            fits = apart <= PADDING_TOLERANCE * (1 + abs(loss))
            self._row("padding changes nothing", fits, f"{apart:.1e} apart")

    def _check_steps(self, count: int) -> None:
        """Trains both, and compares losses, norms, gradients and, at the end, weights."""
        found = Comparison()
        losses: list[tuple[float, float]] = []  # (the stages', the whole model's) of each step
        norms: list[tuple[float, float]] = []
        seen: set[tuple[int, str]] = set()  # (stage, name) with a gradient in some step
        step, reference = self.train_step, self.reference
        for number in range(count):
            batches, loss, norm, limit, expected = self.batches(number), 0.0, 0.0, 0.0, None
            if reference is not None:
                # to half of the norm of the first step: clipping must act
                known = None if number == 0 else step.max_grad_norm
                loss, norm, limit = reference.step(batches, max_norm=known)
                expected = reference.gradients()
            step.max_grad_norm = self._first(limit)
            result = step(batches, step=0)
            updated = step.weights.parameters
            own = [
                (stage, name, updated[name].grad)  # clipped
                for stage, name, parameter in self._parameters()
                if parameter.requires_grad
            ]
            self._compare(own, expected, found=found, when=f"step {number + 1}: ")
            have = [(stage, name) for stage, name, grad in own if grad is not None]
            seen.update(pair for pairs in self.ranks.gather(have) for pair in pairs)
            losses.append((result.loss, loss))
            norms.append((result.grad_norm, norm))
        weights = self._compare_weights()
        if reference is None:
            return
        for what, pairs in (
            (f"loss of {count} steps", losses),
            (f"clip norm of {count} steps", norms),
        ):
            apart = max(abs(ours - theirs) for ours, theirs in pairs)
            wrong = [
                f"step {step}: {ours!r} instead of {theirs!r}"
                for step, (ours, theirs) in enumerate(pairs, start=1)
                if not abs(ours - theirs) <= self.tolerance * (1 + abs(theirs))  # NaN is wrong
            ]
            values = ", ".join(f"{ours:.6f}" for ours, _ in pairs[:3])
            how = "equal to the bit" if apart == 0 else f"{apart:.1e} apart"
            self._row(what, not wrong, f"{values}{' ...' if pairs[3:] else ''}: {how}", wrong)
        self._add(f"gradients of {count} steps", found)
        missing = [pair for pair in self.trained if pair not in seen]
        figure = f"{len(self.trained) - len(missing)} of {len(self.trained)}"
        if self.preparation.is_library:
            had = {name for name, grad in reference.gradients().items() if grad is not None}
            unused = [name for _, name in missing if name not in had]
            missing = [(stage, name) for stage, name in missing if name in had]
            if unused:
                self.report.notes.append(
                    f"{len(unused)} trained parameters get no gradient, neither here nor in "
                    f"transformers' model: {', '.join(unused[:4])}{' ...' if unused[4:] else ''}"
                )
        details = [f"{name} (stage {stage}) has none in any step" for stage, name in missing]
        self._row("trained ones have a gradient", not missing, figure, details)
        self._add(f"weights after {count} steps", weights)

    def _loss(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss of a batch, forward only; the same on all ranks."""
        part, total = self.train_step.part, torch.zeros(())
        counts = part.count(micro_batches)
        totals = {name: torch.tensor(float(count)) for name, count in counts.items()}

        def add(output: Any, batch: MicroBatch) -> None:
            loss, _ = part(logits_of(output), batch, totals=totals, step=0)
            total.add_(loss.float())

        self.runner.evaluate(micro_batches, on_output=add)
        dist.all_reduce(total, group=self.runner.group)
        return total.item()

    def _parameters(self) -> list[tuple[int, str, nn.Parameter]]:
        return [
            (model.stage, name, parameter)
            for model in self.models
            for name, parameter in model.named_parameters()
        ]

    def _compare_weights(self) -> Comparison:
        expected = None
        if self.reference is not None:
            expected = dict(self.reference.model.named_parameters())
        return self._compare(self._parameters(), expected)

    def _compare(
        self,
        own: StageTensors,
        expected: Expected | None,
        *,
        found: Comparison | None = None,
        when: str = "",
    ) -> Comparison:
        found = found or Comparison()
        tolerance, group = self.tolerance, self.runner.group
        compare_named(found, own, expected, tolerance=tolerance, group=group, when=when)
        return found

    def _first(self, value: Any) -> Any:
        """The value that rank 0 has, on all ranks."""
        return self.ranks.gather(value)[0]

    def _row(
        self, name: str, passed: bool | None, figure: str, details: Sequence[str] = ()
    ) -> None:
        if self.ranks.rank == 0:
            self.report.add(name, passed, figure, details)

    def _add(self, name: str, found: Comparison) -> None:
        self._row(name, not found.differences, found.figure, found.differences)


def check_split(
    context: DistributedContext,
    *,
    schedule: Schedule,
    source: ModelSource,
    build: Build,
    make_batches: Callable[[Preparation, WholeModel | None], Callable[[int], list[MicroBatch]]],
    loss_fn: Callable[..., Any],
    steps: int,
    tolerance: float | None,
    layers: int | None,
    reference: ReferenceKind,
    seed: int,
    trust_remote_code: bool,
    report: Report,
) -> bool:
    """Checks a split; all ranks call this, rank 0 fills the report.

    Args:
        source: paths of config, weights and processor.
        build: (stage=, num_stages=, source=) -> a stage model, as training builds it.
        make_batches: (preparation, on rank 0 the whole model) -> (number of a step -> its
            micro-batches).
        tolerance: None: 0, or 1e-6 where stages share a weight.
        layers: number of layers that the model is cut to; None: the whole model.

    Returns:
        Whether it passed, the same on all ranks.

    Raises:
        UserError: there is nothing to check: wrong paths, keys or numbers of stages.
    """
    options: dict[str, Any] = dict(build=build, seed=seed, trust_remote_code=trust_remote_code)
    ranks = Ranks.of(context.pp_group)
    with tempfile.TemporaryDirectory(prefix="stageline_check_") as own_folder:
        folder = Path(ranks.gather(own_folder)[0])  # all ranks use rank 0's, on this machine
        make = functools.partial(prepare, source, folder, layers=layers, reference=reference)
        preparation = ranks.on_first(lambda: make(**options))
        assert preparation is not None  # rank 0 made one
        report.notes += preparation.notes
        whole, models, problem = None, [], ""
        try:
            if ranks.rank == 0:
                whole = load_whole(preparation, **options)
            for stage in schedule.stages_of(context.pp_rank):
                told = {"num_stages": schedule.num_stages, "source": preparation.source}
                models.append(build(stage=stage, **told))
                start_lora(models[-1], seed=seed)
        except CheckpointMismatch as error:
            problem = str(error)
        problems = dict.fromkeys(text for text in ranks.gather(problem) if text)
        if problems:
            report.add("checkpoint fits the model", False, "it does not load", list(problems))
        else:
            runner = PipelineRunner(
                models, device=context.device, group=context.pp_group, schedule=schedule
            )
            check_filled_stages(models, ranks=ranks, checkpoint=preparation.source.model_path)
            SplitCheck(
                runner,
                whole,
                preparation,
                loss_fn=loss_fn,
                batches=make_batches(preparation, whole),
                tolerance=tolerance,
                report=report,
            ).run(steps=steps)
        return ranks.gather(report.passed)[0]  # all wait here before the folder is removed
