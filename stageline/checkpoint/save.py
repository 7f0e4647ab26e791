"""Save a split model as one folder that Hugging Face libraries read.

A full fine-tune becomes a model folder: each stage writes its own shards with names as on disk, by
transformers' own reverse conversion. A LoRA run becomes an adapter folder in the format of `peft`,
with the frozen base by reference.
"""

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.adapter import (
    INDICES,
    NESTED,
    PEFT_PREFIX,
    ROWS_OF_PEFT,
    STACK_FOLDER,
    rows_share,
)
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, write_tensors
from stageline.checkpoint.layout import BASE_FOLDER, base_sum, draft_name, publish, refuse_existing
from stageline.checkpoint.plain_model import task_of
from stageline.checkpoint.shards import (
    HostCopies,
    Shard,
    copy_state,
    disk_state,
    gathered,
    save_config,
    save_stop_ids,
    shard_name,
    split_state,
    write_index,
    write_shard,
)
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.hub import name_of
from stageline.modules.lora import (
    WRAPPED,
    Adapted,
    is_lora_name,
    lora_stacks,
    strip_lora,
    unwrapped,
)
from stageline.modules.lora_layer import MAGNITUDE, ExpertParameter
from stageline.modules.new_rows import is_row_name
from stageline.modules.stage_names import check_names, names_of_stage
from stageline.stage import Stage, default_loader

SUM = -1  # stands for all levels as one adapter
KINDS = ("use_dora", "use_rslora")
# last names that peft 0.21 reads as those of experts, which transformers 5 has fused
EXPERTS_OF_PEFT = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class AdapterLevel:
    """One adapter of a stage: of stacked ones those of one level, or all of them side by side.

    Attributes:
        tensors: copies on the host, by name in the file.
        facts: name of a module or weight of experts -> (rank, alpha, whether the layer keeps its
            weight transposed).
        experts: the weights of experts among them.
        file: where the tensors were written; then they are not here any more.
    """

    tensors: Shard
    facts: dict[str, tuple[int, float, bool]]
    kinds: set[str]  # a part of `KINDS`
    experts: list[str]
    file: str = ""


@dataclass(frozen=True)
class AdapterShare:
    """Adapter weights that one stage saves.

    Attributes:
        depth: adapters stacked on the layer that has most.
        levels: 0 is the innermost one; `SUM` all of them.
        modules: modules that were trained whole.
        token_ids: module -> ids of the new tokens whose rows are among the tensors.
    """

    stage: int
    depth: int
    dropout: float
    levels: dict[int, AdapterLevel]
    modules: list[str]
    token_ids: dict[str, list[int]]


def trained_names(stage: nn.Module) -> list[str]:
    """Parameters besides the adapters that this stage trains; a tied one under each name.

    Those, too, that an earlier adapter on which this run builds trained whole.

    Raises:
        UserError: a weight below an adapter is trained: an adapter folder has no place for it.
    """
    names = []
    carried = getattr(stage, "carried", ())
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        is_kept = parameter.requires_grad or strip_lora(name) in carried
        if not is_kept or is_lora_name(name) or is_row_name(name):
            continue
        if WRAPPED in name.split("."):
            raise UserError(
                f"{strip_lora(name)} is trained and has a LoRA as well. Freeze the base of layers "
                "with LoRA, or merge the earlier adapter (`adapter_path`, `create_new_adapter`)."
            )
        names.append(name)
    return names


def adapter_share(stage: Stage, *, claimed: set[str]) -> AdapterShare:
    """Copy this stage's share of every adapter, without trained names that others `claimed`."""
    stacks = lora_stacks(stage)
    depth = max((len(wrappers) for wrappers in stacks.values()), default=0)
    trained = trained_names(stage)
    extras = [name for name in trained if name not in claimed]
    rows = rows_share(stage, trained=trained)
    parameters = dict(stage.named_parameters(remove_duplicate=False))
    levels = {level: _adapter_level(stacks, level) for level in _levels(depth)}
    for level in {SUM, depth - 1} & levels.keys():
        state = levels[level].tensors
        for name in extras:
            value = parameters[name].detach()
            state[PEFT_PREFIX + name] = value.clone() if value.device.type == "cpu" else value
        for module, (_, values) in rows.items():
            state[PEFT_PREFIX + module + ROWS_OF_PEFT] = values
    for one in levels.values():
        copies = HostCopies()
        for name, tensor in one.tensors.items():
            if tensor.device.type != "cpu":
                one.tensors[name] = copies.copy(name, tensor)
        copies.wait()
    dropout = 0.0
    for stack in stacks.values():
        dropout = getattr(stack[-1].lora.dropout, "p", 0.0)
    modules = sorted({name.rpartition(".")[0] for name in extras})
    token_ids = {module: ids for module, (ids, _) in rows.items()}
    return AdapterShare(stage.stage, depth, dropout, levels, modules, token_ids)


def _levels(depth: int) -> list[int]:
    return [SUM, *range(depth)] if depth > 1 else [SUM]


def _adapter_level(stacks: Mapping[str, Sequence[Adapted]], level: int) -> AdapterLevel:
    found = AdapterLevel({}, {}, set(), [])
    chosen = {
        name: stack if level == SUM else stack[level : level + 1] for name, stack in stacks.items()
    }
    chosen = {name: stack for name, stack in chosen.items() if stack}
    for name, stack in chosen.items():
        layers, base = [one.lora for one in stack], stack[0].base
        last = layers[-1]
        num_experts = last.num_experts
        downs = [one.lora_A.weight.detach().unflatten(0, (num_experts, -1)) for one in layers]
        ups = [
            (one.lora_B.weight.detach() * (one.scale / last.scale)).unflatten(1, (-1, num_experts))
            for one in layers
        ]
        if last.taken is not None:  # the file is for the weights before PiSSA
            down, up = (value.to(downs[0]) for value in last.taken)
            downs, ups = [*downs, down.unsqueeze(0)], [*ups, -up.unsqueeze(2)]
        values = {
            "lora_A.weight": torch.cat(downs, dim=1).flatten(0, 1),
            "lora_B.weight": torch.cat(ups, dim=1).flatten(1, 2),
        }
        if last.lora_magnitude_vector is not None:
            values[MAGNITUDE] = last.lora_magnitude_vector.detach().clone()
        path = name
        if isinstance(base, ExpertParameter):
            found.experts.append(name)
            path, _, leaf = name.rpartition(".")
            inside = [one for one in base.module._parameters if f"{path}.{one}" in chosen]
            path += NESTED * (len(inside) - 1 - inside.index(leaf))
        for leaf, value in values.items():
            found.tensors[f"{PEFT_PREFIX}{path}.{leaf}"] = value.contiguous()
        rank = sum(layer.rank * (1 if layer.taken is None else 2) for layer in layers)
        found.facts[name] = rank, last.scale * rank, isinstance(base, Conv1D)
        found.kinds.update(kind for kind in KINDS for layer in layers if getattr(layer, kind))
    return found


def _merge_parts(parts: list[AdapterShare], folder: Path, *, base: str, model_class: str) -> None:
    """Make one adapter of the stages' parts, and one per level where adapters are stacked."""
    depth = max(part.depth for part in parts)
    token_ids = {module: ids for part in parts for module, ids in part.token_ids.items()}
    # Modules that were trained whole. A parameter of the base model itself (the line end of
    # LLaVA-NeXT) has no module that peft could replace; peft reads it by its name.
    adapted = {name for part in parts for level in part.levels.values() for name in level.facts}
    modules = [
        module
        for module in sorted({name for part in parts for name in part.modules})
        if not any(name.startswith(f"{module}.") for name in adapted)
    ]
    outermost = [m for m in modules if not any(m.startswith(f"{other}.") for other in modules)]
    hub = name_of(base)  # the cache has another path on another machine
    for number in _levels(depth):
        target = folder if number == SUM else folder / STACK_FOLDER / str(number)
        target.mkdir(parents=True, exist_ok=True)
        levels = [part.levels[number] for part in parts if number in part.levels]
        tensors = {}
        for level in levels:
            tensors.update(load_file(folder / level.file) if level.file else {})
        has_extras = number in (SUM, depth - 1)
        facts = {name: fact for level in levels for name, fact in level.facts.items()}
        kinds = {kind for level in levels for kind in level.kinds}
        if "use_rslora" in kinds:  # the scale is alpha / sqrt(rank) then, and stays what it is
            facts = {n: (r, round(alpha / r**0.5, 9), t) for n, (r, alpha, t) in facts.items()}
        experts = [name for level in levels for name in level.experts]
        ordered = sorted(facts)
        rank, alpha, _ = facts[ordered[0]]
        # linear layers that peft would take for single experts of an older file
        linear = [name for name in ordered if name not in experts]
        weights = [n for n in linear if experts and n.rpartition(".")[2] in EXPERTS_OF_PEFT]
        patterns = {n: facts[n] for n in ordered} | {f"{n}.weight": facts[n] for n in weights}
        config = {
            "peft_type": "LORA",
            "task_type": task_of(model_class),
            "base_model_name_or_path": hub.repo if hub else base,
            "revision": hub.revision if hub else None,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": max(part.dropout for part in parts),
            "bias": "none",
            "inference_mode": True,
            "init_lora_weights": True,
            "fan_in_fan_out": any(transposed for _, _, transposed in facts.values()),
            "target_modules": [name for name in linear if name not in weights],
            **(
                {"target_parameters": [*experts, *(f"{name}.weight" for name in weights)]}
                if experts
                else {}
            ),
            "modules_to_save": (outermost if has_extras else []) or None,
            "rank_pattern": {re.escape(n): f[0] for n, f in patterns.items() if f[0] != rank},
            "alpha_pattern": {re.escape(n): f[1] for n, f in patterns.items() if f[1] != alpha},
            **({INDICES: token_ids} if token_ids and has_extras else {}),
            **dict.fromkeys(sorted(kinds), True),
        }
        write_tensors(dict(sorted(tensors.items())), target / ADAPTER_FILE)
        (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    for level in [level for part in parts for level in part.levels.values() if level.file]:
        (folder / level.file).unlink()


MAX_SHARD_BYTES = 5_000_000_000
Files = dict[str, dict]  # path below the folder -> size and sha256


def save_split_model(
    model: Stage | Sequence[Stage],
    processor: object | None,
    folder: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
    step: int | None = None,
    base_path: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    facts: dict[str, object] | None = None,
) -> Path:
    """Save the stages of all ranks of `group` as one folder; every rank calls this.

    Args:
        model: this rank's stage, or stages.
        processor: tokenizer or processor to save next to the weights.
        folder: a new folder on a file system that all ranks share.
        group: the ranks of one pipeline; gloo where there is a choice. Needs no process group.
        replicas: the ranks with the same stages, of which the first writes and the others wait; it
            puts sharded weights together, a stage on its rank. None: there is one replica.
        step, facts: for the manifest.
        base_path: of a LoRA run, the folder of the frozen model; None: where it was loaded from,
            and a base that started at random is saved too.
        max_shard_bytes: largest file of weights.

    Raises:
        UserError: the folder exists, or a trained weight has no place in an adapter.
        StorageError: a rank could not write; all ranks raise, the folder is not there.
    """
    stages: list[Stage] = list(model) if isinstance(model, Sequence) else [model]
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    ranks = Ranks.of(group)

    def write() -> None:
        draft = start_draft(folder, ranks)
        saver = WeightSaver(
            stages, ranks=ranks, base_path=base_path, max_shard_bytes=max_shard_bytes, draft=draft
        )
        shares: list[WeightShare] = []
        ranks.together(lambda: shares.append(saver.share()), draft)
        written, known = saver.write(shares[0], draft, folder)
        told = {**written, "step": step, **(facts or {})}
        finish_draft(draft, folder, ranks, processor=processor, facts=told, known=known)

    if replicas is None:
        write()
        return folder
    among = Ranks.of(replicas)
    with gathered(stages, keep=among.rank == 0):
        among.on_first(write)
    return folder


def start_draft(folder: Path, ranks: Ranks) -> Path:
    """Make the folder in which all ranks write, under another name than `folder`."""
    draft = folder.parent / ranks.gather(draft_name(folder))[0]

    def start() -> None:
        refuse_existing(folder)
        draft.mkdir()

    ranks.on_first(start, draft)
    return draft


def finish_draft(
    draft: Path,
    folder: Path,
    ranks: Ranks,
    *,
    processor: object | None,
    facts: dict[str, object],
    known: Files,
) -> None:
    """Write the manifest when all ranks are done, and give the folder its name."""
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "safetensors")}

    def finish() -> None:
        if processor is not None:
            default_loader().save_processor(processor, draft)
            save_stop_ids(processor, draft)
        publish(draft, folder, facts={**facts, "versions": versions}, known=known)

    ranks.on_first(finish, draft)


@dataclass(frozen=True)
class WeightShare:
    """Weights that one rank saves: stage -> tensors by name on disk, and adapters of stages."""

    full: dict[int, Shard] = field(default_factory=dict)
    adapters: list[AdapterShare] = field(default_factory=list)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all that is saved; modules trained whole come once for each level of adapters."""
        for state in self.full.values():
            yield from state.items()
        for adapter in self.adapters:
            for level in adapter.levels.values():
                yield from level.tensors.items()


class WeightSaver:
    """Saves the weights of this rank's stages together with those of the other ranks.

    Every rank makes one and calls the same methods. Who saves which tied weight is learned once.

    Args:
        stages: of this rank; empty on a rank that only takes part.
        ranks: those that save one folder.
        draft: removed if a rank fails here.

    Attributes:
        is_adapter: some stage has LoRA, so that an adapter folder is written.
        base: of an adapter, the folder of the frozen model; None: it is saved too.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        ranks: Ranks,
        base_path: str | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        draft: Path | None = None,
    ) -> None:
        self.stages, self.ranks, self.max_shard_bytes = list(stages), ranks, max_shard_bytes
        self.is_adapter = any(ranks.gather(any(lora_stacks(stage) for stage in self.stages)))
        loaded = [getattr(stage, "loaded_from", None) for stage in self.stages]
        found = [path for paths in ranks.gather(loaded) for path in paths if path]
        self.base = base_path or next(iter(found), None)
        # a folder could hold one copy only of two weights with one name
        told = ranks.together(lambda: [names_of_stage(stage) for stage in self.stages], draft)
        named = [one for some in told for one in some]
        ranks.together(lambda: check_names(named) if named else None, draft)

        def all_names(stage: nn.Module) -> list[str]:
            with unwrapped(stage):
                return list(stage.state_dict())

        self._claimed_names = self._claimed(all_names, draft)
        self._claimed_trained = self._claimed(trained_names, draft) if self.is_adapter else []

    def share(self, *, copies: HostCopies | None = None) -> WeightShare:
        """Collect the weights that this rank saves, without any exchange.

        Args:
            copies: host memory for copies, so that training may continue; None: no copies are made.
        """
        if not self.is_adapter:
            return WeightShare(full=self._full(copies=copies))
        adapters = [
            adapter_share(stage, claimed=names)
            for stage, names in zip(self.stages, self._claimed_trained, strict=True)
        ]
        base = self._full(copies=None) if self.base is None else {}  # it does not change
        return WeightShare(full=base, adapters=adapters)

    def write(
        self, share: WeightShare, draft: Path, folder: Path
    ) -> tuple[dict[str, object], Files]:
        """Write a share of each rank; return facts for the manifest, and what is hashed."""
        count = self.stages[0].num_stages if self.stages else None
        facts: dict[str, object] = {"num_stages": count}
        if not self.is_adapter:
            return {"kind": "full", **facts}, self._write_full(share, draft, draft)
        known: Files = {}
        base = self.base
        if base is None:
            base = str(folder / BASE_FOLDER)
            known = self._write_full(share, draft / BASE_FOLDER, draft)
        self._write_adapter(share, draft, base)
        facts["base_sha256"] = base_sum(Path(base))  # another run may save to this path
        return {"kind": "adapter", "base": base, **facts}, known

    def write_base(self, draft: Path) -> Files:
        """Write only the frozen weights, as a model folder; `base` is for the caller to set."""
        return self._write_full(WeightShare(full=self._full(copies=None)), draft, draft)

    def _claimed(
        self, names_of: Callable[[nn.Module], list[str]], draft: Path | None
    ) -> list[set[str]]:
        """Return, for each stage here, the names that an earlier stage saves."""
        stages, ranks = self.stages, self.ranks
        told = ranks.together(lambda: [(stage.stage, names_of(stage)) for stage in stages], draft)
        everything = [(index, name) for pairs in told for index, names in pairs for name in names]
        return [{name for index, name in everything if index < s.stage} for s in stages]

    def _full(self, *, copies: HostCopies | None) -> dict[int, Shard]:
        states = {}
        for stage, names in zip(self.stages, self._claimed_names, strict=True):
            state = disk_state(stage, names)
            states[stage.stage] = copy_state(state, stage, copies) if copies else state
        return states

    def _write_full(self, share: WeightShare, folder: Path, draft: Path) -> Files:
        """Write shards, index and config."""
        planned: dict[int, list[Shard]] = {}

        def plan() -> dict[int, int]:
            folder.mkdir(parents=True, exist_ok=True)
            for index, state in share.full.items():
                planned[index] = split_state(state, self.max_shard_bytes)
            return {index: len(shards) for index, shards in planned.items()}

        counts = {k: v for told in self.ranks.together(plan, draft) for k, v in told.items()}
        keys = [(index, k) for index in sorted(counts) for k in range(counts[index])]
        names = {key: shard_name(number, len(keys)) for number, key in enumerate(keys, start=1)}

        def write() -> dict[str, tuple[dict, dict[str, int]]]:
            written = {}
            for index, shards in planned.items():
                for position, shard in enumerate(shards):
                    name = names[index, position]
                    written[name] = write_shard(shard, folder / name)
            for stage in self.stages:
                if stage.stage == 0:
                    save_config(stage, folder)
            return written

        written = {k: v for told in self.ranks.together(write, draft) for k, v in told.items()}
        if self.ranks.rank == 0 and len(names) > 1:
            write_index(folder, written)
        return {
            (folder / name).relative_to(draft).as_posix(): facts
            for name, (facts, _) in written.items()
        }

    def _write_adapter(self, share: WeightShare, draft: Path, base: str) -> None:
        def write() -> list[AdapterShare]:
            """Write shares; return them with files in the place of tensors."""
            parts = []
            for one in share.adapters:
                levels = {}
                for number, level in one.levels.items():
                    file = f"part-{one.stage:05d}-{number}.safetensors" if level.tensors else ""
                    if file:
                        write_tensors(level.tensors, draft / file)
                    levels[number] = replace(level, tensors={}, file=file)
                parts.append(replace(one, levels=levels))
            return parts

        told = self.ranks.together(write, draft)
        parts = [part for entry in told for part in entry]

        def merge() -> None:
            model_class = type(self.stages[0].whole).__name__
            _merge_parts(parts, draft, base=base, model_class=model_class)
            stage = self.stages[0]
            if getattr(stage, "changes_config", False):
                save_config(stage, draft)  # the base's says nothing of it
            elif stage.whole is not None and stage.whole.can_generate():
                # the base's; what ends a turn of the trained template is added to it
                stage.whole.generation_config.to_json_file(draft / GENERATION_CONFIG_NAME)

        self.ranks.on_first(merge, draft)
