"""Adapters in the format of `peft`, read into our LoRA.

An adapter folder holds adapter_config.json and adapter_model.safetensors with names below
`base_model.model.`. Where several LoRAs are stacked, the folder itself is their sum as one adapter
(ranks side by side), which `peft` can load, and `stack/0`, `stack/1` ... are the single ones.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from stageline.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    list_names,
    open_tensors,
    read_tensors,
)
from stageline.checkpoint.layout import BASE_FOLDER, base_sum, own_manifest
from stageline.errors import CheckpointError, UserError
from stageline.hub import PREFIX, local_folder, read_name
from stageline.model_folder import load_config, read_json
from stageline.modules.lora import LoRAWrapper, innermost, is_linear, lora_stacks
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
_MAGNITUDE = re.compile(rf"^(?P<module>.+)\.{MAGNITUDE}(\.weight)?$")
# Fields of peft's LoraConfig that leave an adapter plain LoRA or DoRA: they are used here, or have
# no effect on saved weights. Any other must be at its default. benchmarks/adapter_fields.md
HARMLESS_FIELDS = frozenset(
    "alpha_pattern base_model_name_or_path lora_alpha modules_to_save revision task_type "
    "trainable_token_indices use_dora use_rslora auto_mapping corda_config ensure_weight_tying "
    "eva_config exclude_modules fan_in_fan_out inference_mode layers_pattern layers_to_transform "
    "loftq_config lora_dropout lora_ga_config megatron_core peft_version qalora_group_size r "
    "rank_pattern runtime_config target_modules".split()
)
# Starts that leave the base as it is; pissa, olora, corda, loftq and lora_ga change it
PLAIN_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
# rows of new tokens, as peft names them: the rows themselves, not what was added to them. The base
# is enlarged for them; before peft loads them: `model.resize_token_embeddings(len(tokenizer))`
INDICES = "trainable_token_indices"
ROWS_OF_PEFT = ".token_adapter.trainable_tokens_delta"
# what peft keeps of a whole matrix whose rows it trains
WHOLE_OF_PEFT = ".token_adapter.base_layer"
VOCABULARIES = ("embed_tokens", "wte", "embed_in", "head", "embed_out")  # last names of modules
CONFIG = "config.json"
Model = TypeVar("Model", bound=nn.Module)
Rows = dict[str, tuple[list[int], torch.Tensor]]


def split_rows(
    extras: Mapping[str, torch.Tensor], config: Mapping[str, Any], file: Path
) -> tuple[Rows, dict[str, torch.Tensor]]:
    """What is beside LoRA in an adapter: module -> (ids, rows), and whole parameters by name."""
    told = config.get(INDICES) or {}
    rows: Rows = {}
    whole = {}
    for name, tensor in extras.items():
        module, is_rows, _ = name.partition(ROWS_OF_PEFT)
        if not is_rows:
            whole[name.replace(WHOLE_OF_PEFT, "")] = tensor
            continue
        ids = told if isinstance(told, list) else _of_module(told, module)
        if ids is None or tensor.ndim != 2 or len(ids) != len(tensor):
            raise CheckpointError(
                f"{file} holds {list(tensor.shape)} rows of new tokens for {module}, and "
                f"{ADAPTER_CONFIG} names {0 if ids is None else len(ids)} of them in {INDICES}: "
                "one id a row was expected. Copy the adapter again."
            )
        rows[module] = (list(ids), tensor)
    return rows, whole


def _of_module(told: Mapping[str, list[int]], module: str) -> list[int] | None:
    if len(told) == 1:  # of a tied head, too, which peft does not name
        return next(iter(told.values()))
    return next(
        (ids for name, ids in told.items() if module == name or module.endswith("." + name)), None
    )


def fit_vocabulary(model: nn.Module, adapters: "Iterable[Adapter]") -> None:
    """Enlarges embedding and head of a filled model to what adapters hold for them."""
    paths = _paths(model)
    needed = [0]
    for adapter in adapters:
        needed += [max(ids) + 1 for ids, _ in adapter.rows.values()]
        whole = [adapter.extras.get(f"{path}.weight") for path in paths]
        needed += [weight.shape[0] for weight in whole if weight is not None]
    enlarge(model, paths, max(needed))


@torch.no_grad()
def put_rows(model: nn.Module, adapter: "Adapter") -> None:
    """Writes the rows of an adapter into those matrices of a model that are here."""
    paths = _paths(model)
    unknown = set(adapter.rows) - set(paths)
    if unknown:
        raise CheckpointError(
            f"the adapter {adapter.folder} has rows of new tokens for {', '.join(sorted(unknown))},"
            f" embedding or head were expected, which are {', '.join(paths)} here: use it with the "
            "model it was trained on."
        )
    here = vocabulary_modules(model, paths)
    for path, (ids, values) in adapter.rows.items():
        if path in here:
            weight = here[path].weight
            weight[torch.tensor(ids, device=weight.device)] = values.to(weight)
    known = {token for ids, _ in adapter.rows.values() for token in ids}
    model.__dict__["token_ids"] = tuple(sorted({*getattr(model, "token_ids", ()), *known}))


def _paths(model: nn.Module) -> tuple[str, ...]:
    found = getattr(model, "vocabulary", None)
    if found is not None:
        return found
    if not hasattr(model, "get_input_embeddings"):
        return ()
    return vocabulary_paths(cast(PreTrainedModel, model))


def rows_share(stage: Stage, *, trained: Sequence[str]) -> Rows:
    """Rows of new tokens that an adapter has to hold, but not those of `trained` whole weights."""
    ids = getattr(stage, "token_ids", ())
    if not ids:
        return {}
    fold_rows(stage)
    rows: Rows = {}
    done: set[int] = set()
    for path, module in vocabulary_modules(stage, stage.vocabulary).items():
        weight = module.weight
        if f"{path}.weight" in trained or id(weight) in done:
            continue
        done.add(id(weight))
        index = torch.tensor(ids, device=weight.device)
        rows[path] = (list(ids), weight.detach()[index].to("cpu", copy=True))
    return rows


@dataclass(frozen=True)
class Adapter:
    """One adapter folder in memory.

    Attributes:
        pairs: module name -> (A [rank, in], B [out, rank]).
        extras: parameters of modules that were trained whole, by name.
        rows: module -> ids of new tokens and their rows.
        magnitudes: of DoRA, module name -> a length for each output.
    """

    folder: Path
    config: dict[str, Any]
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

    def fill(self, layer: LoRALayer, module: str) -> None:
        """Gives a layer the weights of one module.

        Raises:
            CheckpointError: they are for a layer of another shape.
        """
        a, b = self.pairs[module]
        found = a.shape[1], b.shape[0]
        expected = layer.lora_A.in_features, layer.lora_B.out_features
        if found != expected:
            raise CheckpointError(
                f"{self.folder / ADAPTER_FILE} is for {module} with {found[0]} inputs and "
                f"{found[1]} outputs, the model's has {expected[0]} and {expected[1]}: an adapter "
                "fits the model it was trained on alone. Use it with that one."
            )
        layer.load(a, b, self.scale(module), self.magnitudes.get(module))

    def wrap(self, name: str, module: nn.Module) -> LoRAWrapper:
        """A linear layer with this adapter on it, not yet in the layer's place."""
        wrapper = LoRAWrapper(module, rank=1, alpha=1.0, use_dora=name in self.magnitudes)
        self.fill(wrapper.lora, name)
        return wrapper


def find_base(folder: Path) -> Path:
    """The folder of the model that an adapter belongs to, by its name on a hub if it has none.

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
    found = next((place for place in places if place.exists()), None)
    if found is not None:
        return found
    # with a revision it was written as a name, whatever lies in the current directory
    name = f"{PREFIX}{named}@{config['revision']}" if config.get("revision") else named
    why = ""
    if read_name(name) is not None:
        try:
            return local_folder(name, option="its base")
        except UserError as error:
            why = f" ({error})"
    raise CheckpointError(
        f"the adapter {folder} belongs to the model {named!r}, which is not on this machine, or is "
        f"another one now: its weights are the greater part{why}. Put them there, or change "
        f"base_model_name_or_path in {folder / ADAPTER_CONFIG}."
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
            f"{path} sets {', '.join(used)}, which is more than plain LoRA or DoRA. Merge the "
            "adapter into its base with peft (merge_and_unload), or convert it to plain LoRA "
            "(save_pretrained with path_initial_model_for_weight_conversion)."
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
    try:
        from peft import LoraConfig
    except ImportError:
        return False
    return bool(value == getattr(LoraConfig, name, None))


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
    config: dict[str, Any],
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


def read_stack(folder: Path) -> list[Adapter]:
    """The adapters in a folder, innermost first; one, unless a run stacked several."""
    return [read_adapter(path) for path in _stack_folders(folder)]


def _stack_folders(folder: Path) -> list[Path]:
    found = [path for path in (folder / STACK_FOLDER).glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name)) or [folder]


def attach_adapter(hf_model: Model, adapter_path: str | Path) -> Model:
    """Puts an adapter on a filled transformers model, in place: same outputs as with `peft`.

    Raises:
        CheckpointError: the adapter names modules that the model has not, or other shapes.
    """
    adapter = read_adapter(adapter_path)
    modules = dict(hf_model.named_modules())
    unknown = {name for name in adapter.pairs if not is_linear(modules.get(name))}
    unknown |= {name for name in adapter.extras if name.rpartition(".")[0] not in modules}
    refuse_unknown(adapter, unknown, type(hf_model).__name__)
    fit_vocabulary(hf_model, [adapter])
    for name in adapter.pairs:
        wrapper = adapter.wrap(name, modules[name])
        wrapper.train(modules[name].training)
        hf_model.set_submodule(name, wrapper)
    put_extras(hf_model, adapter.extras)
    put_rows(hf_model, adapter)
    return hf_model


def refuse_unknown(adapter: Adapter, unknown: set[str], model_name: str) -> None:
    """Refuses an adapter with weights for modules that are not there."""
    if unknown:
        raise CheckpointError(
            f"the adapter {adapter.folder} has weights for {list_names(unknown)}, linear layers of "
            f"{model_name} were expected: left out, the model would answer differently. Use the "
            "adapter with the model it was trained on, with LoRA on the same parts and the same "
            "`lora_target`."
        )


def put_extras(model: nn.Module, extras: dict[str, torch.Tensor]) -> None:
    """Puts modules that were trained whole; a tied head with other values gets its own weight."""
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


def untie_if_changed(model: Stage, weights: Mapping[str, torch.Tensor]) -> None:
    """Unties a head that gets other weights than its embedding: on each stage, by what files hold.

    Args:
        weights: name -> what is there for embedding and head, if anything is.
    """
    names = [f"{path}.weight" for path in getattr(model, "vocabulary", ())]
    kept = [weights.get(name) for name in names]
    if len(kept) < 2 or all(value is None for value in kept):
        return
    first = kept[0]
    if first is not None and all(value is not None and value.equal(first) for value in kept):
        return
    embedding, head = names
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    whole = getattr(model, "whole_names", None)
    if whole is not None and whole.aliases.get(head) == embedding:
        others = {name: first for name, first in whole.aliases.items() if name != head}
        shapes = {**whole.shapes, head: whole.shapes[embedding]}
        model.whole_names = replace(whole, shapes=shapes, aliases=others)
        model.parameter_order.append(head)


def fill_earlier_lora(model: Stage, folder: Path, adapters: list[Adapter]) -> None:
    """Fills a stage's LoRAs from an adapter folder: all but the last, or as many as it holds.

    With as many adapters (innermost first) as LoRAs the last one is filled too: that run goes on.
    What was trained whole is noted in `model.carried`: a folder saved from here has to hold it too.

    Raises:
        UserError: the counts do not fit.
        CheckpointError: the adapter has weights that no stage could hold.
    """
    fit_vocabulary(model, adapters)
    stacks = lora_stacks(model)
    whole_names = {name.rpartition(".")[0] for name in model.parameter_order}
    for level, adapter in enumerate(adapters):
        refuse_unknown(adapter, _unplaced(adapter, whole_names, model), type(model).__name__)
        for name in adapter.pairs:
            if name not in stacks:
                continue  # another stage has it
            wrappers = stacks[name]
            count = sum(name in other.pairs for other in adapters)
            if len(wrappers) - count not in (0, 1):
                raise UserError(
                    f"{folder} holds {count} adapters for {name}, which has {len(wrappers)} LoRAs "
                    f"here; as many or one more were expected: each adapter fills one LoRA and the "
                    f"last may be new. Set `llm_lora_num` (or `vit_lora_num`, `mlp_lora_num`) to "
                    f"{count + 1}, or merge them with export.py `merge`."
                )
            layer = wrappers[level].lora
            _check_kind(adapter, name, layer, is_alone=len(wrappers) == 1)
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


def _check_kind(adapter: Adapter, name: str, layer: LoRALayer, *, is_alone: bool) -> None:
    """Refuses an adapter of another kind than the layer that is to hold it."""
    is_dora = name in adapter.magnitudes
    if is_dora != layer.use_dora or (is_dora and not is_alone):
        raise UserError(
            f"{adapter.folder} holds {'DoRA' if is_dora else 'plain LoRA'} for {name}, the same "
            "kind was expected here, and DoRA without another adapter on its layer: its length is "
            "that of one sum. Give it with `adapter_path`, which takes the kind from the file "
            "(with `create_new_adapter` it is merged first)."
        )
    if layer.taken is not None:
        raise UserError(
            f"{adapter.folder} came with `lora_init` {layer.start}, a new adapter was expected: a "
            "saved one belongs to the weights before PiSSA. Leave `lora_init` out, or add "
            "`create_new_adapter` to `adapter_path`."
        )


def _unplaced(adapter: Adapter, whole_names: set[str], model: nn.Module) -> set[str]:
    """Modules of an adapter that are this stage's and have no LoRA, or that are nowhere."""
    holds = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    without_lora = adapter.pairs.keys() - lora_stacks(model).keys()
    return {name for name in without_lora if name in holds or name not in whole_names}


def num_rows_on_disk(
    folder: Path, *, of_base: bool = False, trust_remote_code: bool = False
) -> int:
    """Rows of embedding and head that a model with these weights has; 0: not known.

    Reads no weights. With `of_base` an adapter's own rows do not count.
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
    lists = list(indices.values()) if isinstance(indices, dict) else [indices]
    return sorted({token for ids in lists for token in ids})


def rows_of_adapter(folder: Path, width: int | None) -> list[int]:
    """The sizes that it asks of the vocabulary: by rows, or by a matrix that was trained whole."""
    sizes = [token + 1 for token in token_ids_on_disk(folder)[-1:]]
    kept: tuple[str, ...] = tuple(read_adapter_config(folder).get("modules_to_save") or ())
    file = folder / ADAPTER_FILE
    if not kept or not file.exists():
        return sizes
    with open_tensors(file) as tensors:
        for name in list(tensors.keys()):
            module = name.removesuffix(".weight")
            is_matrix = module.endswith(VOCABULARIES) and module.endswith(kept)
            shape = tensors.get_slice(name).get_shape() if is_matrix and module != name else []
            sizes += [shape[0]] if shape[1:] == [width] else []
    return sizes


def config_folder(folder: Path, adapters: Sequence[str | Path] = ()) -> Path:
    """The folder whose config.json counts for a model folder, or for an adapter above its base.

    An adapter has its own where the run changed it (scaled positions). Of `adapters` that are put
    on the model, the last one that has a configuration counts.
    """
    for adapter in reversed(adapters):
        if (Path(adapter) / CONFIG).exists():
            return Path(adapter)
    if (folder / CONFIG).exists() or not (folder / ADAPTER_CONFIG).exists():
        return folder
    return find_base(folder)


def refuse_two_ways(folder: Path, adapters: Sequence[str | Path]) -> None:
    """Refuses adapters by `adapter_path` above one by `model_path`."""
    if adapters:
        raise UserError(
            f"`model_path` {folder} is an adapter, and `adapter_path` "
            f"{','.join(map(str, adapters))} came too; the base of these was expected as "
            "`model_path`: it is what they are put on. Name all adapters in `adapter_path`, in "
            "their order."
        )


def processor_folder(adapter: Path, base: Path) -> Path:
    """An adapter's own folder, which may know new tokens, if all is there that its base has."""
    names = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
    needed = {name for name in names if (base / name).is_file()} | {names[0]}
    return adapter if all((adapter / name).is_file() for name in needed) else base
