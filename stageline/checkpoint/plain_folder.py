"""Exports a checkpoint as a plain Hugging Face folder.

For engines that read no other folder one is exported once, of a training checkpoint, an adapter, or
a model with adapters: it lies in a cache under a name made from the content.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.adapter import (
    config_folder,
    find_base,
    read_adapter_config,
)
from stageline.checkpoint.adapter_start import Adapters
from stageline.checkpoint.export_files import (
    Kind,
    ModelFacts,
    check_target,
    copy_side_files,
    find_source,
    model_card,
    open_to_readers,
    publish_over,
    read_run_facts,
    storage_errors,
    untie_changed_head,
    write_adapter,
    write_card,
    write_model,
)
from stageline.checkpoint.files import ADAPTER_CONFIG, ADAPTER_FILE, weight_files
from stageline.checkpoint.init import round_weights
from stageline.checkpoint.layout import MANIFEST, discard, draft_name, read_manifest, verify
from stageline.checkpoint.plain_model import (
    CLASSIFIER,
    adapter_dtype,
    is_scored,
    load_plain,
    weight_sizes,
)
from stageline.checkpoint.shards import save_stop_ids
from stageline.data.text.processor import get_pad_token_id
from stageline.data.text.tokenizers import processor_of_weights
from stageline.errors import UserError
from stageline.hub import name_of
from stageline.model_folder import load_config
from stageline.modules.lora import merge_lora


def read_config_of_base(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model folder, or of the model that an adapter belongs to."""
    return load_config(config_folder(folder), trust_remote_code=trust_remote_code)


MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportReport:
    """Result of an export."""

    folder: Path
    is_adapter: bool
    notes: tuple[str, ...] = ()


def export_folder(
    source: str | Path,
    target: str | Path,
    *,
    overwrites: bool = False,
    **options: Any,
) -> ExportReport:
    """Exports a checkpoint folder, on one process that holds the whole model.

    Args:
        source: a folder that a run saved, or any Hugging Face model or adapter folder.
        target: a new folder; it gets its name when all is there.
        overwrites: a model folder that is there is replaced at the end.
        options: see `Export`.

    Raises:
        UserError: the source is not whole, or the target exists.
        StorageError: the new folder could not be written.
    """
    export = Export(find_source(source), Path(target).expanduser().absolute(), **options)
    check_target(export.source, export.target, overwrites=overwrites)
    if (export.source / MANIFEST).exists():
        verify(export.source)
    export.check_kinds()
    export.run()
    notes = []
    kind = read_run_facts(export.source).options.get("quantization") if export.merge else None
    if kind:
        notes.append(
            f"the adapter was trained above a base kept as {kind} and is added to the base's own "
            "weights, which the few bits had rounded: answers are near those of training"
        )
    return ExportReport(export.target, export.keeps_adapter, tuple(notes))


@dataclass(frozen=True)
class Export:
    """One source and what is to become of it.

    Attributes:
        merge: adds the source, an adapter, to its base; the result is a whole model.
        adapters: are added to the source, a whole model, one after the other.
        dtype: of the weights in the new folder; None: as they are.
    """

    source: Path
    target: Path
    merge: bool = False
    adapters: Adapters | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    trust_remote_code: bool = False

    @functools.cached_property
    def base(self) -> Path | None:
        """The model that the source, an adapter, is added to."""
        return find_base(self.source) if self.merge else None

    @property
    def is_adapter(self) -> bool:
        return (self.source / ADAPTER_CONFIG).exists()

    @property
    def keeps_adapter(self) -> bool:
        return self.is_adapter and not self.merge

    @property
    def is_sum(self) -> bool:
        """Whether weights are written that no file holds."""
        return self.merge or self.adapters is not None

    @property
    def model_folder(self) -> Path:
        return self.base or self.source

    def check_kinds(self) -> None:
        """Refuses to merge nothing, and adapters on an adapter."""
        if self.merge and not self.is_adapter:
            raise UserError(
                f"`merge` came with {self.source}, an adapter folder was expected: there is "
                "nothing to merge in a whole model. Leave `merge` out."
            )
        if self.adapters is not None and self.is_adapter:
            raise UserError(
                f"`adapter_path` came with {self.source}, which is an adapter itself; the base of "
                "the adapters was expected as `model_path`. Name all adapters in `adapter_path`."
            )

    def run(self) -> None:
        """Writes and publishes; whatever goes wrong, the target is as it was."""
        draft = self.target.parent / draft_name(self.target)
        try:
            with storage_errors(self.target, self.num_bytes()):
                draft.mkdir(parents=True)
                self.write(draft)
                publish_over(draft, self.target, facts={"kind": "export"})
        except BaseException:
            discard(draft)
            raise

    def num_bytes(self) -> int:
        """About how much is written."""
        if self.keeps_adapter:
            file = self.source / ADAPTER_FILE
            return file.stat().st_size if file.exists() else 0
        count, num_bytes = weight_sizes(self.model_folder)
        return num_bytes if self.dtype is None else count * self.dtype.itemsize

    def write(self, draft: Path) -> None:
        """Writes all files but the manifest."""
        if self.keeps_adapter:
            dtype_of = None
            if self.dtype is not None:
                trusts = self.trust_remote_code
                dtype_of = adapter_dtype(self.source, self.dtype, trust_remote_code=trusts)
            write_adapter(self.source, draft, dtype_of)
        else:
            self.write_model(draft)
        # what an adapter's folder lacks is its base's
        more = self.adapters.paths if self.adapters else ()
        for folder in filter(None, (self.base, self.source, *more)):
            copy_side_files(folder, draft, with_code=self.trust_remote_code)
        if not self.keeps_adapter:
            trusts = self.trust_remote_code
            save_stop_ids(processor_of_weights(str(draft), trust_remote_code=trusts), draft)
        self.write_card(draft)

    def write_model(self, draft: Path) -> None:
        """The whole model; an adapter is added to it."""
        # a sum in another type than the base's is rounded once, to that type
        sums = torch.float32 if self.is_sum and self.dtype is not None else self.dtype
        model = load_plain(self.source, dtype=sums, trust_remote_code=self.trust_remote_code)
        if self.adapters is not None:
            self.adapters.merge(model)
        if self.is_sum:
            merge_lora(model)
            untie_changed_head(model)
            if self.dtype is not None:
                round_weights(model, self.dtype)
        if type(model).__name__.endswith(CLASSIFIER) and model.config.pad_token_id is None:
            # by it transformers finds the end of a row; the base of an adapter may lack it
            trusts = self.trust_remote_code
            processor = processor_of_weights(str(self.source), trust_remote_code=trusts)
            if processor is not None:
                model.config.pad_token_id = get_pad_token_id(processor)
        generation = self.model_folder / GENERATION_CONFIG_NAME
        write_model(
            model,
            draft,
            generation=generation if generation.exists() else None,
            max_shard_bytes=self.max_shard_bytes,
            keeps_code=self.trust_remote_code,
        )

    def write_card(self, draft: Path) -> None:
        """The model card, with what is known of the run around the source."""
        run = read_run_facts(self.source)
        kind: Kind = "adapter" if self.keeps_adapter else "merged" if self.is_sum else "model"
        try:
            config = read_config_of_base(self.source, trust_remote_code=self.trust_remote_code)
        except UserError:
            if not self.keeps_adapter:
                raise
            config = None  # an adapter whose base is elsewhere
        base = str(self.source) if self.adapters is not None else None
        if self.is_adapter:  # wherever that is
            base = read_adapter_config(self.source).get("base_model_name_or_path") or None
        facts = ModelFacts.of(config, name=self.target.name, kind=kind, base=base)
        if self.is_adapter and is_scored(self.source):  # its base may be a language model
            facts = replace(facts, class_name=f"AutoModel{CLASSIFIER}")
        write_card(model_card(facts, run), run.curve, draft)
        open_to_readers(draft)


_KEY_LENGTH = 16
# what changes no answer
_LEFT_OUT = (".md", ".log")


def plain_folder(
    source: str | Path,
    *,
    cache: str | Path,
    adapter_paths: Sequence[str | Path] = (),
    adapter_weights: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """The folder of a model for engines that read no other, exported first where it isn't plain.

    Args:
        source: a model folder, an adapter folder, or a checkpoint that a run saved.
        cache: folder of the exported folders.
        adapter_paths, adapter_weights: LoRA adapters that are merged into it.
        dtype: of an exported folder's weights; None: as they are.
    """
    folder = find_source(source)
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    if not (is_adapter or adapter_paths or _is_of_a_run(folder)):
        weight_files(folder)  # all of them have come from a hub then
        return folder
    parts = [folder, *([find_base(folder)] if is_adapter else []), *map(Path, adapter_paths)]
    key = _key(parts, [list(adapter_weights or ()), str(dtype)])
    target = Path(cache).expanduser().absolute() / f"{folder.name}-{key}"
    if target.exists():
        return target
    weights = tuple(adapter_weights) if adapter_weights else None
    return export_folder(
        folder,
        target,
        merge=is_adapter,
        adapters=Adapters(tuple(map(Path, adapter_paths)), weights) if adapter_paths else None,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    ).folder


def _is_of_a_run(folder: Path) -> bool:
    """Whether a run saved it: beside weights there may be files that only training reads."""
    manifest = folder / MANIFEST
    return manifest.exists() and read_manifest(folder).get("kind") != "export"


def _key(folders: Sequence[Path], settings: object) -> str:
    """Changes with any file; by content where a manifest has it, else by size and time."""
    facts = [folder_facts(folder.expanduser().absolute()) for folder in folders]
    text = json.dumps([facts, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]


def folder_facts(folder: Path) -> object:
    """What changes with any file of a model folder: by content where a manifest has it."""
    if (folder / MANIFEST).exists():
        return read_manifest(folder)["sha256"]
    if name_of(folder) is not None:  # not all of it need be here yet
        return str(name_of(folder))
    files = sorted(path for path in folder.iterdir() if path.is_file())
    kept = [path for path in files if not path.name.endswith(_LEFT_OUT)]
    return [
        str(folder),
        [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in kept],
    ]
