"""Compare the stages of a model with the whole one, with its real weights: `stageline check`."""

import json
import math
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from stageline.checkpoint.load import CheckpointMismatch
from stageline.distributed.ranks import Ranks
from stageline.pipeline.schedules import Schedule
from stageline.pipeline.stage_passes import MicroBatch
from stageline.tables import format_table
from stageline.training.loss_part import LossPart, StepLoss
from stageline.verify.batches import (
    add_padding,
    change_first_token,
    change_images,
    run_chain,
)
from stageline.verify.compare import gap, hidden_states, run_stages, run_whole
from stageline.verify.names import check_filled_stages
from stageline.verify.whole_model import (
    Build,
    ModelSource,
    Preparation,
    ReferenceKind,
    load_unsplit,
    prepare,
    start_lora,
)

TIED_TOLERANCE = 1e-6
PADDING_TOLERANCE = 1e-5  # other shapes, so sums in another order
MAX_DETAILS = 8  # names under one row of the table; the file has all of them


@dataclass(frozen=True)
class ComparedRow:
    """One thing that was checked."""

    name: str
    passed: bool | None  # None where it could not be checked
    figure: str
    details: Sequence[str] = ()  # a line for each thing that is wrong

    @property
    def result(self) -> str:
        return {True: "ok", False: "FAILED", None: "not checked"}[self.passed]


@dataclass
class Report:
    """The findings of a check: a table for the screen and a JSON file."""

    facts: dict[str, str] = field(default_factory=dict)  # the two sides of the comparison
    rows: list[ComparedRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # everything cut, replaced or left out

    def add(self, name: str, passed: bool | None, figure: str, details: Sequence[str] = ()) -> None:
        """Add a row."""
        self.rows.append(ComparedRow(name, passed, figure, tuple(details)))

    @property
    def passed(self) -> bool:
        """Whether something was checked and nothing failed."""
        return bool(self.rows) and all(row.passed is not False for row in self.rows)

    def __str__(self) -> str:
        width = max((len(key) for key in self.facts), default=0)
        lines = [f"{key:<{width}}  {value}" for key, value in self.facts.items()]
        for note in self.notes:
            lines += textwrap.wrap(f"note: {note}", 96, subsequent_indent="      ")
        cells = [("check", "result", "figure")]
        cells += [(row.name, row.result, row.figure) for row in self.rows]
        head, *body = format_table(cells, num_texts=3).splitlines()
        lines += ["", head, "-" * max(map(len, (head, *body)))]
        for line, row in zip(body, self.rows):
            lines += [line, *(f"    {detail}" for detail in row.details[:MAX_DETAILS])]
            if len(row.details) > MAX_DETAILS:
                lines.append(f"    and {len(row.details) - MAX_DETAILS} more")
        failed = [row.name for row in self.rows if row.passed is False]
        verdict = "passed: the split computes what the whole model computes"
        return "\n".join([*lines, "", f"FAILED: {', '.join(failed)}" if failed else verdict])

    def save(self, folder: str | Path) -> Path:
        """Write check.json; return its path."""
        path = Path(folder) / "check.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "passed": self.passed,
            "facts": self.facts,
            "notes": self.notes,
            "checks": [{**asdict(row), "result": row.result} for row in self.rows],
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path


@dataclass
class Comparison:
    """Values of stages, compared one by one with those of the whole model."""

    name: str  # names the row of the table
    tolerance: float  # absolute and relative; 0 asks for equal bits
    num_compared: int = 0
    largest: float = 0.0  # the greatest difference of two numbers
    differences: list[str] = field(default_factory=list)  # a line for each value that differs

    def add(self, at: str, ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
        """Compare one value; `at` begins the line about it."""
        if ours is None or theirs is None:
            has, lacks = ("stage", "whole model") if theirs is None else ("whole model", "stage")
            self.differences.append(f"{at}the {has} has one, the {lacks} has none")
            return
        self.num_compared += 1
        apart, limit = gap(ours, theirs), self.tolerance
        self.largest = max(self.largest, apart)
        is_close = apart == 0.0 or (
            0.0 < limit
            and apart < math.inf
            and torch.allclose(ours, theirs, rtol=limit, atol=limit, equal_nan=True)
        )
        if not is_close:
            self.differences.append(f"{at}{apart:.1e} apart")

    def add_to(self, report: Report, told: str = "") -> None:
        """Add the row of the table; `told` are words before its figure."""
        how = "to the bit" if self.largest == 0 else f"within {self.largest:.1e}"
        figure = f"{told}{self.num_compared} equal {how}"
        if self.differences:
            figure = f"{told}{len(self.differences)} of {self.num_compared} wrong, at most "
            figure += f"{self.largest:.1e} apart"
        report.add(self.name, not self.differences, figure, self.differences)


def check_split(
    schedule: Schedule,
    *,
    source: ModelSource,
    build: Build,
    make_batches: Callable[[Preparation, torch.nn.Module], Callable[[int], list[MicroBatch]]],
    loss_fn: Callable[..., Any],
    steps: int,
    tolerance: float | None,
    layers: int | None,
    reference: ReferenceKind,
    seed: int,
    trust_remote_code: bool,
    report: Report,
) -> None:
    """Compare all stages with the whole model, in this process; fill the report.

    Args:
        source: paths of config, weights and processor.
        build: (stage=, num_stages=, source=) -> a stage model, as training builds it.
        make_batches: (preparation, whole model) -> (number of a step -> its micro-batches).
        tolerance: None: 0, or 1e-6 where stages share a weight.
        layers: number of layers that the model is cut to; None: the whole model.

    Raises:
        UserError: there is nothing to check: wrong paths, keys or numbers of stages.
    """
    told: dict[str, Any] = dict(build=build, seed=seed, trust_remote_code=trust_remote_code)
    with tempfile.TemporaryDirectory(prefix="stageline_check_") as folder:
        made = prepare(source, Path(folder), layers=layers, reference=reference, **told)
        report.notes += made.notes
        try:
            whole = load_unsplit(made, **told)
            split: dict[str, Any] = {"num_stages": schedule.num_stages, "source": made.source}
            stages = [build(stage=stage, **split) for stage in range(schedule.num_stages)]
        except CheckpointMismatch as error:
            report.add("checkpoint fits the model", False, "it does not load", [str(error)])
            return
        check_filled_stages(stages, ranks=Ranks(0, 1, None), checkpoint=made.source.model_path)
        batches, part = make_batches(made, whole), LossPart.of(loss_fn)
    held = [(stage, *one) for stage in stages for one in stage.named_parameters()]
    homes = {name: f" (stage {stage.stage})" for stage, name, _ in reversed(held)}
    if tolerance is None:
        tolerance = TIED_TOLERANCE if len(held) > len(homes) else 0.0
    first, counts = batches(0), [str(stage.partition[stage.stage]) for stage in stages]
    shapes = ", ".join("x".join(map(str, batch["input_ids"].shape)) for batch in first)
    origin = "of transformers" if made.is_library else "on one stage"
    report.facts |= {
        "model": f"{made.config.model_type}, {sum(map(int, counts))} layers",
        "split": f"{len(stages)} stages of {', '.join(counts)} layers, {schedule.name}",
        "compared with": f"{type(whole).__name__} {origin}, in plain PyTorch",
        "micro-batches": f"{len(first)} of {shapes} tokens",
    }

    def loss_of(step: Sequence[MicroBatch]) -> StepLoss:
        counted = part.count(step)
        return StepLoss(
            part,
            num_targets=counted["num_targets"],
            counts=counted,
            num_micro_batches=len(step),
            scale=1.0,
            device=torch.device("cpu"),
        )

    # weights as they were loaded, and adapters that act
    for stage in stages:
        start_lora(stage, seed=seed)
    weights, theirs = Comparison("weights", 0.0), dict(whole.named_parameters())
    for stage, name, parameter in held:
        weights.add(f"{name} (stage {stage.stage}): ", parameter, theirs.get(name))
    weights.add_to(report)

    # every input of a stage must reach the loss; padding must not
    @torch.no_grad()
    def loss_in_evaluation(step: Sequence[MicroBatch]) -> float:
        return sum(loss.item() for loss in run_chain(stages, step, loss_fn=loss_of(step)))

    for stage in stages:
        stage.eval()
    loss = loss_in_evaluation(first)
    changes = {"first token": change_first_token(first, made.config)}
    if any(batch.get("pixel_values", torch.empty(0)).numel() for batch in first):
        changes["image"] = change_images(first)
    elif getattr(made.config, "vision_config", None) is not None:
        report.add("image changes the loss", None, "there is no image: add a dataset with images")
    for name, changed in changes.items():
        other = loss_in_evaluation(changed)
        differs = loss != other and math.isfinite(loss) and math.isfinite(other)
        report.add(f"{name} changes the loss", differs, f"{loss:.6f} -> {other:.6f}")
    if all("attention_mask" in batch for batch in first):
        apart = abs(loss - loss_in_evaluation(add_padding(first)))
        fits = apart <= PADDING_TOLERANCE * (1 + abs(loss))
        report.add("padding changes nothing", fits, f"{apart:.1e} apart")

    # where something random acts in training (dropout), both sides are compared without it
    def run_unsplit(step: Sequence[MicroBatch]) -> Any:
        return run_whole(whole, step, stages[0], loss_fn=loss_of(step), is_library=made.is_library)

    with torch.no_grad():
        one, two = (sum(run_unsplit(first[:1]).losses) for _ in range(2))
    is_random = one != two and not math.isnan(one)
    if is_random:
        report.notes.append(
            "two forward passes in training mode differ (dropout): compared in evaluation mode"
        )
    for model in (whole, *stages):
        model.train(not is_random)

    # forward and backward passes
    states = Comparison("hidden states between stages", tolerance)
    losses = Comparison(f"loss of {steps} steps", tolerance)
    gradients = Comparison(f"gradients of {steps} steps", tolerance)
    shown, trained, theirs_trained = [], set[str](), set[str]()
    for number in range(steps):
        step, at = batches(number), f"step {number + 1}: "
        expected = run_unsplit(step)
        found = run_stages(
            stages, step, loss_fn=loss_of(step), splits_backward=schedule.splits_backward
        )
        for border, ours, other_states in hidden_states(found, expected, step):
            place = f"stage {border} -> {border + 1} (stage {border}): {at}"
            states.add(place, ours, other_states)
        sums = [torch.tensor(sum(side.losses), dtype=torch.float64) for side in (found, expected)]
        losses.add(f"{at}{sums[0]:.6f}, expected {sums[1]:.6f}: ", *sums)
        shown.append(f"{sums[0]:.6f}")
        for name in dict.fromkeys((*expected.gradients, *found.gradients)):
            ours_theirs = found.gradients.get(name), expected.gradients.get(name)
            gradients.add(f"{name}{homes.get(name, ' (on no stage)')}: {at}", *ours_theirs)
        trained.update(found.gradients)
        theirs_trained.update(expected.gradients)
    if made.is_library and states.num_compared:
        states.add_to(report)
    losses.add_to(report, f"{', '.join(shown[:3])}: ")
    gradients.add_to(report)
    wanted = [  # transformers' model has no use for some either
        (name, stage.stage)
        for stage, name, parameter in held
        if parameter.requires_grad and (name in theirs_trained or not made.is_library)
    ]
    lacking = [
        f"{name} (stage {stage}) has none in any step"
        for name, stage in wanted
        if name not in trained
    ]
    figure = f"{len(wanted) - len(lacking)} of {len(wanted)}"
    report.add("trained ones have a gradient", not lacking, figure, lacking)
