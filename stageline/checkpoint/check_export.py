"""Compares an exported folder with the checkpoint that it was made of.

Both answer the same probes in float32 on the CPU; two models in float32 need room in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stageline.checkpoint.adapter import config_folder, token_ids_on_disk
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.checkpoint.plain_model import (
    Answer,
    Inputs,
    answer_of_model,
    answer_of_stages,
    compare_answers,
    load_base,
    load_plain,
    load_with_peft,
    make_probes,
    tensor_dtypes,
)
from stageline.model_folder import load_config
from stageline.stage import Stage

# a checkpoint's folder -> its stages in float32 on the CPU, or why there are none
StageMaker = Callable[[Path], Sequence[Stage] | str]
# largest difference of a logit allowed, as a share of the largest; both sides are computed in
# float32, so that the greater ones are what rounding the weights to a half type does
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COMPUTE = torch.float32


class ExportError(RuntimeError):
    """An exported folder does not compute what the checkpoint does."""

    exit_code = 1
    kind = "export"


@dataclass(frozen=True)
class ExportVerdict:
    """Result of comparing an export.

    Attributes:
        reference: what it was compared with, in words.
        difference: largest difference of a logit, as a share of the largest.
        probes: what was tried: text, image.
        notes: what was not compared, and why.
    """

    reference: str
    difference: float
    tolerance: float
    probes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def check_export(
    source: Path,
    exported: Path,
    *,
    make_stages: StageMaker | None = None,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
) -> ExportVerdict:
    """Compares logits and greedy tokens of a checkpoint and of what was exported of it.

    Args:
        make_stages: makes the stages of the checkpoint; None: it answers in plain transformers.
        adapters: what was added to the checkpoint.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    config = load_config(config_folder(source), trust_remote_code=trust_remote_code)
    told = [source, *(adapters.paths if adapters else ())]
    new_ids = sorted({token for folder in told for token in token_ids_on_disk(folder)})
    probes, note = make_probes(
        config, exported, new_ids=new_ids, trust_remote_code=trust_remote_code
    )
    notes = [] if note is None else [f"compared without an image: {note}"]
    expected, reference, why = _expected(source, probes, make_stages, adapters, trust_remote_code)
    notes += [] if why is None else [why]
    model = _load_exported(exported, trust_remote_code=trust_remote_code)
    tolerance = TOLERANCE[_rounded_to(source, exported, is_sum=adapters is not None) or COMPUTE]
    worst = 0.0
    for name, inputs in probes.items():
        answer = answer_of_model(model, inputs)
        difference, wrong_rows = compare_answers(expected[name], answer, tolerance=tolerance)
        if not difference <= tolerance:  # also when it is NaN
            raise ExportError(
                f"The logits of {exported} differ from the checkpoint's by {difference:.2e} of "
                f"the largest ({name}, compared with {reference}); at most {tolerance} is allowed. "
                "Export again with `dtype` float32, and report this."
            )
        if wrong_rows:
            raise ExportError(
                f"{exported} generates other tokens than the checkpoint in {wrong_rows} rows "
                f"({name}, compared with {reference}), though its logits agree. Report this."
            )
        worst = max(worst, difference)
    return ExportVerdict(reference, worst, tolerance, tuple(probes), tuple(notes))


def _rounded_to(source: Path, exported: Path, *, is_sum: bool) -> torch.dtype | None:
    """The half type that weights were rounded to; None: no weight was."""
    is_sum |= (source / ADAPTER_CONFIG).exists() and not (exported / ADAPTER_CONFIG).exists()
    written = tensor_dtypes(exported)
    if not is_sum and written == tensor_dtypes(source):
        return None
    return next((half for half in (torch.bfloat16, torch.float16) if half in written), None)


def _expected(
    source: Path,
    probes: dict[str, Inputs],
    make_stages: StageMaker | None,
    adapters: Adapters | None,
    trust_remote_code: bool,
) -> tuple[dict[str, Answer], str, str | None]:
    """Answers of the checkpoint, of whom they are, and why not of its stages."""
    why = None
    if make_stages is not None and adapters is None:
        stages = make_stages(source)
        if not isinstance(stages, str):
            answers = {name: answer_of_stages(stages, inputs) for name, inputs in probes.items()}
            return answers, f"its {len(stages)} stages", None
        why = f"compared with plain transformers, not with stages: {stages}"
    model = load_plain(source, dtype=COMPUTE, trust_remote_code=trust_remote_code)
    if adapters is not None:
        adapters.merge(model)
    answers = {name: answer_of_model(model, inputs, steps=True) for name, inputs in probes.items()}
    return answers, "the checkpoint in plain transformers", why


def _load_exported(folder: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Loads an export as its user does: an adapter through `peft` where that is installed."""
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
        adapted = load_with_peft(folder, base)
        if adapted is not None:
            return adapted
    return load_plain(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
