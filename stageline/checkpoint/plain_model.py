"""Loads a folder in plain transformers, as a user of an exported model would. Knows no stages."""

import warnings
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from stageline.checkpoint.adapter import (
    attach_adapter,
    config_folder,
    find_base,
    fit_vocabulary,
    read_adapter,
)
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    list_names,
    open_tensors,
    weight_files,
)
from stageline.checkpoint.layout import check_read
from stageline.checkpoint.load import FLOATS, dtypes_of, integer_weights
from stageline.errors import CheckpointError
from stageline.model_folder import load_config, read_json

# -- kinds of models by the names of the library's classes, and what `peft` calls them ------------

CLASSIFIER = "ForSequenceClassification"  # with one label: a reward model
SCORED = "SEQ_CLS"
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", CLASSIFIER: SCORED}


def task_of(model_class: str) -> str | None:
    """What peft calls the kind of model that a class is; None: no kind that it knows."""
    return next((task for end, task in _TASKS.items() if model_class.endswith(end)), None)


def is_scored(adapter: Path) -> bool:
    """Whether an adapter belongs on a model that scores rows instead of predicting tokens."""
    return read_json(adapter / ADAPTER_CONFIG).get("task_type") == SCORED


# -- loads a whole model by the library's `from_pretrained`, which alone would start at random unse
# For inference and export, where one process holds all of it; a stage is filled by `load.py`.


def check_weights(folder: Path) -> None:
    """Looks at every weight file of a model folder before the library maps it.

    Raises:
        CheckpointError: a file is missing, damaged, a pickle, or differs from our manifest.
    """
    check_read(set(weight_files(folder).values()))


def load_whole(
    auto_class: Any,
    folder: Path,
    config: PretrainedConfig,
    *,
    is_strict: bool = False,
    may_lack: str | None = None,
    is_changed: bool = False,
    **options: object,
) -> PreTrainedModel:
    """A whole model with every weight from the folder.

    Args:
        auto_class: an Auto class or a model class of the library.
        is_strict: weights that the model has no place for are refused, too.
        may_lack: beginning of the names of weights that others fill; None: none.
        is_changed: `config` is not the folder's own, and counts.
        options: of its `from_pretrained`.

    Raises:
        CheckpointError: weights are missing, of another shape, quantised without a config that
            says so, or cannot be read.
    """
    files = weight_files(folder)
    if is_changed:
        options = {**options, "config": config}
    if getattr(config, "quantization_config", None) is None:
        integers = integer_weights(dtypes_of(files), {"weight", "bias"})
        if integers:
            raise _does_not_fit(folder, f"weights are integers: {list_names(integers, 5)}")
    try:
        model, info = auto_class.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,  # never a pickle that lies there too
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise _does_not_fit(folder, str(error).strip()[:500]) from error
    lacking = {
        name for name in info["missing_keys"] if may_lack is None or not name.startswith(may_lack)
    }
    if lacking:
        names = list_names(lacking)
        raise _does_not_fit(folder, f"{len(lacking)} weights are missing: {names}")
    wrong = [
        f"{name} (file {list(found)}, model {list(expected)})"
        for name, found, expected in info["mismatched_keys"]
    ]
    if wrong:
        raise _does_not_fit(folder, f"{len(wrong)} shapes differ: {list_names(wrong)}")
    unknown = info["unexpected_keys"]
    if is_strict and unknown:
        names = list_names(set(unknown))
        raise _does_not_fit(folder, f"{len(unknown)} weights have no place in the model: {names}")
    return model


def _does_not_fit(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be loaded: {why}. Every weight of the model that config.json describes "
        "was expected, with its shape: the library would start others at random. Copy the "
        "checkpoint again, or use one that is whole."
    )


# -------------------------------------------------------------------------------------------------


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
    options: dict[str, Any] = {"dtype": dtype or _dtype_of(folder)}
    if named is None:
        options["trust_remote_code"] = trust_remote_code
    model_class: Any = named or transformers.AutoModelForCausalLM
    is_changed = config_from not in (None, folder)
    model = load_whole(
        model_class, folder, config, is_strict=True, is_changed=is_changed, **options
    )
    return model.eval()


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


def tensor_dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point types in a model or adapter folder; reads headers only."""
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    files = weight_files(folder / ADAPTER_FILE if is_adapter else folder)
    found = set(dtypes_of(files).values())
    return {FLOATS[name] for name in found if name in FLOATS}


def weight_sizes(folder: Path) -> tuple[int, int]:
    """Number of weights in a model folder and their bytes; reads headers only."""
    count = num_bytes = 0
    for file in sorted(set(weight_files(folder).values())):
        num_bytes += file.stat().st_size
        with open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dict
                count += torch.Size(tensors.get_slice(name).get_shape()).numel()
    return count, num_bytes
