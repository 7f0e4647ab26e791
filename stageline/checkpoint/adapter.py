"""Read adapters in the format of `peft` into our LoRA.

Where several LoRAs are stacked, the folder itself is their sum as one adapter (ranks side by side),
which `peft` can load, and `stack/0`, `stack/1` ... are the single ones.
"""

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    list_names,
    read_tensors,
    tensor_shapes,
)
from stageline.checkpoint.layout import BASE_FOLDER, base_sum, own_manifest
from stageline.errors import CheckpointError, UserError
from stageline.hub import PREFIX, local_folder, read_name
from stageline.model_folder import load_config, read_json
from stageline.modules.expert_weight import expert_parameters
from stageline.modules.lora import (
    ExpertsLoRA,
    LoRAWrapper,
    adapters_in,
    innermost,
    is_linear,
    lora_stacks,
    merge_lora,
    strip_lora,
)
from stageline.modules.lora_layer import MAGNITUDE, LoRALayer
from stageline.modules.new_rows import (
    enlarge,
    fold_rows,
    vocab_size_of,
    vocabulary_modules,
    vocabulary_paths,
)
from stageline.stage import Stage

PEFT_PREFIX = "base_model.model."
STACK_FOLDER = "stack"
_PART = re.compile(r"^(?P<module>.+)\.lora_(?P<which>[AB])\.weight$")
NESTED = ".base_layer"  # peft wraps a module again for each further weight of experts
_MAGNITUDE = re.compile(rf"^(?P<module>.+)\.{MAGNITUDE}(\.weight)?$")
# Fields of peft's LoraConfig that leave an adapter plain LoRA or DoRA: they are used here, or have
# no effect on saved weights. Any other must be at its default. benchmarks/adapter_fields.md
HARMLESS_FIELDS = frozenset(
    "alpha_pattern base_model_name_or_path lora_alpha modules_to_save revision task_type "
    "trainable_token_indices use_dora use_rslora auto_mapping corda_config ensure_weight_tying "
    "eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform "
    "loftq_config lora_dropout lora_ga_config megatron_core peft_version qalora_group_size r "
    "rank_pattern runtime_config target_modules target_parameters".split()
)
# Starts that leave the base as it is; pissa, olora, corda, loftq and lora_ga change it
PLAIN_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
# rows of new tokens, as peft names them: the rows themselves, not what was added to them
INDICES = "trainable_token_indices"
ROWS_OF_PEFT = ".token_adapter.trainable_tokens_delta"
# peft saves the whole matrix of which it trains rows under this name
WHOLE_OF_PEFT = ".token_adapter.base_layer"
VOCABULARIES = ("embed_tokens", "wte", "embed_in", "head", "embed_out")  # last names of modules
CONFIG = "config.json"
Model = TypeVar("Model", bound=nn.Module)
Rows = dict[str, tuple[list[int], torch.Tensor]]


def fit_vocabulary(model: nn.Module, adapters: "Iterable[Adapter]") -> None:
    """Enlarge embedding and head of a filled model to what adapters hold for them."""
    paths = _paths(model)
    needed = [0]
    for adapter in adapters:
        needed += [max(ids) + 1 for ids, _ in adapter.rows.values()]
        whole = [adapter.extras.get(f"{path}.weight") for path in paths]
        needed += [weight.shape[0] for weight in whole if weight is not None]
    enlarge(model, paths, max(needed))


@torch.no_grad()
def put_rows(model: nn.Module, adapter: "Adapter") -> None:
    """Write the rows of an adapter into those matrices of a model that are here."""
    paths = _paths(model)
    unknown = set(adapter.rows) - set(paths)
    if unknown:
        raise CheckpointError(
            f"the adapter {adapter.folder} has rows of new tokens for {list_names(unknown)}, the "
            f"model for {', '.join(paths)}. Use it with the model it was trained on."
        )
    here = vocabulary_modules(model, paths)
    for path, (ids, values) in adapter.rows.items():
        if path in here:
            weight = here[path].weight
            weight[torch.tensor(ids, device=weight.device)] = values.to(weight)
    known = {token for ids, _ in adapter.rows.values() for token in ids}
    model.__dict__["token_ids"] = tuple(sorted({*getattr(model, "token_ids", ()), *known}))


def _paths(model: nn.Module) -> tuple[str, ...]:
    if (found := getattr(model, "vocabulary", None)) is not None:
        return found
    return vocabulary_paths(model) if isinstance(model, PreTrainedModel) else ()


def rows_share(stage: Stage, *, trained: Sequence[str]) -> Rows:
    """Rows of new tokens that an adapter has to hold, but not those of `trained` whole weights."""
    ids = getattr(stage, "token_ids", ())
    if not ids:
        return {}
    fold_rows(stage)
    weights: dict[int, tuple[str, torch.Tensor]] = {}  # a tied one once
    for path, module in vocabulary_modules(stage, stage.vocabulary).items():
        if f"{path}.weight" not in trained:
            weights.setdefault(id(module.weight), (path, module.weight.detach()))
    index = torch.tensor(ids)
    return {
        path: (list(ids), weight[index.to(weight.device)].to("cpu", copy=True))
        for path, weight in weights.values()
    }


@dataclass(frozen=True)
class Adapter:
    """One adapter folder in memory.

    Attributes:
        pairs: module name, or name of a fused weight of experts -> (A [rank, in], B [out, rank]);
            of E experts A has E * rank rows and B as many columns.
        extras: parameters of modules that were trained whole, by name.
        rows: module -> ids of new tokens and their rows.
        magnitudes: of DoRA, module name -> a length for each output.
        num_experts: name of a fused weight -> E.
    """

    folder: Path
    config: dict[str, Any]
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]
    extras: dict[str, torch.Tensor]
    rows: Rows = field(default_factory=dict)
    magnitudes: dict[str, torch.Tensor] = field(default_factory=dict)
    num_experts: dict[str, int] = field(default_factory=dict)

    def place(self, name: str) -> tuple[str, str]:
        """Return (module, last name of its weight of experts, or "") of a key of `pairs`."""
        module, _, leaf = name.rpartition(".")
        return (module, leaf) if name in self.num_experts else (name, "")

    def rank(self, module: str) -> int:
        return self.pairs[module][0].shape[0] // self.num_experts.get(module, 1)

    def scale(self, module: str) -> float:
        """alpha / rank of one module, or alpha / sqrt(rank) if the adapter says so."""
        rank = self.rank(module)
        alpha = float(_by_pattern(self.config, "alpha_pattern", "lora_alpha", module))
        return alpha / (rank**0.5 if self.config.get("use_rslora") else rank)

    def fill(self, layer: LoRALayer, module: str) -> None:
        """Give a layer the weights of one module."""
        a, b = self.pairs[module]
        found = a.shape[1], b.shape[0], self.num_experts.get(module, 1)
        expected = layer.lora_A.in_features, layer.lora_B.out_features, layer.num_experts
        if found != expected:
            told, own = (f"{i} inputs, {o} outputs, {e} experts" for i, o, e in (found, expected))
            raise CheckpointError(
                f"{self.folder / ADAPTER_FILE} is for {module} with {told}, and the model has "
                f"{own}. Use its own model."
            )
        layer.load(a, b, self.scale(module), self.magnitudes.get(module))

    def wrap(self, name: str, module: nn.Module) -> LoRAWrapper:
        """A layer, or module of experts, with this adapter on it, not yet in the layer's place."""
        _, leaf = self.place(name)
        if leaf:
            wrapper: LoRAWrapper = ExpertsLoRA(module, [leaf], rank=1, alpha=1.0)
        else:
            wrapper = LoRAWrapper(module, rank=1, alpha=1.0, use_dora=name in self.magnitudes)
        self.fill(adapters_in(wrapper)[leaf], name)
        return wrapper


def _by_pattern(config: Mapping[str, Any], patterns: str, default: str, name: str) -> Any:
    """Return the rank or alpha of one module, as peft finds it."""
    known = (config.get(patterns) or {}).items()
    found = (value for key, value in known if re.match(rf"(.*\.)?({key})$", name))
    return next(found, config[default])


def _weights_of_experts(
    config: Mapping[str, Any], paths: Iterable[str], names: Sequence[str]
) -> dict[str, str]:
    """Return path in an adapter's file -> name of the weight of experts that is adapted there.

    peft wraps a module for one weight after the other, in the order of the model's parameters.
    """
    targets = config.get("target_parameters") or []
    nested: dict[str, list[str]] = {}
    for path in paths if targets else ():
        nested.setdefault(path.replace(NESTED, ""), []).append(path)
    found: dict[str, str] = {}
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    for module, wrapped in nested.items():
        known = (
            owners.get(module, []) if names else [f"{module}.{t.split('.')[-1]}" for t in targets]
        )
        own = [n for n in dict.fromkeys(known) if any(f".{n}".endswith(f".{t}") for t in targets)]
        if len(own) == len(wrapped):
            found |= dict(zip(sorted(wrapped, key=len), reversed(own), strict=True))
    return found


def find_base(folder: Path) -> Path:
    """The folder of the model that an adapter belongs to, fetched if it is a hub's.

    One that was saved by the adapter's run is known by its content, and may have moved with it.

    Raises:
        CheckpointError: it is not on this machine, and no hub gives it.
    """
    config = read_adapter_config(folder)
    named = str(config.get("base_model_name_or_path") or "")
    places = [Path(named).expanduser(), folder / named] if named else []
    saved = own_manifest(folder).get("base_sha256")
    if saved is not None:
        own = folder.parent.parent / BASE_FOLDER
        places = [place for place in (*places, own) if base_sum(place) == saved]
    for place in places:
        if place.exists():
            return place
    # with a revision it was written as a name, whatever is in the current directory
    name = f"{PREFIX}{named}@{config['revision']}" if config.get("revision") else named
    why = ""
    if read_name(name) is not None:
        try:
            return local_folder(name, option="its base")
        except UserError as error:
            why = f" ({error})"
    raise CheckpointError(
        f"the adapter {folder} belongs to the model {named!r}, which is not on this machine, or is "
        f"another one now{why}. Put it there, or change base_model_name_or_path in "
        f"{folder / ADAPTER_CONFIG}."
    )


def base_of(folder: Path) -> Path:
    """A model folder itself; of an adapter's folder that of its base, as `find_base`."""
    return find_base(folder) if (folder / ADAPTER_CONFIG).exists() else folder


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json, refused where we would compute something else than `peft` does."""
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    used = [
        f"{name}={str(value)[:60]}"
        for name, value in {"peft_type": None, **config}.items()
        if name not in HARMLESS_FIELDS and not _is_plain(name, value)
    ]
    if used:
        raise CheckpointError(
            f"{path} sets {', '.join(used)}, which is more than plain LoRA or DoRA. Merge it with "
            "peft (merge_and_unload), or convert it to plain LoRA."
        )
    return config


def _is_plain(name: str, value: object) -> bool:
    """Whether a field leaves an adapter plain LoRA: by its value, or as the default of peft."""
    if name == "peft_type":
        return value == "LORA"
    if name == "init_lora_weights":
        return str(value).lower() in PLAIN_STARTS
    if not value or (name, value) == ("bias", "none"):
        return True
    with contextlib.suppress(ImportError):
        from peft import LoraConfig

        return bool(value == getattr(LoraConfig, name, None))
    return False


def read_adapter(folder: str | Path, names: Sequence[str] = ()) -> Adapter:
    """Read an adapter folder that Stageline or `peft` wrote.

    Args:
        names: parameters of the whole model, whose order tells two weights of one module of experts
            apart; without them the order of `target_parameters` does.

    Raises:
        CheckpointError: a file is missing, damaged or holds something else than plain LoRA.
    """
    folder = Path(folder)
    config, file = read_adapter_config(folder), folder / ADAPTER_FILE
    if not file.exists():
        raise CheckpointError(f"{file} is missing. Copy the adapter again, with its safetensors.")
    halves: dict[str, dict[str, torch.Tensor]] = {}
    extras, magnitudes = {}, {}
    rows: Rows = {}
    for name, tensor in read_tensors(file).items():
        plain = name.removeprefix(PEFT_PREFIX)
        if match := _MAGNITUDE.match(plain):
            magnitudes[match["module"]] = tensor
        elif match := _PART.match(plain):
            halves.setdefault(match["module"], {})[match["which"]] = tensor
        elif "lora_" in plain:
            raise CheckpointError(
                f"{file} holds {name}: LoRA on embeddings is not supported. Merge it with peft "
                "first."
            )
        elif ROWS_OF_PEFT in plain:
            module = plain.partition(ROWS_OF_PEFT)[0]
            rows[module] = (_row_ids(config, module), tensor)
        else:
            extras[plain.replace(WHOLE_OF_PEFT, "")] = tensor
    weights = {
        path: name
        for path, name in _weights_of_experts(config, halves, names).items()
        # a linear layer, which peft can adapt by its weight as well
        if not name.endswith(".weight")
        or len(halves[path].get("A", ())) != _by_pattern(config, "rank_pattern", "r", name)
    }
    halves = {weights.get(path, path): half for path, half in halves.items()}
    broken, num_experts = [name for name in halves if NESTED in name], {}
    for name, half in halves.items():
        matrices = half.keys() == {"A", "B"} and all(value.ndim == 2 for value in half.values())
        if not matrices or not half["A"].shape[0] == half["B"].shape[1] > 0:
            broken.append(name)
        elif name in weights.values():
            rank = int(_by_pattern(config, "rank_pattern", "r", name))
            num_experts[name] = half["A"].shape[0] // rank
            broken += [name] if half["A"].shape[0] % rank else []
    broken += [name for name, (ids, values) in rows.items() if values.shape[:1] != (len(ids),)]
    pairs = {module: (half["A"], half["B"]) for module, half in halves.items() if len(half) == 2}
    if not broken:
        wanted = pairs if config.get("use_dora") else {}
        broken += wanted.keys() ^ magnitudes.keys()
        both = wanted.keys() & magnitudes
        broken += [n for n in both if magnitudes[n].shape != pairs[n][1].shape[:1]]
    if broken:
        raise CheckpointError(
            f"{file} does not fit {ADAPTER_CONFIG} (use_dora, {INDICES}) or is damaged at "
            f"{list_names(broken)}. Copy the adapter again."
        )
    return Adapter(folder, config, pairs, extras, rows, magnitudes, num_experts)


def _row_ids(config: Mapping[str, Any], module: str) -> list[int]:
    """Ids of the new tokens whose rows an adapter holds for a module."""
    told = config.get(INDICES) or {}
    if isinstance(told, list):
        return told
    if len(told) == 1:  # this is also right for a tied head, which peft does not list
        return list(next(iter(told.values())))
    found = (ids for name, ids in told.items() if f".{module}".endswith(f".{name}"))
    return list(next(found, []))


def read_stack(folder: Path, names: Sequence[str] = ()) -> list[Adapter]:
    """The adapters in a folder, innermost first; one, unless a run stacked several.

    `names` as of `read_adapter`.
    """
    found = [path for path in (folder / STACK_FOLDER).glob("*") if path.name.isdecimal()]
    ordered = sorted(found, key=lambda path: int(path.name))
    return [read_adapter(path, names) for path in ordered or [folder]]


def attach_adapter(hf_model: Model, adapter_path: str | Path) -> Model:
    """Put an adapter on a filled transformers model, in place: same outputs as with `peft`."""
    adapter = read_adapter(adapter_path, [name for name, _ in hf_model.named_parameters()])
    modules = dict(hf_model.named_modules())
    unknown = set()
    for name in adapter.pairs:
        path, leaf = adapter.place(name)
        found = modules.get(path)
        if not (leaf in expert_parameters(found) if leaf and found else is_linear(found)):
            unknown.add(name)
    unknown |= {name for name in adapter.extras if name.rpartition(".")[0] not in modules}
    refuse_unknown(adapter, unknown, type(hf_model).__name__)
    fit_vocabulary(hf_model, [adapter])
    for name in adapter.pairs:
        path, _ = adapter.place(name)
        wrapper = adapter.wrap(name, hf_model.get_submodule(path))
        wrapper.train(modules[path].training)
        hf_model.set_submodule(path, wrapper)
    put_extras(hf_model, adapter.extras)
    put_rows(hf_model, adapter)
    return hf_model


def refuse_unknown(adapter: Adapter, unknown: set[str], model_name: str) -> None:
    """Refuse an adapter with weights for modules that are not there."""
    if unknown:
        raise CheckpointError(
            f"the adapter {adapter.folder} has weights for {list_names(unknown)}, which are not "
            f"linear layers or experts of {model_name}. Use the model, parts and `lora_target` of "
            "its run."
        )


def adaptable_names(model: Stage) -> set[str]:
    """Return the modules with weights and the weights of the whole model."""
    names = model.parameter_order
    return {*names, *(name.rpartition(".")[0] for name in names)}


def merge_adapters(
    model: nn.Module, paths: Sequence[Path], weights: Sequence[float] | None = None
) -> None:
    """Add adapters to a plain transformers model one after the other, in place, as `peft` would.

    Args:
        weights: how much of each is added; None: all of it.
    """
    weights = weights or (1.0,) * len(paths)
    if len(weights) != len(paths):
        raise UserError(
            f"`adapter_weights` has {len(weights)} numbers for {len(paths)} folders in "
            "`adapter_path`. Give one a folder."
        )
    for path, weight in zip(paths, weights, strict=True):
        attach_adapter(model, path)
        for layer in [one.lora for stack in lora_stacks(model).values() for one in stack]:
            if weight != 1 and layer.use_dora:  # DoRA column norms do not scale
                raise UserError(
                    f"`adapter_weights` {weight:g} is given for {path}, but a DoRA adapter "
                    "cannot be weighted. Give 1 for it."
                )
            layer.scale *= weight
        merge_lora(model)


def put_extras(model: nn.Module, extras: dict[str, torch.Tensor]) -> None:
    """Put modules that were trained whole; a tied head with other values gets its own weight."""
    made: dict[torch.Tensor, nn.Parameter] = {}
    for name, value in extras.items():
        path, _, leaf = name.rpartition(".")
        module = innermost(model.get_submodule(path))
        old = module.get_parameter(leaf)
        value = value.to(device=old.device, dtype=old.dtype)
        new = made.setdefault(old, nn.Parameter(value, requires_grad=old.requires_grad))
        if not new.equal(value):
            new = nn.Parameter(value, requires_grad=old.requires_grad)
        setattr(module, leaf, new)


def note_untied(config: PretrainedConfig) -> None:
    """Say in a configuration that the head has a weight of its own."""
    for one in (config, config.get_text_config(decoder=True)):
        if getattr(one, "tie_word_embeddings", False):
            one.tie_word_embeddings = False


def untie_if_changed(model: Stage, weights: Mapping[str, torch.Tensor]) -> None:
    """Untie a head for which `weights`, by name, are other than those of its embedding."""
    names = [f"{path}.weight" for path in getattr(model, "vocabulary", ())]
    kept = [weights.get(name) for name in names]
    if len(kept) < 2 or all(value is None for value in kept):
        return
    if all(one is not None and kept[0] is not None and one.equal(kept[0]) for one in kept):
        return
    embedding, head = names
    note_untied(model.config)
    whole = getattr(model, "whole_names", None)
    if whole is not None and whole.aliases.get(head) == embedding:
        aliases = {name: first for name, first in whole.aliases.items() if name != head}
        shapes = {**whole.shapes, head: whole.shapes[embedding]}
        model.whole_names = replace(whole, shapes=shapes, aliases=aliases)
        model.parameter_order.append(head)


def fill_earlier_lora(model: Stage, folder: Path, adapters: list[Adapter]) -> None:
    """Fill a stage's LoRAs from an adapter folder: all but the last, or as many as it holds.

    With as many adapters (innermost first) as LoRAs the last one is filled too: that run continues.
    Modules trained whole are noted in `model.carried`: a folder saved from here has to hold them.

    Raises:
        UserError: the counts or kinds do not fit.
        CheckpointError: the adapter has weights that no stage could hold.
    """
    fit_vocabulary(model, adapters)
    stacks = lora_stacks(model)
    whole_names = adaptable_names(model)
    held = {strip_lora(name) for name, _ in model.named_parameters()}
    held |= {name.rpartition(".")[0] for name in held}
    for level, adapter in enumerate(adapters):
        without_lora = adapter.pairs.keys() - stacks.keys()
        unknown = {name for name in without_lora if name in held or name not in whole_names}
        refuse_unknown(adapter, unknown, type(model).__name__)
        for name in adapter.pairs:
            if name not in stacks:
                continue  # another stage has it
            wrappers = stacks[name]
            count = sum(name in other.pairs for other in adapters)
            if len(wrappers) - count not in (0, 1):
                raise UserError(
                    f"{folder} holds {count} adapters for {name}, which has {len(wrappers)} LoRAs "
                    f"here. Set `llm_lora_num` (`vit_lora_num`, `mlp_lora_num`) to {count + 1}."
                )
            layer = wrappers[level].lora
            is_dora = name in adapter.magnitudes
            if is_dora != layer.use_dora or (is_dora and len(wrappers) > 1):
                raise UserError(
                    f"{adapter.folder} holds {'DoRA' if is_dora else 'plain LoRA'} for {name}, "
                    "whose layer here is of another kind. Give it with `adapter_path`."
                )
            if layer.taken is not None:
                raise UserError(
                    f"`lora_init` {layer.start} does not go with the saved adapter "
                    f"{adapter.folder}. Leave it out, or add `create_new_adapter`."
                )
            adapter.fill(layer, name)
            layer.use_rslora = bool(adapter.config.get("use_rslora"))
        here = dict(model.named_parameters(remove_duplicate=False))
        extras = {
            name: value
            for name, value in adapter.extras.items()
            if name in here or name.rpartition(".")[0] in stacks
        }
        put_extras(model, extras)
        put_rows(model, adapter)
        untie_if_changed(model, adapter.extras)
        model.carried = frozenset({*getattr(model, "carried", ()), *extras})


def num_rows_on_disk(
    folder: Path, *, of_base: bool = False, trust_remote_code: bool = False
) -> int:
    """Rows of embedding and head of a model with these weights, for `of_base` without an adapter's.

    Reads no weights; 0: not known.
    """
    base = base_of(folder)
    if not (base / "config.json").exists():
        return 0
    config = load_config(base, trust_remote_code=trust_remote_code)
    num_rows = vocab_size_of(config) or 0
    if of_base or base == folder:
        return num_rows
    width = getattr(config.get_text_config(decoder=True), "hidden_size", None)
    return max([num_rows, *rows_of_adapter(folder, width)])


def token_ids_on_disk(folder: Path) -> list[int]:
    """The new tokens whose rows an adapter folder holds; of another folder none."""
    if not (folder / ADAPTER_CONFIG).exists():
        return []
    indices = read_adapter_config(folder).get(INDICES) or {}
    lists = indices.values() if isinstance(indices, dict) else [indices]
    return sorted({token for ids in lists for token in ids})


def rows_of_adapter(folder: Path, width: int | None) -> list[int]:
    """The sizes that it asks of the vocabulary: by rows, or by a matrix that was trained whole."""
    sizes = [token + 1 for token in token_ids_on_disk(folder)[-1:]]
    kept: tuple[str, ...] = tuple(read_adapter_config(folder).get("modules_to_save") or ())
    file = folder / ADAPTER_FILE
    if not kept or not file.exists():
        return sizes
    for name, shape in tensor_shapes([file]).items():
        module = name.removesuffix(".weight")
        is_matrix = module != name and module.endswith(VOCABULARIES) and module.endswith(kept)
        sizes += [shape[0]] if is_matrix and shape[1:] == (width,) else []
    return sizes


def config_folder(folder: Path, adapters: Sequence[str | Path] = ()) -> Path:
    """The folder whose config.json counts for a model folder, or for an adapter above its base.

    An adapter has its own where the run changed it (scaled positions); the last of `adapters`
    that are put on the model counts.
    """
    for one in (*reversed(adapters), folder):
        if (Path(one) / CONFIG).exists():
            return Path(one)
    return base_of(folder)


def refuse_two_ways(folder: Path, adapters: Sequence[str | Path]) -> None:
    """Refuse adapters by `adapter_path` above one by `model_path`."""
    if adapters:
        raise UserError(
            f"`model_path` {folder} is an adapter, like {','.join(map(str, adapters))}. Give the "
            "base as `model_path`, and name all adapters in `adapter_path`, in their order."
        )


def processor_folder(adapter: Path, base: Path) -> Path:
    """Return the folder of an adapter if its processor is complete there, else that of its base."""
    names = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
    needed = {name for name in names if (base / name).is_file()} | {names[0]}
    return adapter if all((adapter / name).is_file() for name in needed) else base
