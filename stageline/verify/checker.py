"""Compares the stages of all ranks with the whole model on rank 0: `stageline check`.

Every rank runs the same methods in the same order; rank 0 alone judges and reports.
"""

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stageline.checkpoint.layout import Ranks
from stageline.checkpoint.load import CheckpointMismatch
from stageline.distributed.process_group import DistributedContext
from stageline.errors import spelled
from stageline.pipeline.runner import PipelineRunner
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import model_inputs
from stageline.verify.batches import (
    MicroBatch,
    add_padding,
    change_first_token,
    change_images,
    has_pixels,
)
from stageline.verify.compare import (
    Comparison,
    Expected,
    Report,
    StageTensors,
    compare_named,
    numbers_agree,
)
from stageline.verify.names import check_filled_stages
from stageline.verify.reference import (
    Split,
    WholeModelRun,
    border_name,
    layers_behind_borders,
    on_hidden_states,
)
from stageline.verify.setup import (
    Build,
    ModelSource,
    Preparation,
    ReferenceKind,
    WholeModel,
    load_whole,
    prepare,
    start_lora,
)

TIED_TOLERANCE = 1e-6
PADDING_TOLERANCE = 1e-5  # other shapes, so sums in another order


@dataclass(frozen=True)
class StageFacts:
    """What a stage holds: names of its parameters and of the trained ones, number of its layers."""

    stage: int
    names: tuple[str, ...]
    trained: tuple[str, ...]
    layers: int

    @classmethod
    def of(cls, model: Any) -> "StageFacts":
        named = dict(model.named_parameters())
        trained = tuple(name for name, parameter in named.items() if parameter.requires_grad)
        return cls(model.stage, tuple(named), trained, model.partition[model.stage])


@dataclass
class StepsFound:
    """What comparing optimizer steps found, on rank 0.

    Attributes:
        losses, norms: (ours, the whole model's) of each step.
        seen: (stage, name) of parameters that had a gradient in some step.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    gradients: Comparison = field(default_factory=Comparison)
    seen: set[tuple[int, str]] = field(default_factory=set)


class SplitCheck:
    """One check.

    Args:
        split: the stages that this rank holds.
        whole: on rank 0 the model to compare with, elsewhere None.
        batches: number of a step -> its micro-batches.
        tolerance: None: 0, or 1e-6 where stages share a weight.
    """

    def __init__(
        self,
        split: Split,
        whole: WholeModel | None,
        preparation: Preparation,
        *,
        batches: Callable[[int], list[MicroBatch]],
        tolerance: float | None,
        report: Report,
    ) -> None:
        self.split, self.group = split, split.group
        self.ranks = Ranks.of(split.group)
        self.whole, self.preparation = whole, preparation
        self.batches, self.report = batches, report
        own = [StageFacts.of(model) for model in split.models]
        facts = [fact for some in self.ranks.gather(own) for fact in some]
        self.facts = sorted(facts, key=lambda fact: fact.stage)
        held = [name for fact in self.facts for name in fact.names]
        if tolerance is None:
            tolerance = TIED_TOLERANCE if len(held) > len(set(held)) else 0.0
        self.tolerance = tolerance
        self.reference: WholeModelRun | None = None
        if whole is not None:
            self.reference = WholeModelRun(
                whole.model,
                forward=whole.forward,
                loss_fn=split.loss_fn,
                # a sum depends on its order; the library's own model has its own
                order=None if preparation.is_library else held,
            )
        self._describe()

    def _describe(self) -> None:
        """Writes down what is compared with what."""
        schedule, made = self.split.runner.schedule, self.batches(0)
        layers = [fact.layers for fact in self.facts]
        lengths = ", ".join("x".join(map(str, batch["input_ids"].shape)) for batch in made)
        compared = type(self.whole.model).__name__ if self.whole is not None else ""
        origin = "on one stage"
        if self.preparation.is_library:
            origin = "of transformers, in plain PyTorch"
        self.report.facts |= {
            "model": f"{self.preparation.config.model_type}, {sum(layers)} layers",
            "split": f"{schedule.num_stages} stages of {', '.join(map(str, layers))} layers on "
            f"{schedule.num_ranks} processes, {schedule.name}",
            "compared with": f"{compared} {origin}",
            "micro-batches": f"{len(made)} of {lengths} tokens",
        }

    def run(self, *, steps: int) -> None:
        """All checks, in the order of the table."""
        self._add("weights before step 1", self._compare_weights())
        self._check_borders()
        self._check_inputs()
        self._settle_mode()
        self._check_steps(steps)

    def _check_borders(self) -> None:
        """Says at which stage a difference begins."""
        if not self.preparation.is_library or len(self.facts) == 1:
            return
        batch = self.batches(0)[0]
        own = self.split.borders(batch)
        expected = None if self.whole is None else self._hidden_states(self.whole.model, batch)
        if self._first(expected is None):
            return  # a model that does not give them
        self._add("hidden states between stages", self._compare(own, expected))

    @torch.no_grad()
    def _hidden_states(self, model: nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor] | None:
        layers = layers_behind_borders(model, self.split.models[0])
        if layers is None:
            return None
        states: dict[str, torch.Tensor] = {}
        # what the first layer behind a border gets: some models add to what the last one gives
        hooks = [
            on_hidden_states(layer, functools.partial(states.__setitem__, border_name(stage)))
            for stage, layer in layers.items()
        ]
        was_training = model.training
        model.eval()
        model(**model_inputs(batch), use_cache=False)
        model.train(was_training)
        for hook in hooks:
            hook.remove()
        return states

    def _check_inputs(self) -> None:
        """What a stage gets must reach the loss; padding must not."""
        batches, config = self.batches(0), self.preparation.config
        loss = self.split.loss(batches)
        other = self.split.loss(change_first_token(batches, config))
        self._add_change("first token changes the loss", loss, other)
        if self._first(has_pixels(batches)):
            other = self.split.loss(change_images(batches))
            self._add_change("image changes the loss", loss, other)
        elif getattr(config, "vision_config", None) is not None:
            missing = "there is no image: it takes a `dataset` or a processor"
            self._row("image changes the loss", None, spelled(missing))
        if all("attention_mask" in batch for batch in batches):
            apart = abs(loss - self.split.loss(add_padding(batches)))
            fits = apart <= PADDING_TOLERANCE * (1 + abs(loss))
            self._row("padding changes nothing", fits, f"{apart:.1e} apart")

    def _add_change(self, name: str, loss: float, other: float) -> None:
        changed = loss != other and math.isfinite(loss) and math.isfinite(other)
        self._row(name, changed, f"{loss:.6f} -> {other:.6f}")

    def _settle_mode(self) -> None:
        """Where something random acts in training (dropout), both sides are checked without it."""
        is_random = False
        if self.reference is not None:
            first, second = (self.reference.loss(self.batches(0)[:1]) for _ in range(2))
            is_random = first != second and not math.isnan(first)
        if not self._first(is_random):
            return
        self.split.runner.local.train(False)
        if self.reference is not None:
            self.reference.model.eval()
            self.report.notes.append(
                "two forward passes in training mode differ (dropout): compared in evaluation mode"
            )

    def _check_steps(self, count: int) -> None:
        steps = self._compare_steps(range(count))
        weights = self._compare_weights()
        if self.reference is None:
            return
        self._add_numbers(f"loss of {count} steps", steps.losses)
        self._add_numbers(f"clip norm of {count} steps", steps.norms)
        self._add(f"gradients of {count} steps", steps.gradients)
        self._add_missing_gradients(steps)
        self._add(f"weights after {count} steps", weights)

    def _compare_steps(self, numbers: Sequence[int]) -> StepsFound:
        steps = StepsFound()
        for number in numbers:
            batches = self.batches(number)
            loss = norm = 0.0
            limit: float | None = 0.0
            if self.reference is not None:
                # to half of the norm of the first step: clipping must act
                limit = None if number == 0 else self.split.train_step.max_grad_norm
                loss, norm, limit = self.reference.step(batches, max_norm=limit)
            result = self.split.step(batches, max_norm=self._first(limit))
            expected = None if self.reference is None else self.reference.gradients()
            own = self.split.gradients()
            self._compare(own, expected, found=steps.gradients, when=f"step {number + 1}: ")
            have = [(stage, name) for stage, name, grad in own if grad is not None]
            steps.seen.update(pair for pairs in self.ranks.gather(have) for pair in pairs)
            steps.losses.append((result.loss, loss))
            steps.norms.append((result.grad_norm, norm))
        return steps

    def _compare_weights(self) -> Comparison:
        expected = None if self.reference is None else self.reference.weights()
        return self._compare(self.split.weights(), expected)

    def _compare(
        self,
        own: StageTensors,
        expected: Expected | None,
        *,
        found: Comparison | None = None,
        when: str = "",
    ) -> Comparison:
        found = Comparison() if found is None else found
        compare_named(found, own, expected, tolerance=self.tolerance, group=self.group, when=when)
        return found

    def _add_missing_gradients(self, steps: StepsFound) -> None:
        trained = [(fact.stage, name) for fact in self.facts for name in fact.trained]
        missing = [pair for pair in trained if pair not in steps.seen]
        num_seen = len(trained) - len(missing)
        if self.preparation.is_library:
            assert self.reference is not None  # the caller looked
            had = {name for name, grad in self.reference.gradients().items() if grad is not None}
            unused = [name for _, name in missing if name not in had]
            missing = [(stage, name) for stage, name in missing if name in had]
            if unused:
                self.report.notes.append(
                    f"{len(unused)} trained parameters get no gradient, neither here nor in the "
                    f"library's model: {', '.join(unused[:4])}{' ...' if unused[4:] else ''}"
                )
        self._row(
            "trained ones have a gradient",
            not missing,
            f"{num_seen} of {len(trained)}",
            [f"{name} (stage {stage}) has none in any step" for stage, name in missing],
        )

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

    def _add_numbers(self, name: str, pairs: Sequence[tuple[float, float]]) -> None:
        apart = max(abs(ours - theirs) for ours, theirs in pairs)
        wrong = [
            f"step {step}: {ours!r} instead of {theirs!r}"
            for step, (ours, theirs) in enumerate(pairs, start=1)
            if not numbers_agree(ours, theirs, tolerance=self.tolerance)
        ]
        values = ", ".join(f"{ours:.6f}" for ours, _ in pairs[:3])
        how = "equal to the bit" if apart == 0 else f"{apart:.1e} apart"
        self._row(name, not wrong, f"{values}{' ...' if pairs[3:] else ''}: {how}", wrong)


def check_split(
    context: DistributedContext,
    *,
    schedule: Schedule,
    source: ModelSource,
    build: Build,
    make_batches: Callable[[Preparation], Callable[[int], list[MicroBatch]]],
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
        make_batches: what was prepared -> (number of a step -> its micro-batches).
        tolerance: None: 0, or 1e-6 where stages share a weight.
        layers: the model is cut to so many; None: the whole model.

    Returns:
        Whether it passed, the same on all ranks.

    Raises:
        UserError: there is nothing to check: wrong paths, keys or numbers of stages.
    """
    options: dict[str, Any] = dict(build=build, seed=seed, trust_remote_code=trust_remote_code)
    ranks = Ranks.of(context.pp_group)
    with tempfile.TemporaryDirectory(prefix="stageline_check_") as own_folder:
        folder = Path(ranks.gather(own_folder)[0])  # of rank 0, on this machine
        make = functools.partial(prepare, source, folder, layers=layers, reference=reference)
        preparation = ranks.on_first(lambda: make(**options))
        assert preparation is not None  # rank 0 made one
        report.notes += preparation.notes
        stages, with_whole = schedule.stages_of(context.pp_rank), ranks.rank == 0
        loaded, problem = _load(
            preparation, stages, schedule.num_stages, with_whole=with_whole, **options
        )
        problems = dict.fromkeys(text for text in ranks.gather(problem) if text)
        if problems:
            report.add("checkpoint fits the model", False, "it does not load", list(problems))
        else:
            whole, models = loaded
            runner = PipelineRunner(
                models, device=context.device, group=context.pp_group, schedule=schedule
            )
            check_filled_stages(models, ranks=ranks, checkpoint=preparation.source.model_path)
            split, batches = Split(runner, loss_fn=loss_fn), make_batches(preparation)
            check = SplitCheck(
                split, whole, preparation, batches=batches, tolerance=tolerance, report=report
            )
            check.run(steps=steps)
        return ranks.gather(report.passed)[0]  # all wait here before the folder is removed


def _load(
    preparation: Preparation,
    stages: Sequence[int],
    num_stages: int,
    *,
    build: Build,
    with_whole: bool,
    seed: int,
    **options: Any,
) -> tuple[Any, str]:
    """(the whole model or None, this rank's stages), or why the checkpoint does not fit."""
    try:
        whole = None
        if with_whole:
            whole = load_whole(preparation, build=build, seed=seed, **options)
        source = preparation.source
        models = [build(stage=stage, num_stages=num_stages, source=source) for stage in stages]
    except CheckpointMismatch as error:
        return None, str(error)
    for model in models:
        start_lora(model, seed=seed)
    return (whole, models), ""
