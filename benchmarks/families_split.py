"""Compares the stages of one family, cut down, with the library's own whole model.

Loss, logits and every gradient, with padding and without, and with pictures where the family sees
them. Weights travel as in life: the whole model is saved, each stage reads its own names.

Shapes: B rows, T tokens, V vocabulary.
"""

import functools
import math
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from benchmarks.families_page import FamilyResult, Said
from stageline.errors import UserError
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.shrink import layer_period, shrink_config
from stageline.verify.batches import loss_of, probe_batches, run_chain, with_facts

if TYPE_CHECKING:
    from stageline.stages.base import StageModel

# (folder with config and weights, stage, number of stages, dtype) -> the stage, filled
BuildStage = Callable[[Path, int, int, torch.dtype], Any]
DTYPES = (torch.float64, torch.float32)  # the first that all operators of a model know
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 4e-3}  # another order
SPREAD = 0.1  # of the noise on all weights: norms of ones and gates of zeros hide faults
LEAST_LAYERS, MOST_LAYERS = 4, 8


@dataclass(frozen=True)
class LargestGaps:
    """How far stages and whole model are apart, as shares of the largest number there is.

    Attributes:
        is_same: all bits of losses, logits and gradients are.
        first: the first parameter, in the model's order, whose gradient is off; "" for none.
    """

    loss: float
    logits: float
    gradient: float
    is_same: bool
    first: str = ""

    @property
    def largest(self) -> float:
        """The greatest of all."""
        return max(self.loss, self.logits, self.gradient)


def compare_split(
    whole: nn.Module, stages: Sequence[Any], batches: Sequence[MicroBatch], *, tolerance: float
) -> LargestGaps:
    """Runs both on all batches, forward and backward; only detached tensors cross borders.

    Args:
        whole: a model of transformers, with the weights that the stages have.
        tolerance: above it a gradient is named as off.
    """
    losses, logits = [], []
    whole.zero_grad()
    for batch in batches:
        made = whole(**model_inputs(batch), use_cache=False).logits
        loss = loss_of(made, batch)
        loss.backward()
        losses.append(loss.detach())
        logits.append(real(made, batch))
    got_logits: list[torch.Tensor] = []

    def keep(output: Any, batch: MicroBatch) -> torch.Tensor:
        got_logits.append(real(output[0] if isinstance(output, tuple) else output, batch))
        return loss_of(output, batch)

    got = run_chain(stages, with_facts(stages, batches), loss_fn=keep)
    want = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    have = _gradients(stages)
    scale = max((float(value.abs().max()) for value in want.values()), default=0.0) or 1.0
    gradients = {
        name: _apart(have.get(name), want.get(name), scale)
        for name in dict.fromkeys([*want, *have])
    }
    return LargestGaps(
        loss=max(_apart(a.detach(), b, float(b.abs()) or 1.0) for a, b in zip(got, losses)),
        logits=max(_apart(a, b, float(b.abs().max())) for a, b in zip(got_logits, logits)),
        gradient=max(gradients.values(), default=0.0),
        is_same=_same(got, losses) and _same(got_logits, logits) and not any(gradients.values()),
        first=next((name for name, gap in gradients.items() if gap > tolerance), ""),
    )


def real(logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Logits without those of padding: stages may leave its mask out, since no loss reads them."""
    is_padding = batch["attention_mask"][:, -logits.shape[1] :, None] == 0
    return logits.detach().masked_fill(is_padding, 0.0)


def _gradients(stages: Sequence["StageModel"]) -> dict[str, torch.Tensor]:
    """By name; a weight on several stages: the step sums its gradients."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                known = found.get(name)
                found[name] = parameter.grad if known is None else known + parameter.grad
    return found


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, scale: float) -> float:
    if one is None or other is None:
        there = other if one is None else one
        # no gradient, and one of zeros, move a weight alike in all but weight decay
        return math.inf if there is not None and there.abs().max() > 0 else 0.0
    if one.shape != other.shape:
        return math.inf
    gap = (one.double() - other.double()).abs()
    gap = gap.masked_fill(one.isnan() & other.isnan(), 0.0)
    gap = gap.masked_fill((one == other) & one.isinf(), 0.0)  # logits of masked tokens
    return math.inf if gap.isnan().any() else float(gap.max()) / (scale or 1.0)


def _same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one.detach(), other) for one, other in zip(ours, theirs, strict=True))


# -- one family ---------------------------------------------------------------------------------


@dataclass
class Family:
    """A cut-down model of one family in a folder.

    Attributes:
        whole: with random weights, norms and biases, in `dtype`, on `device`.
        problem: why there is no model; "" where there is one.
    """

    name: str
    kind: str
    folder: Path
    is_tied: bool = False
    whole: Any = None
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    batches: list[MicroBatch] = field(default_factory=list)
    problem: str = ""


def make_family(
    config: PretrainedConfig,
    auto_class: Any,
    folder: Path,
    *,
    name: str,
    is_tied: bool | None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: str = "cpu",
) -> Family:
    """Builds, fills, runs and saves the cut-down whole model.

    Args:
        config: at its full size.
        auto_class: AutoModelForCausalLM or AutoModelForImageTextToText.
        is_tied: whether the head has the embeddings' weight; None: as the configuration says.
        dtypes: the first that works is taken.
        device: where it is compared; it is made on the host.
    """
    kind = "vision" if "ImageText" in auto_class.__name__ else "text"
    family = Family(name, kind, folder, device=device)
    try:
        small = shrink_config(config, num_layers=max(4, min(2 * layer_period(config), MOST_LAYERS)))
        for one in {
            id(part): part for part in (small, small.get_text_config(decoder=True))
        }.values():
            if is_tied is not None and hasattr(one, "tie_word_embeddings"):
                one.tie_word_embeddings = is_tied
        _fill(family, small, auto_class, dtypes)
        family.whole.save_pretrained(folder)
        # as one gets it: read again, values of buffers may come out otherwise
        read = auto_class.from_pretrained(folder, dtype=family.dtype, local_files_only=True)
        read.train()
        family.problem = _lost(family.whole, read)
        family.whole = read.to(device)
        family.batches = [
            {name: value.to(device) for name, value in batch.items()} for batch in family.batches
        ]
    except Exception as error:  # of some hundred models
        family.problem = told(error)
    return family


def judge(family: Family, build: BuildStage, *, num_stages: int) -> FamilyResult:
    """Splits a family, and compares."""
    result = functools.partial(
        FamilyResult,
        name=family.name,
        kind=family.kind,
        num_stages=num_stages,
        is_tied=family.is_tied,
        dtype=str(family.dtype).removeprefix("torch."),
    )
    if family.problem:
        return result(said="no model", detail=family.problem)
    tolerance = TOLERANCES[family.dtype]
    try:
        stages = [
            build(family.folder, stage, num_stages, family.dtype).train().to(family.device)
            for stage in range(num_stages)
        ]
        gaps = compare_split(family.whole, stages, family.batches, tolerance=tolerance)
    except UserError as error:
        return result(said="refused", detail=" ".join(str(error).split()))
    except Exception as error:
        return result(said="crash", detail=told(error))
    if gaps.is_same:
        return result(said="equal")
    if gaps.largest <= ROUNDING[family.dtype]:
        return result(said="equal", largest=gaps.largest)
    said: Said = "close" if gaps.largest <= tolerance else "WRONG"
    detail = f"loss {gaps.loss:.0e}, logits {gaps.logits:.0e}, gradients {gaps.gradient:.0e}"
    detail += f", first {gaps.first}" if gaps.first else ""
    return result(said=said, detail=detail, largest=gaps.largest)


def try_family(
    config: PretrainedConfig,
    auto_class: Any,
    build: BuildStage,
    *,
    name: str,
    num_stages: Sequence[int] = (2, 3),
    is_tied: bool | None = None,
    **made: Any,
) -> list[FamilyResult]:
    """One verdict for each number of stages; `made`: see `make_family`."""
    with tempfile.TemporaryDirectory() as folder:
        family = make_family(config, auto_class, Path(folder), name=name, is_tied=is_tied, **made)
        return [judge(family, build, num_stages=number) for number in num_stages]


@torch.no_grad()
def randomise(whole: nn.Module, seed: int = 1) -> None:
    """Moves all weights off their start: biases off zero, norms off one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in whole.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=SPREAD)


def _fill(
    family: Family, config: PretrainedConfig, auto_class: Any, dtypes: Sequence[torch.dtype]
) -> None:
    """Builds the model in the first of these types that all its operators know."""
    problem: Exception | None = None
    for dtype in dtypes:
        try:
            torch.manual_seed(0)
            # built in its dtype, as stages are: the value of a buffer may depend on it
            whole = auto_class.from_config(config, dtype=dtype).train()
            randomise(whole)
            tower = whole if family.kind == "vision" else None
            batches = probe_batches(whole.config, dtype, tower=tower)
            for batch in batches:
                loss = loss_of(whole(**model_inputs(batch), use_cache=False).logits, batch)
                loss.backward()
                if not loss.isfinite():
                    raise ArithmeticError("its loss is no finite number")
        except Exception as error:
            problem = error
            continue
        family.whole, family.batches, family.dtype = whole, batches, dtype
        family.is_tied = _is_tied(whole)
        return
    assert problem is not None  # there are dtypes to try
    raise problem


def _lost(saved: nn.Module, read: nn.Module) -> str:
    """Says which weights the library itself does not read as it saved them; "" for none."""
    values = dict(saved.named_parameters())
    lost = [
        name
        for name, value in read.named_parameters()
        if name not in values or not torch.equal(values[name], value)
    ]
    if not lost:
        return ""
    return f"from_pretrained of transformers gives other weights than were saved: {', '.join(lost)}"


def _is_tied(whole: Any) -> bool:
    head = whole.get_output_embeddings()
    return head is not None and head.weight is whole.get_input_embeddings().weight


def told(error: BaseException) -> str:
    """An exception in one line, with the place in the library or here where it rose."""
    at = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(at[-1].filename).name}:{at[-1].lineno})" if at else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}"
