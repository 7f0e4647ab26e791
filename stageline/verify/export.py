"""Compare an exported folder with the checkpoint that it was made of.

Both compute the logits of the same rows in float32 on the CPU, one model after the other.

Shapes: B rows, T tokens, V vocabulary.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from stageline.checkpoint.adapter import (
    fit_vocabulary,
    merge_adapters,
    read_adapter,
    token_ids_on_disk,
)
from stageline.checkpoint.files import ADAPTER_CONFIG
from stageline.checkpoint.plain_model import CLASSIFIER, load_base, load_plain, tensor_dtypes
from stageline.errors import UserError
from stageline.stage import Stage
from stageline.stages.example_batch import picture_batch
from stageline.verify.batches import draw_ids

# a checkpoint's folder -> its stages in float32 on the CPU, or why there are none
StageMaker = Callable[[Path], Sequence[Stage] | str]
Inputs = dict[str, torch.Tensor]
# largest difference of a logit allowed, as a share of the largest; both sides are computed in
# float32, so that the greater ones are what rounding the weights to a half type does
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COMPUTE = torch.float32
ROWS, TOKENS = 2, 12


class ExportError(RuntimeError):
    """An exported folder does not compute what the checkpoint does."""

    exit_code = 1
    kind = "export"


@dataclass(frozen=True)
class ExportVerdict:
    """Result of comparing an export."""

    reference: str  # the other side of the comparison, in words
    difference: float  # largest difference of a logit, as a share of the largest
    tolerance: float
    probes: tuple[str, ...]  # text, image
    notes: tuple[str, ...] = ()  # everything not compared, and the reason


@torch.no_grad()
def check_export(
    source: Path,
    exported: Path,
    *,
    make_stages: StageMaker | None = None,
    adapter_paths: Sequence[Path] = (),
    adapter_weights: Sequence[float] | None = None,
    trust_remote_code: bool = False,
) -> ExportVerdict:
    """Compare the logits of a checkpoint and of what was exported of it.

    Args:
        make_stages: makes the stages of the checkpoint; None: it answers in plain transformers.
        adapter_paths, adapter_weights: what was added to the checkpoint.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    code = trust_remote_code
    folders = [source, *adapter_paths]
    new_ids = sorted({token for folder in folders for token in token_ids_on_disk(folder)})
    notes = []

    # the export, as its user loads it: an adapter through peft where that is installed
    model: PreTrainedModel | None = None
    if (exported / ADAPTER_CONFIG).exists():
        model = load_with_peft(exported, load_base(exported, dtype=COMPUTE, trust_remote_code=code))
    if model is None:
        model = load_plain(exported, dtype=COMPUTE, trust_remote_code=code)
    rows = {"text": _text_rows(model.config, new_ids)}
    if getattr(model.config, "vision_config", None) is not None:
        try:
            rows["image"] = picture_batch(model.config, model, rows=(1,), dtype=COMPUTE)
        except UserError as error:
            notes.append(f"compared without an image: {error}")
    found = {name: _logits(model, inputs) for name, inputs in rows.items()}
    del model

    # the checkpoint
    stages = make_stages(source) if make_stages is not None and not adapter_paths else None
    if stages is None or isinstance(stages, str):
        if stages is not None:
            notes.append(f"compared with plain transformers, not with stages: {stages}")
        reference = "the checkpoint in plain transformers"
        plain = load_plain(source, dtype=COMPUTE, trust_remote_code=code)
        merge_adapters(plain, adapter_paths, adapter_weights)
        expected = {name: _logits(plain, inputs) for name, inputs in rows.items()}
    else:
        reference = f"its {len(stages)} stages"
        expected = {name: _logits_of_stages(stages, inputs) for name, inputs in rows.items()}

    # half types to which weights were rounded
    written = tensor_dtypes(exported)
    is_merged = (source / ADAPTER_CONFIG).exists() and not (exported / ADAPTER_CONFIG).exists()
    is_rounded = is_merged or bool(adapter_paths) or written != tensor_dtypes(source)
    halves = [half for half in (torch.bfloat16, torch.float16) if is_rounded and half in written]
    tolerance = TOLERANCE[halves[0] if halves else COMPUTE]
    worst = 0.0
    for name, logits in expected.items():
        difference = ((found[name] - logits).abs().max() / logits.abs().max()).item()
        if not difference <= tolerance:  # also when it is NaN
            raise ExportError(
                f"The logits of {exported} differ from the checkpoint's by {difference:.2e} of "
                f"the largest ({name}, compared with {reference}); at most {tolerance} is allowed. "
                "Export again with `dtype` float32, and report this."
            )
        worst = max(worst, difference)
    return ExportVerdict(reference, worst, tolerance, tuple(rows), tuple(notes))


def load_with_peft(folder: Path, base: PreTrainedModel) -> PreTrainedModel | None:
    """The base with an adapter put on by `peft`, in place; None where that is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    fit_vocabulary(base, [read_adapter(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it asks transformers by an old name
        adapted = PeftModel.from_pretrained(base, folder, local_files_only=True)
        return cast(PreTrainedModel, adapted.get_base_model()).eval()


def _text_rows(config: PretrainedConfig, new_ids: Sequence[int]) -> Inputs:
    """Fixed random ids [B, T] of text; the first row begins with tokens that training added."""
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or 2 * TOKENS
    length = max(1, min(TOKENS, longest // 2))
    ids = draw_ids(config, ROWS, length)
    shown = torch.tensor(new_ids[:length], dtype=ids.dtype)
    ids[0, : len(shown)] = shown
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _logits(model: PreTrainedModel, inputs: Inputs) -> torch.Tensor:
    """Logits [B, T, V] of a model of transformers; of a reward model [B, 1, 1], the rewards."""
    if type(model).__name__.endswith(CLASSIFIER):
        rows = zip(*(value.split(1) for value in inputs.values()), strict=True)
        # one without a padding token takes single rows only
        logits = [model(**dict(zip(inputs, row, strict=True))).logits for row in rows]
        return torch.cat(logits).float()[:, None]
    output = model(**inputs, use_cache=False) if model.can_generate() else model(**inputs)
    return getattr(output, "logits", output[0]).float()


def _logits_of_stages(stages: Sequence[Stage], inputs: Inputs) -> torch.Tensor:
    """Return the logits of `_logits` from stages that run one after the other, as in training."""
    values: tuple[torch.Tensor, ...] = (inputs["input_ids"],)
    for stage in stages:
        output = stage(*values, **inputs)
        values = output if isinstance(output, tuple) else (output,)
    logits = values[0].float()
    return logits[:, -1:] if getattr(stages[-1], "gives_scores", False) else logits
