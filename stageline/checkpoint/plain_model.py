"""Load the whole model of a folder in plain transformers, as a user of an exported model does."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from stageline.checkpoint.adapter import attach_adapter, config_folder, find_base
from stageline.checkpoint.few_bit import dequantizing_settings, finish_dequantized, stored_settings
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    list_names,
    misfits,
    other_shape,
    tensor_names,
    weight_files,
)
from stageline.checkpoint.init import check_finite, loaded_dtype, round_weights
from stageline.checkpoint.load import FLOATS, dtypes_of, integer_weights
from stageline.errors import CheckpointError
from stageline.model_folder import (
    attention_options,
    called_alike,
    has_trusted_code,
    load_config,
    read_json,
    refused_build,
)

CAUSAL_LM = "AutoModelForCausalLM"
CLASSIFIER = "ForSequenceClassification"  # with one label: a reward model
SCORED = "SEQ_CLS"
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", CLASSIFIER: SCORED}


def task_of(model_class: str) -> str | None:
    """Return the task type of peft for a model class; None where it has none."""
    return next((task for end, task in _TASKS.items() if model_class.endswith(end)), None)


def is_scored(adapter: Path) -> bool:
    """Whether an adapter belongs on a model that scores rows instead of predicting tokens."""
    return read_json(adapter / ADAPTER_CONFIG).get("task_type") == SCORED


def load_whole(
    auto_class: Any,
    folder: Path,
    config: PretrainedConfig,
    *,
    is_strict: bool = False,
    may_lack: str | None = None,
    is_changed: bool = False,
    keeps_bits: bool = False,
    **options: object,
) -> PreTrainedModel:
    """Load a whole model with every weight from the folder, none of them at random.

    Args:
        auto_class: an Auto class or a model class of transformers.
        folder: or a file in it that `config.transformers_weights` names.
        is_strict: refuse also weights that the model has no place for.
        may_lack: prefix of the names of weights that others fill; None: none.
        is_changed: use `config` instead of the folder's own.
        keeps_bits: keep quantized weights as transformers keeps them; else they are dequantized.
        options: of its `from_pretrained`.

    Raises:
        CheckpointError: weights are missing, of another shape, quantised without a config that
            says so, or cannot be read.
    """
    files = weight_files(folder)
    if folder.is_file():  # `config.transformers_weights` names it
        folder = folder.parent
    few_bit = stored_settings(folder) if keeps_bits else dequantizing_settings(folder, files)
    if is_changed or few_bit is not None:
        config = copy.deepcopy(config)
        if few_bit is not None:
            config.quantization_config = few_bit
        options = {**options, "config": config}
    options |= attention_options(config, options.pop("attn_implementation", None))
    if few_bit is None:
        integers = integer_weights(dtypes_of(files), {"weight", "bias"})
        if integers:
            raise _does_not_fit(folder, f"weights are integers: {list_names(integers, 5)}")
    try:
        model, info = auto_class.from_pretrained(
            folder,
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,  # a pickle in the folder is never read
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except Exception as error:  # from_pretrained can raise any type of exception
        of_code = has_trusted_code(config) and isinstance(error, AttributeError | TypeError)
        if of_code or "Unrecognized configuration class" in str(error):
            raise refused_build(config, auto_class, error) from error
        raise _does_not_fit(folder, str(error).strip()[:500]) from error
    lacking = {
        name for name in info["missing_keys"] if may_lack is None or not name.startswith(may_lack)
    }
    wrong = [other_shape(*mismatch) for mismatch in info["mismatched_keys"]]
    why = misfits(lacking, info["unexpected_keys"] if is_strict else (), wrong)
    if why:
        raise _does_not_fit(folder, why)
    keeps_bits = keeps_bits and getattr(model, "hf_quantizer", None) is not None
    if few_bit is not None and not keeps_bits:  # transformers dequantizes on some devices
        finish_dequantized(model, model.config.dtype)
        round_weights(model, model.config.dtype)  # transformers casts only quantized ones
    check_finite(
        model.named_parameters(),
        what=f"weights of {folder}",
        cure="Fetch these files again, or take another model.",
    )
    return called_alike(model)


def _does_not_fit(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be loaded: {why}. transformers would start missing weights at random. "
        "Copy the checkpoint again, or use one that is whole."
    )


def save_whole(model: PreTrainedModel, folder: Path, **options: Any) -> None:
    """Save a model by transformers' own writer, also one whose code is of transformers 4."""
    for module in model.modules():
        # a list there cannot be read any more; one that names ties is refused when it is built
        if isinstance(getattr(module, "_tied_weights_keys", None), list):
            module.__dict__["_tied_weights_keys"] = None
    model.save_pretrained(folder, **options)


def load_plain(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    config_from: Path | None = None,
) -> PreTrainedModel:
    """Load the whole model of a folder on the CPU; an adapter is put on its base.

    Args:
        dtype: to load in; None: as the folder has it.
        config_from: the folder whose configuration counts, if not this one's.
    """
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=dtype, trust_remote_code=trust_remote_code)
        return attach_adapter(base, folder).eval()
    config = load_config(config_from or folder, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype or _dtype_of(folder)}
    model_class = _class_of(config)
    if model_class is transformers.AutoModelForCausalLM:
        options["trust_remote_code"] = trust_remote_code
    options["is_changed"] = config_from not in (None, folder)
    return load_whole(model_class, folder, config, is_strict=True, **options).eval()


def _class_of(config: PretrainedConfig) -> Any:
    own_code = getattr(config, "auto_map", None) or {}  # its class may have a name of transformers'
    architecture = "" if CAUSAL_LM in own_code else (config.architectures or [""])[0]
    return getattr(transformers, architecture, transformers.AutoModelForCausalLM)


def load_base(
    adapter: Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load the model that an adapter is put on; for a reward model's adapter one that scores."""
    folder, own = find_base(adapter), config_folder(adapter)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    if not is_scored(adapter) or (config.architectures or [""])[0].endswith(CLASSIFIER):
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
    if stored_settings(folder) is not None:
        return load_config(folder).dtype or torch.bfloat16
    found = tensor_dtypes(folder)
    return found.pop() if len(found) == 1 else "auto"


def tensor_dtypes(folder: Path) -> set[torch.dtype]:
    """The floating-point types in a model or adapter folder; reads headers only."""
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    files = weight_files(folder / ADAPTER_FILE if is_adapter else folder)
    return {FLOATS[name] for name in dtypes_of(files).values() if name in FLOATS}


def adapter_dtype(
    adapter: Path, dtype: torch.dtype, *, trust_remote_code: bool
) -> Callable[[str], torch.dtype]:
    """Return a function: name of a weight of an adapter -> the type it has in a base of `dtype`."""
    if all(".lora_" in name for name in tensor_names(adapter / ADAPTER_FILE)):
        return lambda name: dtype  # its base need not be here
    config = load_config(config_folder(adapter), trust_remote_code=trust_remote_code)
    model_class = _class_of(config)
    if model_class is not transformers.AutoModelForCausalLM:
        return loaded_dtype(model_class._from_config, config, dtype)
    build = functools.partial(model_class.from_config, trust_remote_code=trust_remote_code)
    return loaded_dtype(build, config, dtype)
