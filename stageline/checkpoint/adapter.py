"""Adapters in the format of `peft`, and our LoRA: reading one into the other and back.

An adapter folder holds adapter_config.json and adapter_model.safetensors with names below
`base_model.model.`. Where several LoRAs are stacked, the folder itself is their sum as one adapter
(ranks side by side), which `peft` can load, and `stack/0`, `stack/1` ... are the single ones.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from stageline.checkpoint.adapter_rows import (
    Rows,
    fit_vocabulary,
    put_rows,
    split_rows,
)
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, list_names, read_tensors
from stageline.errors import CheckpointError, UserError
from stageline.model_folder import read_json
from stageline.modules.lora import LoRAWrapper, innermost, is_linear, lora_stacks
from stageline.modules.lora_layer import MAGNITUDE, LoRALayer

PEFT_PREFIX = "base_model.model."
STACK_FOLDER = "stack"
_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<which>[AB])\.weight$")
_MAGNITUDE = re.compile(rf"^(?P<module>.+)\.{MAGNITUDE}(\.weight)?$")
# settings of peft that change the mathematics and that LoRAWrapper has not
_UNSUPPORTED = ("lora_bias", "layer_replication", "target_parameters", "use_qalora")


@dataclass(frozen=True)
class Adapter:
    """One adapter folder in memory.

    Attributes:
        folder: where it came from.
        config: adapter_config.json.
        pairs: module name -> (A [rank, in], B [out, rank]).
        extras: parameters of modules that were trained whole, by name.
        rows: module -> ids of new tokens and their rows.
        magnitudes: of DoRA, module name -> a length for each output.
    """

    folder: Path
    config: dict[str, object]
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    extras: dict[str, torch.Tensor]
    rows: Rows = field(default_factory=dict)
    magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)

    def scale(self, module: str) -> float:
        """alpha / rank of one module, or alpha / sqrt(rank) if the adapter says so."""
        rank = self.pairs[module][0].shape[0]
        alpha = float(self.config["lora_alpha"])
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = float(value)
                break
        return alpha / rank**0.5 if self.config.get("use_rslora") else alpha / rank


def find_base(folder: Path) -> Path:
    """The folder of the model that an adapter belongs to.

    Raises:
        CheckpointError: it is not on this machine.
    """
    named = read_adapter_config(folder).get("base_model_name_or_path") or ""
    for path in (Path(str(named)).expanduser(), folder / str(named)):
        if named and path.exists():
            return path
    raise CheckpointError(
        f"the adapter {folder} belongs to the model {named!r}, which is not on this machine: its "
        f"weights are the greater part. Put them there, or change base_model_name_or_path in "
        f"{folder / ADAPTER_CONFIG}."
    )


def read_adapter_config(folder: Path) -> dict[str, object]:
    """adapter_config.json, refused where we would compute something else than `peft` does."""
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    used = [name for name in _UNSUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        used.append(f"bias={config['bias']}")
    if config.get("peft_type") != "LORA":
        used.insert(0, f"peft_type={config.get('peft_type')}")
    if used:
        raise CheckpointError(
            f"{path} asks for {', '.join(used)}, plain LoRA was expected: another kind would be "
            "applied wrongly. Merge it into the model with peft (merge_and_unload) first."
        )
    return config


def read_adapter(folder: str | Path) -> Adapter:
    """Reads an adapter folder, of ours or of `peft`.

    Raises:
        CheckpointError: a file is missing, damaged or holds something else than plain LoRA.
    """
    folder = Path(folder)
    config = read_adapter_config(folder)
    file = folder / ADAPTER_FILE
    if not file.exists():
        raise CheckpointError(
            f"{file} is missing, the adapter's weights were expected in it: {ADAPTER_CONFIG} alone "
            "is no adapter. Copy the adapter again, with safetensors weights."
        )
    halves: dict[str, dict[str, torch.Tensor]] = {}
    extras, magnitudes = {}, {}
    for name, tensor in read_tensors(file).items():
        plain = name.removeprefix(PEFT_PREFIX)
        match = _PART.match(plain)
        magnitude = _MAGNITUDE.match(plain)
        if magnitude:
            magnitudes[magnitude["module"]] = tensor
        elif match:
            halves.setdefault(match["module"], {})[match["which"]] = tensor
        elif "lora_" in plain:
            raise CheckpointError(
                f"{file} holds {name}, only lora_A and lora_B of linear layers were expected: "
                "LoRA on embeddings or of experts is not supported. Merge it with peft first."
            )
        else:
            extras[plain] = tensor
    _check_numbers(config, folder / ADAPTER_CONFIG)
    broken = {module for module, half in halves.items() if len(half) != 2}
    if broken:
        raise CheckpointError(
            f"{file} lacks lora_A or lora_B of {list_names(broken)}, both were expected: one alone "
            "means nothing. Copy the adapter again."
        )
    pairs = {module: (half["A"], half["B"]) for module, half in halves.items()}
    for module, (a, b) in pairs.items():
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] == 0:
            raise CheckpointError(
                f"{file} holds for {module} lora_A {list(a.shape)} and lora_B {list(b.shape)}, "
                "[rank, in] and [out, rank] were expected: they are multiplied. Copy the adapter "
                "again."
            )
    _check_magnitudes(config, pairs, magnitudes, file)
    rows, extras = split_rows(extras, config, file)
    return Adapter(folder, config, pairs, extras, rows, magnitudes)


def _check_magnitudes(
    config: dict[str, object],
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]],
    magnitudes: dict[str, torch.Tensor],
    file: Path,
) -> None:
    wanted = {name: [b.shape[0]] for name, (_, b) in pairs.items()}
    found = {name: list(value.shape) for name, value in magnitudes.items()}
    if found != (wanted if config.get("use_dora") else {}):
        raise CheckpointError(
            f"{file} holds {len(found)} magnitude vectors for {len(wanted)} layers and "
            f"{ADAPTER_CONFIG} says use_dora={bool(config.get('use_dora'))}; one a layer, as long "
            "as its outputs, was expected with DoRA, none without. Copy the adapter again."
        )


def _check_numbers(config: dict[str, object], path: Path) -> None:
    """Refuses settings that `Adapter.scale` could not compute with."""
    patterns = config.get("alpha_pattern") or {}
    alphas = [config.get("lora_alpha")]
    alphas += patterns.values() if isinstance(patterns, dict) else [patterns]
    wrong = [alpha for alpha in alphas if not isinstance(alpha, int | float)]
    try:
        for pattern in patterns:
            re.compile(pattern)
    except re.error as error:
        wrong.append(f"{pattern}: {error}")
    if wrong:
        raise CheckpointError(
            f"{path} has {wrong[0]!r} for lora_alpha or in alpha_pattern, numbers by module were "
            "expected: they scale the adapter. Copy the adapter again."
        )


def read_stack(folder: Path) -> list[Adapter]:
    """The adapters in a folder, innermost first; one, unless a run stacked several."""
    return [read_adapter(path) for path in _stack_folders(folder)]


def _stack_folders(folder: Path) -> list[Path]:
    found = [path for path in (folder / STACK_FOLDER).glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name)) or [folder]


def adapter_files(folder: Path) -> list[Path]:
    """The files that `read_stack` reads."""
    return [
        path / name for path in _stack_folders(folder) for name in (ADAPTER_CONFIG, ADAPTER_FILE)
    ]


# -- into a model ------------------------------------------------------------------------------


def attach_adapter(hf_model: nn.Module, adapter_path: str | Path) -> nn.Module:
    """Puts an adapter on a plain transformers model, in place: same outputs as with `peft`.

    Args:
        hf_model: the adapter's base model, filled, on any device or devices.
        adapter_path: an adapter folder.

    Returns:
        The model; `stageline.modules.lora.merge_lora` makes it plain again.

    Raises:
        CheckpointError: the adapter names modules that the model has not, or other shapes.
    """
    adapter = read_adapter(adapter_path)
    modules = dict(hf_model.named_modules())
    unknown = {name for name in adapter.pairs if not _is_wrappable(modules.get(name))}
    unknown |= {name for name in adapter.extras if name.rpartition(".")[0] not in modules}
    refuse_unknown(adapter, unknown, type(hf_model).__name__)
    fit_vocabulary(hf_model, [adapter])
    for name, pair in adapter.pairs.items():
        parent, _, leaf = name.rpartition(".")
        use_dora = name in adapter.magnitudes
        wrapper = LoRAWrapper(modules[name], rank=1, alpha=1.0, use_dora=use_dora)
        _check_shape(adapter, name, wrapper.lora)
        wrapper.lora.load(*pair, adapter.scale(name), adapter.magnitudes.get(name))
        wrapper.train(modules[name].training)
        setattr(hf_model.get_submodule(parent), leaf, wrapper)
    put_extras(hf_model, adapter.extras)
    put_rows(hf_model, adapter)
    return hf_model


def _is_wrappable(module: nn.Module | None) -> bool:
    return module is not None and is_linear(module)


def refuse_unknown(adapter: Adapter, unknown: set[str], model_name: str) -> None:
    """Refuses an adapter with weights for modules that are not there."""
    if unknown:
        raise CheckpointError(
            f"the adapter {adapter.folder} has weights for {list_names(unknown)}, linear layers of "
            f"{model_name} were expected: left out, the model would answer differently. Use the "
            "adapter with the model it was trained on, with the same --*-lora-num and "
            "--lora-target."
        )


def _check_shape(adapter: Adapter, name: str, layer: LoRALayer) -> None:
    a, b = adapter.pairs[name]
    found = [a.shape[1], b.shape[0]]
    expected = [layer.lora_A.in_features, layer.lora_B.out_features]
    if found != expected:
        raise CheckpointError(
            f"{adapter.folder / ADAPTER_FILE} is for {name} with {found[0]} inputs and {found[1]} "
            f"outputs, the model's has {expected[0]} and {expected[1]}: an adapter fits the model "
            "it was trained on alone. Use it with that one."
        )


def put_extras(model: nn.Module, extras: dict[str, torch.Tensor]) -> None:
    """Puts modules that were trained whole; a tied head becomes a weight of its own, as in peft."""
    for name, value in extras.items():
        path, _, leaf = name.rpartition(".")
        module = innermost(model.get_submodule(path))
        old = module.get_parameter(leaf)
        value = value.to(device=old.device, dtype=old.dtype)
        setattr(module, leaf, nn.Parameter(value, requires_grad=old.requires_grad))


def fill_earlier_lora(model: nn.Module, folder: Path, adapters: list[Adapter]) -> None:
    """Fills a stage's LoRAs from an adapter folder: all but the last, or as many as it holds.

    With as many adapters as LoRAs the last one is filled too: that run goes on. What was trained
    whole is noted in `model.carried`: a folder saved from here has to hold it as well.

    Args:
        adapters: of the folder, innermost first.

    Raises:
        UserError: the counts do not fit.
        CheckpointError: the adapter has weights that no stage could hold.
    """
    fit_vocabulary(model, adapters)
    stacks = lora_stacks(model)
    whole_names = {name.rpartition(".")[0] for name in model.parameter_order}
    for level, adapter in enumerate(adapters):
        refuse_unknown(adapter, _unplaced(adapter, whole_names, model), type(model).__name__)
        for name, pair in adapter.pairs.items():
            if name not in stacks:
                continue  # another stage has it
            wrappers = stacks[name]
            count = sum(name in other.pairs for other in adapters)
            if len(wrappers) - count not in (0, 1):
                raise UserError(
                    f"{folder} holds {count} adapters for {name}, which has {len(wrappers)} LoRAs "
                    f"here; as many or one more were expected: each adapter fills one LoRA and the "
                    f"last may be new. Set --llm-lora-num (or --vit-lora-num, --mlp-lora-num) to "
                    f"{count + 1}, or merge them with export.py --merge."
                )
            layer = wrappers[level].lora
            _check_shape(adapter, name, layer)
            _check_kind(adapter, name, layer, is_alone=len(wrappers) == 1)
            layer.load(*pair, adapter.scale(name), adapter.magnitudes.get(name))
            layer.use_rslora = bool(adapter.config.get("use_rslora"))
        here = dict(model.named_parameters(remove_duplicate=False))
        plain = {name: adapter.extras[name] for name in adapter.extras if name in here}
        wrapped = {
            name: value
            for name, value in adapter.extras.items()
            if name not in here and name.rpartition(".")[0] in stacks
        }
        put_extras(model, {**plain, **wrapped})
        put_rows(model, adapter)
        model.carried = frozenset({*getattr(model, "carried", ()), *plain, *wrapped})


def _check_kind(adapter: Adapter, name: str, layer: LoRALayer, *, is_alone: bool) -> None:
    """Refuses an adapter of another kind than the layer that is to hold it."""
    is_dora = name in adapter.magnitudes
    if is_dora != layer.use_dora or (is_dora and not is_alone):
        raise UserError(
            f"{adapter.folder} holds {'DoRA' if is_dora else 'plain LoRA'} for {name}, the same "
            "kind was expected here, and DoRA without another adapter on its layer: its length is "
            "that of one sum. Give it with --adapter-path, which takes the kind from the file "
            "(with --create-new-adapter it is merged first)."
        )
    if layer.taken is not None:
        raise UserError(
            f"{adapter.folder} came with --lora-init {layer.start}, a new adapter was expected: a "
            "saved one belongs to the weights before PiSSA. Leave --lora-init out, or add "
            "--create-new-adapter to --adapter-path."
        )


def _unplaced(adapter: Adapter, whole_names: set[str], model: nn.Module) -> set[str]:
    """Modules of an adapter that are this stage's and have no LoRA, or that are nowhere."""
    stacks = lora_stacks(model)
    own = {name for name, _ in model.named_modules()}
    holds = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    unplaced = set()
    for name in adapter.pairs:
        is_here = name in own and (name in holds or name in stacks)
        if (is_here and name not in stacks) or (not is_here and name not in whole_names):
            unplaced.add(name)
    return unplaced
