"""Loads a folder in plain transformers, as a user of an exported model would. Knows no stages."""

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from stageline.checkpoint.adapter import attach_adapter, find_base, read_adapter
from stageline.checkpoint.adapter_config import config_folder
from stageline.checkpoint.adapter_rows import fit_vocabulary
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    open_tensors,
    weight_files,
)
from stageline.checkpoint.tasks import CLASSIFIER, is_scored
from stageline.checkpoint.whole import load_whole
from stageline.model_folder import load_config

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def load_plain(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    config_from: Path | None = None,
) -> PreTrainedModel:
    """The whole model of a folder on the CPU; an adapter is put on its base.

    Args:
        dtype: to load in; None: as the folder has it.
        config_from: the folder whose configuration counts, if not this one's.

    Raises:
        CheckpointError: names in the folder are not those of the model: transformers would start
            some weights at random, or drop some.
    """
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        return attach_adapter(base, folder).eval()
    config = load_config(config_from or folder, trust_remote_code=trust_remote_code)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    kwargs = {} if named is not None else {"trust_remote_code": trust_remote_code}
    kwargs["is_changed"] = config_from not in (None, folder)
    model_class: Any = named or transformers.AutoModelForCausalLM
    dtype = dtype or _dtype_of(folder)
    return load_whole(model_class, folder, config, is_strict=True, dtype=dtype, **kwargs).eval()


def load_base(
    adapter: Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model that an adapter is put on; of a reward model's adapter one that scores."""
    folder, own = find_base(adapter), config_folder(adapter)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    is_base_scored = (config.architectures or [""])[0].endswith(CLASSIFIER)
    if not is_scored(adapter) or is_base_scored:
        code = trust_remote_code
        return load_plain(folder, dtype=dtype, trust_remote_code=code, config_from=own)
    return load_whole(
        transformers.AutoModelForSequenceClassification,
        folder,
        config,
        num_labels=1,
        may_lack="score.",  # in the adapter
        dtype=dtype or _dtype_of(folder),
    ).eval()


def _dtype_of(folder: Path) -> torch.dtype | str:
    """The type of all weights; the configuration, which may say another, where they differ."""
    found = tensor_dtypes(folder)
    return found.pop() if len(found) == 1 else "auto"


def load_with_peft(folder: Path, base: nn.Module) -> nn.Module | None:
    """The base with an adapter put on by `peft`, in place; None where that is not installed."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    fit_vocabulary(base, [read_adapter(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it asks transformers by an old name
        adapted = PeftModel.from_pretrained(base, folder, local_files_only=True)
        return adapted.get_base_model().eval()


def tensor_dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point types in a model or adapter folder; reads headers only."""
    if (folder / ADAPTER_CONFIG).exists():
        files = {folder / ADAPTER_FILE}
    else:
        files = set(weight_files(folder).values())
    found = set()
    for file in files:
        with open_tensors(file) as tensors:
            names = tensors.keys()
            found |= {tensors.get_slice(name).get_dtype() for name in names}
    return {_DTYPES[name] for name in found if name in _DTYPES}


def weight_sizes(folder: Path) -> tuple[int, int]:
    """Number of weights in a model folder and their bytes; reads headers only."""
    count = num_bytes = 0
    for file in sorted(set(weight_files(folder).values())):
        num_bytes += file.stat().st_size
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                count += torch.Size(tensors.get_slice(name).get_shape()).numel()
    return count, num_bytes
