"""Saves a split model as one folder that Hugging Face libraries read.

A full fine-tune becomes a model folder: each stage writes its own shards with names as on disk, by
the library's own reverse conversion. A LoRA run becomes an adapter folder in the format of `peft`,
with the frozen base by reference. What else a run needs to go on is in state_share.py, saving while
training goes on in writer.py.
"""

import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stageline import chaos
from stageline.checkpoint.files import write_tensors
from stageline.checkpoint.layout import Ranks, draft_name, file_facts, publish, refuse_existing
from stageline.checkpoint.save_adapter import (
    AdapterShare,
    adapter_share,
    merge_parts,
    trained_names,
    write_part,
)
from stageline.checkpoint.shards import (
    HostCopies,
    Shard,
    copy_state,
    disk_state,
    save_config,
    save_processor,
    shard_name,
    split_state,
    write_index,
)
from stageline.modules.lora import lora_stacks, unwrapped
from stageline.modules.stage_names import StageNames, check_names, names_of_stage
from stageline.stage import Stage

# -- puts the weights of sharded stages together on the host, for as long as they are saved -------

Place = tuple[nn.Module, str]  # a module and the name of its parameter


@contextmanager
def gathered(stages: Iterable[nn.Module], *, keep: bool) -> Iterator[None]:
    """While open, sharded parameters are whole tensors on the host; every replica calls this.

    They come in the type that the model computes in. Module by module is put together on the
    device, so at no time is more of a stage there than one of them.

    Args:
        keep: whether this replica wants them; else its stages stay as they are.
    """
    modules = [m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.reshard()  # an evaluation may have left them whole
    before: dict[Place, nn.Parameter] = {}
    copies: dict[Place, nn.Parameter] = {}
    for module in modules:
        sharded = _sharded(module)
        module.unshard()
        if keep:
            before.update(sharded)
            copies.update(_copies(sharded))
        module.reshard()
    try:
        _put(copies)
        yield
    finally:
        _put({place: before[place] for place in copies})


def _sharded(module: nn.Module) -> dict[Place, nn.Parameter]:
    return {
        (child, name): parameter
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None and isinstance(parameter, DTensor)
    }


@torch.no_grad()
def _copies(sharded: dict[Place, nn.Parameter]) -> dict[Place, nn.Parameter]:
    """Copies of what is whole now; a weight of two modules stays one."""
    made: dict[int, nn.Parameter] = {}
    copies = {}
    for (module, name), share in sharded.items():
        whole = module._parameters[name]
        if whole is None or isinstance(whole, DTensor):
            continue  # its module's turn comes
        if id(whole) not in made:
            copy = whole.detach().to("cpu", copy=True)
            made[id(whole)] = nn.Parameter(copy, requires_grad=share.requires_grad)
        copies[module, name] = made[id(whole)]
    return copies


def _put(parameters: dict[Place, nn.Parameter]) -> None:
    for (module, name), parameter in parameters.items():
        module._parameters[name] = parameter


# -------------------------------------------------------------------------------------------------

MAX_SHARD_BYTES = 5_000_000_000
BASE_FOLDER = "base"
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
    """Saves the stages of all ranks of `group` as one folder; every rank calls this.

    Args:
        model: this rank's stage, or stages.
        processor: tokenizer or processor to put beside the weights.
        folder: a new folder on a file system that all ranks share.
        group: the ranks of one pipeline; gloo where there is a choice. Needs no process group.
        replicas: the ranks with the same stages, of which the first writes and the others wait; it
            puts sharded weights together, a stage on its rank. None: there is one replica.
        step: for the manifest.
        base_path: of a LoRA run, the folder of the frozen model; None: where it was loaded from,
            and a base that started at random is saved too.
        max_shard_bytes: largest file of weights.
        facts: more for the manifest.

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
        finish_draft(
            draft,
            folder,
            ranks,
            processor=processor,
            facts={**written, "step": step, **(facts or {})},
            known=known,
        )

    if replicas is None:
        write()
        return folder
    among = Ranks.of(replicas)
    with gathered(stages, keep=among.rank == 0):
        among.together(lambda: write() if among.rank == 0 else None)
    return folder


def start_draft(folder: Path, ranks: Ranks) -> Path:
    """Makes the folder in which all ranks write, under another name than `folder`."""
    draft = folder.parent / ranks.gather(draft_name(folder))[0]

    def start() -> None:
        if ranks.rank == 0:
            refuse_existing(folder)
            chaos.point("file")
            draft.mkdir()

    ranks.together(start, draft)
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
    """Writes the manifest when all ranks are done, and gives the folder its name."""

    def finish() -> None:
        if ranks.rank == 0:
            save_processor(processor, draft)
            publish(draft, folder, facts={**facts, **_versions()}, known=known)

    ranks.together(finish, draft)


def _versions() -> dict[str, object]:
    packages = ("torch", "transformers", "safetensors")
    return {"versions": {name: importlib.metadata.version(name) for name in packages}}


@dataclass(frozen=True)
class WeightShare:
    """What one rank saves of the weights: stage -> tensors by name on disk, stages' adapters."""

    full: dict[int, Shard] = field(default_factory=dict)
    adapters: list[AdapterShare] = field(default_factory=list)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that is saved; what is trained beside adapters once for each of their levels."""
        for state in self.full.values():
            yield from state.items()
        for adapter in self.adapters:
            for tensors in adapter.tensors.values():
                yield from tensors.items()


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
        self.stages = list(stages)
        self.ranks = ranks
        self.max_shard_bytes = max_shard_bytes
        self.is_adapter = any(ranks.gather(any(lora_stacks(stage) for stage in self.stages)))
        found = [path for path in ranks.gather(_base_of(self.stages)) if path]
        self.base = base_path or next(iter(found), None)
        self._check_names(draft)
        self._claimed_names = self._claimed(_all_names, draft)
        self._claimed_trained = self._claimed(trained_names, draft) if self.is_adapter else []

    def share(self, *, copies: HostCopies | None = None) -> WeightShare:
        """What this rank saves, on this rank alone.

        Args:
            copies: on the host and apart from the weights, so that training may go on; None: the
                weights themselves.
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
        """Writes a share of each rank; returns facts for the manifest, and what is hashed."""
        facts = {"num_stages": self._num_stages()}
        if not self.is_adapter:
            return {"kind": "full", **facts}, self._write_full(share, draft, draft)
        known: Files = {}
        base = self.base
        if base is None:
            base = str(folder / BASE_FOLDER)
            known = self._write_full(share, draft / BASE_FOLDER, draft)
        self._write_adapter(share, draft, base)
        return {"kind": "adapter", "base": base, **facts}, known

    def write_base(self, draft: Path) -> Files:
        """Writes the frozen weights alone, as a model folder; `base` is for the caller to set."""
        return self._write_full(WeightShare(full=self._full(copies=None)), draft, draft)

    def _num_stages(self) -> int | None:
        return self.stages[0].num_stages if self.stages else None

    def _check_names(self, draft: Path | None) -> None:
        """Refuses to save stages of which a folder could hold one copy of two weights only."""

        def tell() -> list[StageNames]:
            return [names_of_stage(stage) for stage in self.stages]

        told = [one for some in self.ranks.together(tell, draft) for one in some]
        self.ranks.together(lambda: check_names(told) if told else None, draft)

    def _claimed(
        self, names_of: Callable[[nn.Module], list[str]], draft: Path | None
    ) -> list[set[str]]:
        """For each stage here, the names that an earlier stage saves."""
        stages, ranks = self.stages, self.ranks
        told = ranks.together(lambda: [(stage.stage, names_of(stage)) for stage in stages], draft)
        everything = [pair for pairs in told for pair in pairs]
        return [
            {name for index, names in everything if index < stage.stage for name in names}
            for stage in stages
        ]

    # -- a model folder --------------------------------------------------------------------

    def _full(self, *, copies: HostCopies | None) -> dict[int, Shard]:
        states = {}
        for stage, names in zip(self.stages, self._claimed_names, strict=True):
            state = disk_state(stage, names)
            states[stage.stage] = copy_state(state, stage, copies) if copies else state
        return states

    def _write_full(self, share: WeightShare, folder: Path, draft: Path) -> Files:
        """Writes shards, index and config."""
        planned: dict[int, list[Shard]] = {}

        def plan() -> dict[int, int]:
            folder.mkdir(parents=True, exist_ok=True)
            for index, state in share.full.items():
                planned[index] = split_state(state, self.max_shard_bytes)
            return {index: len(shards) for index, shards in planned.items()}

        planned_by_all = self.ranks.together(plan, draft)
        counts = {k: v for entry in planned_by_all for k, v in entry.items()}
        keys = [(index, k) for index in sorted(counts) for k in range(counts[index])]
        names = {key: shard_name(number, len(keys)) for number, key in enumerate(keys, start=1)}

        def write() -> dict[str, tuple[dict, dict[str, int]]]:
            written = {}
            for index, shards in planned.items():
                for position, shard in enumerate(shards):
                    name = names[index, position]
                    written[name] = _write_shard(shard, folder / name)
            for stage in self.stages:
                if stage.stage == 0:
                    save_config(stage, folder)
            return written

        written_by_all = self.ranks.together(write, draft)
        written = {k: v for entry in written_by_all for k, v in entry.items()}
        if self.ranks.rank == 0 and len(names) > 1:
            write_index(folder, written)
        return {
            (folder / name).relative_to(draft).as_posix(): facts
            for name, (facts, _) in written.items()
        }

    # -- an adapter folder -----------------------------------------------------------------

    def _write_adapter(self, share: WeightShare, draft: Path, base: str) -> None:
        told = self.ranks.together(
            lambda: [write_part(adapter, draft) for adapter in share.adapters], draft
        )
        parts = [part for entry in told for part in entry]

        def merge() -> None:
            if self.ranks.rank == 0:
                model_class = type(self.stages[0].whole).__name__
                merge_parts(parts, draft, base=base, model_class=model_class)
                if getattr(self.stages[0], "changes_config", False):
                    save_config(self.stages[0], draft)  # the base's says nothing of it

        self.ranks.together(merge, draft)


def _write_shard(shard: Shard, path: Path) -> tuple[dict, dict[str, int]]:
    write_tensors(shard, path)
    return file_facts(path), {name: tensor.numel() for name, tensor in shard.items()}


def _base_of(stages: Sequence[Stage]) -> str | None:
    return next((path for s in stages if (path := getattr(s, "loaded_from", None))), None)


def _all_names(stage: nn.Module) -> list[str]:
    with unwrapped(stage):
        return list(stage.state_dict())
