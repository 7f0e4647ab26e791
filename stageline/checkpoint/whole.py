"""Loads a whole model by the library's `from_pretrained`, which alone would start at random unseen.

For inference and export, where one process holds all of it; a stage is filled by `load.py`.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from stageline.checkpoint.dtypes import entries_of, integer_weights
from stageline.checkpoint.files import list_names, weight_files
from stageline.checkpoint.layout import check_read
from stageline.errors import CheckpointError


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
        integers = integer_weights(entries_of(files), {"weight", "bias"})
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
