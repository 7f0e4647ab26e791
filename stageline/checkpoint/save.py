"""Saves a split model as one folder that Hugging Face libraries read.

A full fine-tune becomes a model folder: each stage writes its own shards with names as on disk, by
the library's own reverse conversion. A LoRA run becomes an adapter folder in the format of `peft`,
with the frozen base by reference. Not here: optimizer state.
"""

import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from stageline.checkpoint.gather import gathered
from stageline.checkpoint.layout import draft_name, file_facts, publish, refuse_existing
from stageline.checkpoint.save_adapter import merge_parts, trained_names, write_parts
from stageline.checkpoint.shards import (
    Shard,
    disk_state,
    save_config,
    save_processor,
    shard_name,
    split_state,
    write_index,
)
from stageline.checkpoint.together import Ranks
from stageline.modules.lora import lora_stacks, unwrapped

MAX_SHARD_BYTES = 5_000_000_000


def save_split_model(
    model: nn.Module | Sequence[nn.Module],
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
        OSError: a rank could not write; all ranks raise, the folder is not there.
    """
    stages = list(model) if isinstance(model, Sequence) else [model]
    folder = Path(folder).absolute()
    write = functools.partial(
        _save,
        stages,
        processor,
        folder,
        Ranks.of(group),
        step=step,
        base_path=base_path,
        max_shard_bytes=max_shard_bytes,
        facts=facts,
    )
    if replicas is None:
        write()
        return folder
    among = Ranks.of(replicas)
    with gathered(stages, keep=among.rank == 0):
        among.together(lambda: write() if among.rank == 0 else None)
    return folder


def _save(
    stages: list[nn.Module],
    processor: object | None,
    folder: Path,
    ranks: Ranks,
    *,
    step: int | None,
    base_path: str | None,
    max_shard_bytes: int,
    facts: dict[str, object] | None,
) -> None:
    draft = folder.parent / ranks.gather(draft_name(folder))[0]

    def start() -> None:
        if ranks.rank == 0:
            refuse_existing(folder)
            draft.mkdir(parents=True)

    ranks.together(start, draft)
    known: dict[str, dict] = {}
    manifest = {"kind": "full", "step": step, "num_stages": stages[0].num_stages, **_versions()}
    if any(ranks.gather(any(lora_stacks(stage) for stage in stages))):
        base = base_path or next((path for path in ranks.gather(_base_of(stages)) if path), None)
        if base is None:
            base = str(folder / "base")
            known = _save_full(stages, draft / "base", ranks, draft, max_shard_bytes)
        manifest |= {"kind": "adapter", "base": base}
        _save_adapter(stages, draft, base, ranks)
    else:
        known = _save_full(stages, draft, ranks, draft, max_shard_bytes)

    def finish() -> None:
        if ranks.rank == 0:
            save_processor(processor, draft)
            publish(draft, folder, facts={**manifest, **(facts or {})}, known=known)

    ranks.together(finish, draft)


def _versions() -> dict[str, object]:
    packages = ("torch", "transformers", "safetensors")
    return {"versions": {name: importlib.metadata.version(name) for name in packages}}


def _base_of(stages: list[nn.Module]) -> str | None:
    return next((path for s in stages if (path := getattr(s, "loaded_from", None))), None)


def _all_names(stage: nn.Module) -> list[str]:
    with unwrapped(stage):
        return list(stage.state_dict())


def _names_of_earlier_stages(
    stages: list[nn.Module], ranks: Ranks, draft: Path, *, by: Callable[[nn.Module], list[str]]
) -> list[set[str]]:
    """For each stage here, the names that an earlier stage saves: tied weights are saved once."""
    told = ranks.together(lambda: [(stage.stage, by(stage)) for stage in stages], draft)
    everything = [pair for pairs in told for pair in pairs]
    return [
        {name for index, names in everything if index < stage.stage for name in names}
        for stage in stages
    ]


# -- a model folder ----------------------------------------------------------------------------


def _save_full(
    stages: list[nn.Module], folder: Path, ranks: Ranks, draft: Path, max_shard_bytes: int
) -> dict[str, dict]:
    """Writes shards, index and config; returns file -> size and sha256, relative to the draft."""
    claimed = _names_of_earlier_stages(stages, ranks, draft, by=_all_names)
    planned: dict[int, list[Shard]] = {}

    def plan() -> dict[int, int]:
        folder.mkdir(parents=True, exist_ok=True)
        for stage, names in zip(stages, claimed, strict=True):
            planned[stage.stage] = split_state(disk_state(stage, names), max_shard_bytes)
        return {index: len(shards) for index, shards in planned.items()}

    counts = {k: v for entry in ranks.together(plan, draft) for k, v in entry.items()}
    keys = [(index, k) for index in sorted(counts) for k in range(counts[index])]
    names = {key: shard_name(number, len(keys)) for number, key in enumerate(keys, start=1)}

    def write() -> dict[str, tuple[dict, dict[str, int]]]:
        written = {}
        for index, shards in planned.items():
            for position, shard in enumerate(shards):
                name = names[index, position]
                # contiguous one shard at a time: views of fused experts are not
                state = {key: value.contiguous() for key, value in shard.items()}
                save_file(state, folder / name, metadata={"format": "pt"})
                sizes = {key: value.numel() for key, value in shard.items()}
                written[name] = (file_facts(folder / name), sizes)
        for stage in stages:
            if stage.stage == 0:
                save_config(stage, folder)
        return written

    written = {k: v for entry in ranks.together(write, draft) for k, v in entry.items()}
    if ranks.rank == 0 and len(names) > 1:
        write_index(folder, written)
    return {(folder / k).relative_to(draft).as_posix(): facts for k, (facts, _) in written.items()}


# -- an adapter folder -------------------------------------------------------------------------


def _save_adapter(stages: list[nn.Module], draft: Path, base: str, ranks: Ranks) -> None:
    trained = _names_of_earlier_stages(stages, ranks, draft, by=trained_names)

    def write() -> list[dict]:
        return [
            write_parts(stage, draft, claimed=names)
            for stage, names in zip(stages, trained, strict=True)
        ]

    parts = [part for entry in ranks.together(write, draft) for part in entry]

    def merge() -> None:
        if ranks.rank == 0:
            merge_parts(parts, draft, base=base, model_class=type(stages[0].whole).__name__)

    ranks.together(merge, draft)
