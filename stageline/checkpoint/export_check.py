"""Proves that an exported folder computes what the checkpoint does.

The checkpoint's side is its stages, as training runs them; the engine gets them from a function, as
it knows no architecture. Without one, it is plain transformers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig

from stageline.checkpoint.adapter import find_base
from stageline.checkpoint.adapter_config import config_folder
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.answers import (
    Answer,
    answer_of_model,
    answer_of_stages,
    compare_answers,
)
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.checkpoint.host_memory import available_memory
from stageline.checkpoint.plain_model import (
    load_base,
    load_plain,
    load_with_peft,
    weight_sizes,
)
from stageline.checkpoint.probes import Inputs, make_probes
from stageline.checkpoint.vocabulary import token_ids_on_disk
from stageline.errors import CRASH
from stageline.model_folder import load_config

# a checkpoint's folder -> its stages in float32 on the CPU, or why there are none
StageMaker = Callable[[Path], Sequence[nn.Module] | str]
# largest difference of a logit allowed, as a share of the largest; both sides are computed in
# float32, so that the greater ones are what rounding the weights to a half type does
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COMPUTE = torch.float32


class ExportError(RuntimeError):
    """What was written does not compute what the checkpoint does."""

    exit_code = CRASH
    kind = "export"


@dataclass(frozen=True)
class Verdict:
    """How an export was compared.

    Attributes:
        reference: what it was compared with, in words.
        difference: largest difference of a logit, as a share of the largest.
        tolerance: how much was allowed.
        probes: what was tried: text, image.
        notes: what was not compared, and why.
    """

    reference: str
    difference: float
    tolerance: float
    probes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def lacks_memory(source: Path, *, trust_remote_code: bool = False) -> str | None:
    """Why a comparison does not fit into this machine's memory; None: it fits.

    Two models in float32, though they are never there at once: loading one has peaks.
    """
    available = available_memory()
    if available is None:
        return None
    is_adapter = (source / ADAPTER_CONFIG).exists()
    count, _ = weight_sizes(find_base(source) if is_adapter else source)
    config = read_config_of_base(source, trust_remote_code=trust_remote_code)
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", 0)
    needed = 2 * count * COMPUTE.itemsize + 64 * vocab_size * COMPUTE.itemsize * 8
    if needed <= available:
        return None
    return (
        f"comparing needs {needed / 1e9:.1f} GB of host memory (twice the model in float32), "
        f"{available / 1e9:.1f} GB are free"
    )


def read_config_of_base(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model folder, or of the model that an adapter belongs to."""
    return load_config(config_folder(folder), trust_remote_code=trust_remote_code)


def check_export(
    source: Path,
    exported: Path,
    *,
    rounded_to: torch.dtype | None,
    make_stages: StageMaker | None = None,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
) -> Verdict:
    """Compares logits and greedy tokens of a checkpoint and of what was exported of it.

    Args:
        adapters: what was added to it.
        rounded_to: a half type that weights were rounded to; None: no weight was.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    config = read_config_of_base(source, trust_remote_code=trust_remote_code)
    told = [source, *(adapters.paths if adapters else ())]
    new_ids = sorted({token for folder in told for token in token_ids_on_disk(folder)})
    probes, note = make_probes(
        config, exported, new_ids=new_ids, trust_remote_code=trust_remote_code
    )
    notes = [] if note is None else [f"compared without an image: {note}"]
    expected, reference, why = _expected(source, probes, make_stages, adapters, trust_remote_code)
    notes += [] if why is None else [why]
    model = _load_exported(exported, trust_remote_code=trust_remote_code)
    tolerance = TOLERANCE[rounded_to or COMPUTE]
    worst = 0.0
    for name, inputs in probes.items():
        found = compare_answers(expected[name], answer_of_model(model, inputs), tolerance=tolerance)
        if not found.difference <= tolerance:  # also when it is NaN
            raise ExportError(
                f"the exported model's logits differ from the checkpoint's by "
                f"{found.difference:.2e} of the largest ({name}, compared with {reference}), at "
                f"most {tolerance} was expected: what was written is not the same model. Nothing "
                "was kept; export with --dtype float32, and report this."
            )
        if found.wrong_tokens:
            raise ExportError(
                f"the exported model generates other tokens than the checkpoint in "
                f"{found.wrong_tokens} rows ({name}, compared with {reference}), though its "
                "logits agree: the same were expected, as nothing else decides about them. "
                "Nothing was kept; report this."
            )
        worst = max(worst, found.difference)
    return Verdict(reference, worst, tolerance, tuple(probes), tuple(notes))


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


def _load_exported(folder: Path, *, trust_remote_code: bool) -> nn.Module:
    """As its user would: an adapter through `peft` where that is installed."""
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
        adapted = load_with_peft(folder, base)
        if adapted is not None:
            return adapted
    return load_plain(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
