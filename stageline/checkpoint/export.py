"""Makes one plain Hugging Face folder of a checkpoint: a whole model, or an adapter for `peft`.

Works in host memory with the whole model, on one process. Not here: saving during a run.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from stageline.checkpoint.adapter import attach_adapter, find_base
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    find_checkpoint,
)
from stageline.checkpoint.layout import (
    MANIFEST,
    discard,
    draft_name,
    publish,
    refuse_existing,
    verify,
)
from stageline.checkpoint.whole import load_whole
from stageline.errors import UserError
from stageline.model_folder import load_config
from stageline.modules.lora import merge_lora

MAX_SHARD_SIZE = "5GB"
# largest difference of a logit allowed, as a share of the largest logit
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".py"}
_NOT_COPIED = {"config.json", "generation_config.json", MANIFEST, ADAPTER_CONFIG}


class ExportError(RuntimeError):
    """What was written does not compute what the checkpoint does."""


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        folder: the new folder.
        is_adapter: an adapter, whose base is elsewhere.
        difference: largest difference of a logit, as a share of the largest; None: not compared.
    """

    folder: Path
    is_adapter: bool
    difference: float | None


def export_folder(
    source: str | Path,
    target: str | Path,
    *,
    merge: bool = False,
    dtype: torch.dtype | None = None,
    verifies: bool = True,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Exports a checkpoint folder.

    Args:
        source: a folder that a run saved, or any Hugging Face model or adapter folder.
        target: a new folder.
        merge: adds an adapter to its base; the result is a whole model.
        dtype: of the weights in the new folder; None: as they are.
        verifies: loads the result in plain transformers and compares logits.

    Raises:
        UserError: the source is not whole, or the target exists.
        ExportError: the result computes something else.
    """
    source = find_checkpoint(source)
    target = Path(target).absolute()
    refuse_existing(target)
    if (source / MANIFEST).exists():
        verify(source)
    is_adapter = (source / ADAPTER_CONFIG).exists()
    if merge and not is_adapter:
        raise UserError(
            f"--merge came with {source}, an adapter folder was expected: there is nothing to "
            "merge in a whole model. Leave --merge out."
        )
    keeps_adapter = is_adapter and not merge
    draft = target.parent / draft_name(target)
    draft.mkdir(parents=True)
    try:
        expected = None
        if verifies or not keeps_adapter:
            model = load_plain(source, trust_remote_code=trust_remote_code)
            expected = probe(model) if verifies else None
            if not keeps_adapter:
                _write_model(merge_lora(model), draft, dtype)
            del model
        if keeps_adapter:
            _write_adapter(source, draft, dtype)
        if merge:
            _copy_side_files(find_base(source), draft)
        _copy_side_files(source, draft)
        difference = None
        if expected is not None:
            difference = _compare(draft, expected, dtype=dtype, trust_remote_code=trust_remote_code)
        publish(draft, target, facts={"kind": "export"}, known={})
    except BaseException:
        discard(draft)
        raise
    return ExportReport(folder=target, is_adapter=keeps_adapter, difference=difference)


def load_plain(folder: Path, *, trust_remote_code: bool = False) -> nn.Module:
    """The whole model of a folder in plain transformers on the CPU; an adapter is put on its base.

    Raises:
        UserError: weights are missing in the folder.
    """
    if (folder / ADAPTER_CONFIG).exists():
        base = load_plain(find_base(folder), trust_remote_code=trust_remote_code)
        return attach_adapter(base, folder).eval()
    config = load_config(folder, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    kwargs = {} if named is not None else {"trust_remote_code": trust_remote_code}
    model_class = named or transformers.AutoModelForCausalLM
    model = load_whole(model_class, folder, config, dtype="auto", **kwargs)
    return model.eval()


@torch.no_grad()
def probe(model: nn.Module) -> torch.Tensor:
    """Logits [2, 12, V] in float32 of fixed token ids, without images."""
    config = model.config
    vocab_size = config.get_text_config(decoder=True).vocab_size
    special = {
        value
        for one in (config, config.get_text_config(decoder=True))
        for name, value in vars(one).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    plain = torch.tensor([i for i in range(vocab_size) if i not in special])
    chosen = torch.randint(len(plain), (2, 12), generator=torch.Generator().manual_seed(0))
    ids = plain[chosen]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float()


def _compare(
    draft: Path, expected: torch.Tensor, *, dtype: torch.dtype | None, trust_remote_code: bool
) -> float:
    model = load_plain(draft, trust_remote_code=trust_remote_code)
    found = probe(model)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    dtype = dtype or next(model.parameters()).dtype
    if not difference <= TOLERANCE[dtype]:  # also when it is NaN
        raise ExportError(
            f"the exported model's logits differ from the checkpoint's by {difference:.2e} of the "
            f"largest, at most {TOLERANCE[dtype]} was expected in {dtype}: what was written is "
            "not the same model. Nothing was kept; export with --dtype float32, and report this."
        )
    return difference


def _write_model(model: PreTrainedModel, draft: Path, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(draft, max_shard_size=MAX_SHARD_SIZE)


def _write_adapter(source: Path, draft: Path, dtype: torch.dtype | None) -> None:
    shutil.copyfile(source / ADAPTER_CONFIG, draft / ADAPTER_CONFIG)
    tensors = load_file(source / ADAPTER_FILE)
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(tensors, draft / ADAPTER_FILE, metadata={"format": "pt"})


def _copy_side_files(source: Path, draft: Path) -> None:
    """Copies tokenizer, processor and code files; what the library wrote itself stays."""
    for path in sorted(source.iterdir()):
        is_index = path.name.endswith(".index.json")
        if path.suffix in _COPIED_SUFFIXES and path.name not in _NOT_COPIED and not is_index:
            shutil.copyfile(path, draft / path.name)
