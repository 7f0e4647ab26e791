"""Fill one stage from a checkpoint, reading the stage's own tensors only.

Names on disk differ from names in memory for many models of transformers 5. The `from_pretrained`
of transformers handles all of that, so it does the reading: into a model that drops, while it is
built, what this stage drops. Not here: adapters (`adapter.py`), random starts (`init.py`).
"""

import copy
import ctypes
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from stageline.checkpoint.adapter import find_base, untie_if_changed
from stageline.checkpoint.adapter_start import AdapterStart
from stageline.checkpoint.few_bit import (
    dequantizing_settings,
    finish_dequantized,
    method_of,
    released,
)
from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    find_checkpoint,
    lazy_state,
    list_names,
    misfits,
    open_tensors,
    other_shape,
    read_tensor,
    weight_files,
)
from stageline.checkpoint.init import (
    check_filled,
    check_finite,
    float32_names,
    init_fresh,
    init_split_model,
    materialise,
    run_init,
)
from stageline.errors import CheckpointError, UserError, is_out_of_memory
from stageline.model_folder import read_json
from stageline.modules.expert_weight import ExpertWeight
from stageline.modules.lora import WRAPPED, is_lora_name, strip_lora, unwrapped
from stageline.modules.new_rows import NewRows, add_noise, put_new_rows
from stageline.modules.pass_through import DONE
from stageline.modules.quantised import KEPT
from stageline.modules.stage_names import Names, names_on_disk
from stageline.stage import Stage


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from listing the tensors of all other stages, and from drawing bars."""
    level = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if had_bars:
            transformers_logging.enable_progress_bar()


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WHILE_LOADING = 1 << 16
_AFTERWARDS = 1 << 25  # where glibc's own, moving threshold ends up


@contextmanager
def returns_freed_memory() -> Iterator[None]:
    """While open, blocks from 64 KiB on go back to the system as soon as they are freed (glibc).

    Fused experts are made of hundreds of small tensors, which leave a heap too scattered for the
    fused one: without this a rank's peak is 2.1 times its stage, with it 1.1
    (benchmarks/load_memory.py).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _WHILE_LOADING)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _AFTERWARDS)
        mallopt(_M_TRIM_THRESHOLD, 2 * _AFTERWARDS)


FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dtypes_of(files: dict[str, Path]) -> dict[str, str]:
    """Name on disk -> the format's name of its dtype, such as BF16; reads headers only."""
    found = {}
    for file in set(files.values()):
        with open_tensors(file) as tensors:
            for name in [name for name, place in files.items() if place == file]:
                found[name] = tensors.get_slice(name).get_dtype()
    return found


def integer_weights(dtypes: dict[str, str], leaves: set[str]) -> list[str]:
    """Tensors that are integers in the file, and weights by the last part of their names."""
    return [
        f"{name} ({dtype})"
        for name, dtype in dtypes.items()
        if not dtype.startswith(("F", "BF")) and name.rpartition(".")[2] in leaves
    ]


def cast_note(dtypes: dict[str, str], names: Iterable[str], dtype: torch.dtype) -> str | None:
    """Return a line where weights are kept in another type than they were saved in; else None."""
    kinds = {dtypes[name] for name in names if name in dtypes}
    floats = {FLOATS.get(kind, kind) for kind in kinds if kind.startswith(("F", "BF"))}
    others = sorted(str(kind).removeprefix("torch.") for kind in floats - {dtype})
    if not others:
        return None
    kept = str(dtype).removeprefix("torch.")
    return f"the weights were saved in {', '.join(others)} and are kept in {kept} here"


class CheckpointMismatch(CheckpointError):
    """The names or shapes in a checkpoint are not those of the model."""


def fill_stage(
    model: Stage,
    checkpoint_path: str | Path | None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype,
    is_bare: bool = False,
    new_rows: NewRows | None = None,
    neftune_alpha: float = 0.0,
) -> None:
    """Give a stage its weights, and set which of them train.

    Args:
        checkpoint_path: None: the seed gives the weights.
        is_bare: it stays on meta.
    """
    bits = model.methods.quantization
    if bits is not None and bits.kind == "released":
        bits = released(str(checkpoint_path or model.config.name_or_path))
        model.methods = replace(model.methods, quantization=bits)
    if not is_bare:
        # whole weights stay on the host; quantization then moves one layer at a time
        first = "cpu" if bits is not None and bits.kind not in KEPT else device
        if checkpoint_path is None:
            init_split_model(model, seed=seed, device=first, dtype=dtype)
        else:
            load_split_model(model, checkpoint_path, seed=seed, device=first, dtype=dtype)
    model.methods.quantise(model, device=device)
    model.frozen()
    if new_rows is not None:
        put_new_rows(model, new_rows)
    if neftune_alpha:  # behind the rows of new tokens, which take the places of what was looked up
        add_noise(model, model.vocabulary, neftune_alpha)
    model.train()


def load_split_model(
    model: Stage,
    checkpoint_path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    """Fill a stage model that is on meta, in place.

    Args:
        checkpoint_path: a folder with safetensors (sharded or not), one such file, a folder saved
            with LoRA names in it, or an adapter folder, whose base is read then. In the cache of a
            hub, files that hold nothing of this stage are not fetched.
        device: tensors go straight there, one at a time.
        dtype: of the parameters.
        seed: of the outermost LoRA, which is in no checkpoint.

    The model gets `loaded_from`, `keys_read`, the names on disk that were read for it, and
    `cast_note`, a line to print where the weights were saved in another dtype.

    Raises:
        CheckpointMismatch: names are missing, unexpected, of another shape, or integers where the
            model has floats; it lists them.
        CheckpointError: a file is damaged, or differs from the folder's manifest.
        UserError: there is no such folder, or a tensor is left without a value.
        NonFiniteError: a weight is inf or nan.
    """
    checkpoint = find_checkpoint(checkpoint_path)
    device = torch.device(device)
    adapter = checkpoint if (checkpoint / ADAPTER_CONFIG).exists() else None
    if adapter is not None:
        checkpoint = find_base(adapter)
    files = weight_files(checkpoint, fetches=False)
    few_bit = dequantizing_settings(checkpoint, files, model.methods.quantization)
    leaves = {"weight", "bias", *(name.rpartition(".")[2] for name, _ in model.named_parameters())}

    def floats(names: Iterable[str]) -> dict[str, str]:
        """The types of some tensors; weights in integers are refused."""
        found = dtypes_of({name: files[name] for name in names})
        if few_bit is None and (integers := integer_weights(found, leaves)):
            raise CheckpointMismatch(
                f"{checkpoint} holds {len(integers)} weights as integers: "
                f"{list_names(integers, 5)}. Use the checkpoint that was not quantised."
            )
        return found

    dtypes = floats(name for name, file in files.items() if file.exists())
    key_map = names_on_disk(model)
    if adapter is not None:
        key_map = {name: strip_lora(there) for name, there in key_map.items()}
        key_map = {name: there for name, there in key_map.items() if not is_lora_name(there)}
    on_disk = {name: name for name in files}
    if model.whole is None or any(WRAPPED in name.split(".") for name in files):
        if few_bit is not None:
            raise UserError(
                f"{checkpoint} is quantized by {method_of(few_bit)}, and {type(model).__name__} "
                "reads weights by their names. Use a checkpoint that is not quantized."
            )
        _read_by_names(model, files, key_map, device=device, dtype=dtype, checkpoint=checkpoint)
    else:
        on_disk = _read_by_library(
            *(model, files, key_map, few_bit), device=device, dtype=dtype, checkpoint=checkpoint
        )
    whole: Names | None = getattr(model, "whole_names", None)
    for tied in list(whole.aliases.items()) if whole else []:
        if all(name in on_disk for name in tied):  # a head of its own though the config says tied
            state = lazy_state(files, set())
            untie_if_changed(model, {name: state[on_disk[name]][...] for name in tied})
    dtypes |= floats(model.keys_read - dtypes.keys())  # some files were fetched meanwhile
    init_fresh(model, seed=seed)
    materialise(model, device=device, dtype=dtype, casts_others=False)
    start: AdapterStart = getattr(model, "start", None) or AdapterStart()
    start.begin(model, adapter, seed=seed)
    model.cast_note = cast_note(dtypes, model.keys_read, dtype)
    if few_bit is not None:
        how = "kept" if "bits" in few_bit else f"dequantized to {str(dtype).removeprefix('torch.')}"
        model.cast_note = f"the weights were saved as {method_of(few_bit)}, {how}"

    def place_of(name: str) -> str:
        # names that transformers converts are not in the files
        folder = (adapter or checkpoint) if is_lora_name(name) else checkpoint
        return f"{files.get(key_map.get(name, name), folder)}: "

    named: list[tuple[str, torch.Tensor]] = [*model.named_parameters()]
    for name, module in model.named_modules():  # scales of bits that are kept
        held = [(leaf, one) for leaf, one in vars(module).items() if isinstance(one, ExpertWeight)]
        named += [(f"{name}.{leaf}", part) for leaf, one in held for part in one.base.parts[1:]]
    check_finite(
        # weights that were never filled hold nan too, and are reported after this
        ((name, value) for name, value in named if name in key_map or is_lora_name(name)),
        what=f"weights of stage {model.stage} as they were read",
        cure="Fetch these files again, or start from another checkpoint.",
        place_of=place_of,
    )
    check_filled(model, f"reading {checkpoint_path}")
    model.loaded_from = None if start.merged else str(checkpoint.resolve())


def _read_by_library(
    model: Stage,
    files: dict[str, Path],
    key_map: dict[str, str],
    few_bit: dict[str, Any] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Path,
) -> dict[str, str]:
    """Fill the stage by `from_pretrained`; return name in the whole model -> name on disk.

    Args:
        few_bit: settings of the quantizer that dequantizes; None: the weights are full ones.
    """
    assert model.whole is not None  # the caller looked
    if earlier := {there for there in key_map.values() if is_lora_name(there)}:
        raise UserError(
            f"{checkpoint} holds no LoRA for {list_names(earlier, 3)}. Give the earlier run's "
            "adapter folder as `model_path`, or use one LoRA."
        )
    base_class: Any = type(model.whole)  # a class that is known at run time alone
    base = base_class.base_model_prefix
    # the names are those of the whole model, before it is pruned
    whole_names: dict[str, torch.Tensor] = {}
    transforms: list[WeightTransform] = []

    class Pruned(base_class):
        """Drops what this stage drops, while it is built."""

        all_tied_weights_keys: dict[str, str]

        def __init__(self, config: object, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            whole_names.update(self.state_dict())
            transforms.extend(get_model_conversion_mapping(self))
            model.prune(self)
            kept = set(self.state_dict())
            # ties of weights that went with the pruning would be looked for, and not found
            self.all_tied_weights_keys = {
                target: source
                for target, source in self.all_tied_weights_keys.items()
                if target in kept and source in kept
            }

    Pruned.__name__, Pruned.__qualname__ = base_class.__name__, base_class.__qualname__
    # else transformers takes it for custom code and leaves names on disk as they are
    Pruned.__module__ = base_class.__module__
    model.keys_read = set()
    config = copy.deepcopy(model.config)
    if few_bit is not None:
        config.quantization_config = few_bit
    kwargs: dict[str, Any] = {"device_map": {"": device}} if device.type != "cpu" else {}
    try:
        with quiet(), returns_freed_memory():
            found = Pruned.from_pretrained(
                None,
                state_dict=lazy_state(files, model.keys_read),
                config=config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below with all their names
                **kwargs,
            )
            # its annotation leaves out what output_loading_info adds
            loaded, info = cast("tuple[PreTrainedModel, dict[str, Any]]", found)
    except UserError:
        raise
    except (RuntimeError, OSError, ImportError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointMismatch(
            f"{checkpoint} does not fit stage {model.stage} of {type(model.whole).__name__}: "
            f"{error}. Use a checkpoint of the same architecture and configuration."
        ) from error
    model.keys_fresh = set(info["missing_keys"]) & getattr(model, "fresh_names", frozenset())
    names = {name: _renamed(name, transforms, base, whole_names) for name in files}
    # a stage without a tower lacks the tower's own renames: what it does not know may be known
    ours, kept = get_model_conversion_mapping(loaded), loaded.state_dict()
    known = {_renamed(n, ours, base, kept) for n, there in names.items() if there in whole_names}
    # a checkpoint of the bare base model lacks the prefix
    known |= {*whole_names, *(name.removeprefix(f"{base}.") for name in whole_names)}
    unused = getattr(model, "unused_names", ())
    others: set[str] = info["unexpected_keys"]
    if few_bit is not None:  # scales belong to weights that are known or not
        others = {name.removesuffix("_scale_inv").removesuffix("_scales") for name in others}
    unknown = {
        name
        for name in others
        if not {name, name.removeprefix(f"{base}.")} & known and not name.startswith(unused)
    }
    wrong = [other_shape(*mismatch) for mismatch in info["mismatched_keys"]]
    _refuse(model, checkpoint, set(info["missing_keys"]) - model.keys_fresh, unknown, wrong)
    if few_bit is not None:
        finish_dequantized(loaded, dtype)
        is_kept = float32_names(loaded, dtype)
        for name, value in loaded.named_parameters():
            # full weights next to quantized ones are in the dtype of the file
            if value.element_size() > 1:  # it stays in few bits if it is kept
                value.data = value.to(torch.float32 if is_kept(name) else whole_names[name].dtype)
    _take(model, loaded, key_map, checkpoint=checkpoint)
    generation = checkpoint / GENERATION_CONFIG_NAME
    if generation.exists():
        read_json(generation)
        model.whole.generation_config = GenerationConfig.from_pretrained(
            checkpoint, local_files_only=True
        )
    return {there: name for name, there in names.items()}


def _renamed(
    name: str, transforms: list[WeightTransform], base: str, names: dict[str, torch.Tensor]
) -> str:
    """Return a name on disk as transformers finds it in a model of these names."""
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    found, _ = rename_source_key(name, renamings, converters, base, names)
    return name if found not in names and name in names else found


def _refuse(
    model: Stage,
    checkpoint: Path,
    missing: Collection[str],
    unknown: Collection[str] = (),
    wrong: Collection[str] = (),
) -> None:
    why = misfits(missing, unknown, wrong, owner="stage")
    if why:
        raise CheckpointMismatch(
            f"{checkpoint} does not fit stage {model.stage} of {model.num_stages}: {why}. Check "
            "that `model_path` and `config_path` belong together."
        )


def _take(
    model: Stage, loaded: PreTrainedModel, key_map: dict[str, str], *, checkpoint: Path
) -> None:
    """Move the tensors of the loaded model into the stage, without a copy; ties stay."""
    values = loaded.state_dict(keep_vars=True)
    missing = {there for there in key_map.values() if there not in values}
    _refuse(model, checkpoint, missing)
    for name, there in key_map.items():
        _put(model, name, values[there])
        if hasattr(values[there], DONE):
            delattr(values[there], DONE)
    with unwrapped(model):
        for name, module in loaded.named_modules():
            own = model.get_submodule(name)
            for leaf in module._non_persistent_buffers_set:
                own._buffers[leaf] = module._buffers[leaf]
            for leaf, value in vars(module).items():
                if isinstance(value, torch.Tensor | ExpertWeight) or leaf == "is_quantised":
                    own.__dict__[leaf] = value
    # saving reverses these
    assert model.whole is not None  # transformers loaded it
    conversions = getattr(loaded, "_weight_conversions", None)
    model.whole.__dict__["_weight_conversions"] = conversions


def _put(model: nn.Module, name: str, value: torch.Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value.detach()
        return
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=value.is_floating_point())
    module._parameters[leaf] = value


def _read_by_names(
    model: Stage,
    files: dict[str, Path],
    key_map: dict[str, str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Path,
) -> None:
    """Read names as they are: for a user's own modules and for files with LoRA names in them."""
    here = dict(model.state_dict(keep_vars=True))
    known = {strip_lora(name) for name in getattr(model, "parameter_order", [])}
    unknown = set()
    if known or model.num_stages == 1:
        known |= {strip_lora(name) for name, _ in model.named_buffers()}
        others = {name for name in files.keys() - set(key_map.values()) if not is_lora_name(name)}
        unknown = {name for name in others if strip_lora(name) not in known}
    first: dict[int, str] = {}  # a weight with two names is stored by its first one
    tied = {
        name: first[id(tensor)]
        for name, tensor in here.items()
        if first.setdefault(id(tensor), name) != name
    }
    read = {name: there for name, there in key_map.items() if there in files}
    missing = {key_map[name] for name in key_map.keys() - read.keys() - tied.keys()}
    _refuse(model, checkpoint, missing, unknown)
    wrong = []
    is_kept = float32_names(model.whole, dtype)
    for file in sorted({files[there] for there in read.values()}):
        with open_tensors(file, device) as tensors:
            for name, there in read.items():
                if files[there] != file:
                    continue
                value = read_tensor(tensors, there, file)
                if value.shape != here[name].shape:
                    wrong.append(other_shape(there, value.shape, here[name].shape))
                    continue
                own = torch.float32 if is_kept(name) else dtype
                _put(model, name, value.to(own) if value.is_floating_point() else value)
    model.keys_read = set(read.values())
    _refuse(model, checkpoint, (), (), wrong)
    for name, source in tied.items():
        _put(model, name, model.get_parameter(source))
    if model.whole is not None:
        materialise(model, device=device, dtype=dtype, casts_others=False)
        _fill_buffers(model, done=set(key_map), device=device)


def _fill_buffers(model: Stage, *, done: set[str], device: torch.device) -> None:
    """Fill the buffers that no checkpoint has, as transformers' own start does."""
    tensors = [tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in done]
    for tensor in tensors:
        setattr(tensor, DONE, True)
    with unwrapped(model):
        run_init(model, seed=0, device=device)
    for tensor in tensors:
        if hasattr(tensor, DONE):
            delattr(tensor, DONE)
