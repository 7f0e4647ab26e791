"""Compares the stages of one family, cut down, with the library's own whole model.

Loss, logits and every gradient, with padding and without, and with pictures where the family sees
them. Weights travel as in life: the whole model is saved, each stage reads its own names.

Shapes: B rows, T tokens, V vocabulary.
"""

import datetime
import functools
import math
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from stageline.checking.batches import run_chain
from stageline.checking.proof import loss_of
from stageline.checking.shrink import layer_period, shrink_config
from stageline.data.batches.batch import IGNORE
from stageline.errors import UserError
from stageline.model_folder import special_tokens
from stageline.pipeline.stage_passes import MicroBatch, model_inputs
from stageline.stages.example_batch import picture_batch

if TYPE_CHECKING:
    from stageline.stages.base import StageModel

Said = Literal["equal", "close", "WRONG", "crash", "refused", "no model"]
# (folder with config and weights, stage, number of stages, dtype) -> the stage, filled
BuildStage = Callable[[Path, int, int, torch.dtype], Any]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5}  # a sum in another order
SPREAD = 0.1  # of the noise on all weights: norms of ones and gates of zeros hide faults
LEAST_LAYERS, MOST_LAYERS = 4, 8
TEXT_LENGTHS = ((11, 4), (7, 0))  # tokens, padding of the last row
PICTURES = ((2, 0, 1), (0, 0), (1, 1))  # of each row of each micro-batch


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


@dataclass(frozen=True)
class FamilyResult:
    """What was found about one family, split one way.

    Attributes:
        detail: the refusal's sentence, the exception, or where the difference is.
        largest: the greatest difference, as a share; 0 for equal bits.
    """

    name: str
    kind: str
    num_stages: int
    is_tied: bool
    said: Said
    detail: str = ""
    largest: float = 0.0
    dtype: str = "float64"

    def row(self) -> dict[str, Any]:
        return asdict(self)


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
        logits.append(made.detach())
    got_logits: list[torch.Tensor] = []

    def keep(output: Any, batch: MicroBatch) -> torch.Tensor:
        got_logits.append((output[0] if isinstance(output, tuple) else output).detach())
        return loss_of(output, batch)

    got = run_chain(stages, list(batches), loss_fn=keep)
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
        whole: with random weights, norms and biases, in `dtype`.
        problem: why there is no model; "" where there is one.
    """

    name: str
    kind: str
    folder: Path
    is_tied: bool = False
    whole: Any = None
    dtype: torch.dtype = torch.float64
    batches: list[MicroBatch] = field(default_factory=list)
    problem: str = ""


def make_family(
    config: PretrainedConfig, auto_class: Any, folder: Path, *, name: str, is_tied: bool | None
) -> Family:
    """Builds, fills, runs and saves the cut-down whole model.

    Args:
        config: at its full size.
        auto_class: AutoModelForCausalLM or AutoModelForImageTextToText.
        is_tied: whether the head has the embeddings' weight; None: as the configuration says.
    """
    kind = "vision" if "ImageText" in auto_class.__name__ else "text"
    family = Family(name, kind, folder)
    try:
        small = shrink_config(config, num_layers=max(4, min(2 * layer_period(config), MOST_LAYERS)))
        for one in {
            id(part): part for part in (small, small.get_text_config(decoder=True))
        }.values():
            if is_tied is not None and hasattr(one, "tie_word_embeddings"):
                one.tie_word_embeddings = is_tied
        _fill(family, small, auto_class)
        family.whole.save_pretrained(folder)
        # as one gets it: read again, values of buffers may come out otherwise
        read = auto_class.from_pretrained(folder, dtype=family.dtype, local_files_only=True)
        read.train()
        family.problem = _lost(family.whole, read)
        family.whole = read
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
            build(family.folder, stage, num_stages, family.dtype).train()
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
) -> list[FamilyResult]:
    """One verdict for each number of stages."""
    with tempfile.TemporaryDirectory() as folder:
        family = make_family(config, auto_class, Path(folder), name=name, is_tied=is_tied)
        return [judge(family, build, num_stages=number) for number in num_stages]


@torch.no_grad()
def randomise(whole: nn.Module, seed: int = 1) -> None:
    """Moves all weights off their start: biases off zero, norms off one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in whole.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=SPREAD)


def make_batches(whole: Any, kind: str, dtype: torch.dtype) -> list[MicroBatch]:
    """Micro-batches of different lengths: padded and full; of pictures many, none and some."""
    config = whole.config
    if kind == "vision":
        made = [
            picture_batch(config, whole, rows=rows, dtype=dtype, seed=seed, longer=seed)
            for seed, rows in enumerate(PICTURES)
        ]
    else:
        made = [_text_batch(config, *size, seed=seed) for seed, size in enumerate(TEXT_LENGTHS)]
    ends = torch.tensor(sorted(special_tokens(config)), dtype=torch.long)
    for batch in made:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        batch["labels"] = ids.masked_fill((mask == 0) | torch.isin(ids, ends), IGNORE)
    return made


def _text_batch(config: PretrainedConfig, length: int, padding: int, *, seed: int) -> MicroBatch:
    text, special = config.get_text_config(decoder=True), special_tokens(config)
    most = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    letters = torch.tensor([one for one in range(3, most) if one not in special])
    generator = torch.Generator().manual_seed(seed)
    ids = letters[torch.randint(len(letters), (2, length), generator=generator)]
    mask = torch.ones_like(ids)
    if padding:
        pad = getattr(text, "pad_token_id", None)
        ids[-1, -padding:] = pad if isinstance(pad, int) and pad >= 0 else 0
        mask[-1, -padding:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _fill(family: Family, config: PretrainedConfig, auto_class: Any) -> None:
    """Builds the model in float64, or in float32 where an operator of it does not know that."""
    problem: Exception | None = None
    for dtype in TOLERANCES:
        try:
            torch.manual_seed(0)
            # built in its dtype, as stages are: the value of a buffer may depend on it
            whole = auto_class.from_config(config, dtype=dtype).train()
            randomise(whole)
            batches = make_batches(whole, family.kind, dtype)
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
    return f"from_pretrained of the library gives other weights than were saved: {', '.join(lost)}"


def _is_tied(whole: Any) -> bool:
    head = whole.get_output_embeddings()
    return head is not None and head.weight is whole.get_input_embeddings().weight


def told(error: BaseException) -> str:
    """An exception in one line, with the place in the library or here where it rose."""
    at = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(at[-1].filename).name}:{at[-1].lineno})" if at else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}"


# -- writes docs/models.md: one row a name, from verdicts -----------------------------------------

ORDER = ("WRONG", "crash", "refused", "no model", "close", "equal")
WORDS = {
    "equal to the bit": "equal to the bit",
    "equal": "equal, sums in another order",
    "close": "close",
    "WRONG": "**wrong**",
    "crash": "**crash**",
    "refused": "refused",
    "no model": "not tried",
}
HEAD = """# Models: which families are split exactly

Every name that transformers {transformers} lists for causal language models and for
image-text-to-text models, tried on {date} with PyTorch {torch} on a CPU.

How a name is tried: its configuration is cut down to 4 to 8 layers, with every kind of layer
among them. Weights, norms and biases are random; multipliers are set to something other than 1.
The stages are filled from a saved folder, each with the parameters of its own, and run one after
the other in one process, on 2 and on 3 stages, with and without a tied head. Only detached
tensors cross a border, as between processes. Losses, logits and **every gradient** are compared
with those of the library's whole model, on a padded and on a full micro-batch; for
vision-language models on rows with several images, one image and none. A family that is not in
this table, or that another version of the library changed, is compared in the same way when a run
begins (`prove_split`).

- **equal to the bit**: all bits of losses, logits and gradients are the same, on each split.
- **equal, sums in another order**: the difference is at most 1e-13 of the largest number in float64
  (1e-5 in float32). The gradients of a weight that two stages hold are added up in another order.
- **close**: the difference is larger than that, and at most 1e-9 (1e-4 in float32).
- **refused**: the run ends before it begins, with one sentence that names the family.
- **not tried**: there is no cut-down model, for the reason given.

`float32` stands where a family has operators that do not support float64. The table is made by
`python benchmarks/families.py --all --markdown docs/models.md`.

{counts}
"""
TITLES = {"text": "Causal language models", "vision": "Vision-language models"}
COLUMNS = "| name | stages | result | computed in | remark |"


def write_page(verdicts: Sequence[FamilyResult], path: Path) -> None:
    """Writes the page."""
    text = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
        counts=_counts(verdicts),
    )
    for kind, title in TITLES.items():
        rows = _by_name([one for one in verdicts if one.kind == kind])
        text += f"\n## {title}\n\n{COLUMNS}\n|---|---|---|---|---|\n"
        text += "".join(_row(name, found) for name, found in sorted(rows.items()))
    path.write_text(text, encoding="utf-8")


def _by_name(verdicts: Sequence[FamilyResult]) -> dict[str, list[FamilyResult]]:
    found: dict[str, list[FamilyResult]] = {}
    for one in verdicts:
        found.setdefault(one.name, []).append(one)
    return found


def _worst(found: Sequence[FamilyResult]) -> FamilyResult:
    return min(found, key=lambda one: (ORDER.index(one.said), -one.largest))


def _result(found: Sequence[FamilyResult]) -> str:
    worst = _worst(found)
    if worst.said == "equal" and not worst.largest:
        return WORDS["equal to the bit"]
    figure = f" ({worst.largest:.0e})" if worst.said in ("equal", "close") else ""
    return WORDS[worst.said] + figure


def _row(name: str, found: Sequence[FamilyResult]) -> str:
    worst = _worst(found)
    stages = ", ".join(str(one) for one in sorted({one.num_stages for one in found}))
    if worst.said == "no model":
        stages = "-"
    detail = worst.detail.replace("|", "\\|") if worst.said != "equal" else ""
    dtype = worst.dtype if stages != "-" else "-"
    return f"| `{name}` | {stages} | {_result(found)} | {dtype} | {detail} |\n"


def _counts(verdicts: Sequence[FamilyResult]) -> str:
    lines = []
    for kind, title in TITLES.items():
        rows = _by_name([one for one in verdicts if one.kind == kind])
        results = [_result(found).split(" (")[0] for found in rows.values()]
        counted = ", ".join(
            f"{results.count(word)} {word}" for word in WORDS.values() if word in results
        )
        lines.append(f"- {title}: {len(rows)}; {counted}")
    return "\n".join(lines)
