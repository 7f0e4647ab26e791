"""Export a checkpoint as a plain Hugging Face folder.

For engines that read no other folder a training checkpoint, an adapter or a model with adapters is
exported once, to a cache under a name made from the content.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.adapter import (
    config_folder,
    find_base,
    merge_adapters,
    note_untied,
    read_adapter_config,
)
from stageline.checkpoint.export_files import (
    Kind,
    check_target,
    copy_side_files,
    find_source,
    model_card,
    publish_over,
    read_run_facts,
    write_adapter,
    write_model,
)
from stageline.checkpoint.files import ADAPTER_CONFIG, weight_files, weights_fingerprint
from stageline.checkpoint.init import round_weights
from stageline.checkpoint.layout import MANIFEST, discard, draft_name, read_manifest, verify
from stageline.checkpoint.plain_model import CLASSIFIER, adapter_dtype, is_scored, load_plain
from stageline.checkpoint.save import MAX_SHARD_BYTES
from stageline.checkpoint.shards import save_stop_ids
from stageline.errors import StorageError, UserError
from stageline.hub import name_of
from stageline.model_folder import files_fingerprint, load_config
from stageline.modules.lora import merge_lora
from stageline.stage import default_loader


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
    merge: bool = False,
    adapter_paths: Sequence[str | Path] = (),
    adapter_weights: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrites: bool = False,
    trust_remote_code: bool = False,
) -> ExportReport:
    """Export a checkpoint folder, on one process that holds the whole model.

    Args:
        source: a folder that a run saved, or any Hugging Face model or adapter folder.
        target: a new folder; it gets its name when all is there.
        merge: add the source, an adapter, to its base; the result is a whole model.
        adapter_paths, adapter_weights: adapters that are added to the source, a whole model.
        dtype: of the weights in the new folder; None: as they are.
        overwrites: replace a model folder that is there, at the end.

    Raises:
        UserError: the source is not whole, or the target exists.
        StorageError: the new folder could not be written.
    """
    source, target = find_source(source), Path(target).expanduser().absolute()
    adapters = [Path(path) for path in adapter_paths]
    is_adapter = (source / ADAPTER_CONFIG).exists()
    keeps_adapter = is_adapter and not merge
    is_sum = merge or bool(adapters)
    check_target(source, target, overwrites=overwrites)
    if (source / MANIFEST).exists():
        verify(source)
    if merge and not is_adapter:
        raise UserError(
            f"`merge` is given with {source}, a whole model: there is nothing to merge. Leave "
            "`merge` out."
        )
    if adapters and is_adapter:
        raise UserError(
            f"`adapter_path` is given with {source}, which is an adapter itself. Give the base as "
            "`model_path`, and name all adapters in `adapter_path`."
        )
    base = find_base(source) if merge else None
    run, loader = read_run_facts(source), default_loader()
    draft = target.parent / draft_name(target)
    try:
        draft.mkdir(parents=True)

        # weights
        if keeps_adapter:
            dtype_of = None
            if dtype is not None:
                dtype_of = adapter_dtype(source, dtype, trust_remote_code=trust_remote_code)
            write_adapter(source, draft, dtype_of)
        else:
            # a sum in another type than the base's is rounded once, to that type
            sums = torch.float32 if is_sum and dtype is not None else dtype
            model = load_plain(source, dtype=sums, trust_remote_code=trust_remote_code)
            merge_adapters(model, adapters, adapter_weights)
            if is_sum:
                merge_lora(model)
                embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
                if head is not None and embedding is not None:
                    if head.weight is not embedding.weight:  # an adapter may give it its own
                        note_untied(model.config)
                if dtype is not None:
                    round_weights(model, dtype)
            if type(model).__name__.endswith(CLASSIFIER) and model.config.pad_token_id is None:
                # by it transformers finds the end of a row; the base of an adapter may lack it
                processor = loader.processor_of_weights(
                    str(source), trust_remote_code=trust_remote_code
                )
                if processor is not None:
                    model.config.pad_token_id = loader.pad_token_id(processor)
            generation = (base or source) / GENERATION_CONFIG_NAME
            write_model(
                model,
                draft,
                generation=generation if generation.exists() else None,
                max_shard_bytes=max_shard_bytes,
                keeps_code=trust_remote_code,
            )

        # tokenizer and processor: what an adapter's folder lacks is its base's
        for folder in filter(None, (base, source, *adapters)):
            copy_side_files(folder, draft, with_code=trust_remote_code)
        if not keeps_adapter:
            processor = loader.processor_of_weights(str(draft), trust_remote_code=trust_remote_code)
            save_stop_ids(processor, draft)

        # the model card
        kind: Kind = "adapter" if keeps_adapter else "merged" if is_sum else "model"
        try:
            config = load_config(config_folder(source), trust_remote_code=trust_remote_code)
        except UserError:
            if not keeps_adapter:
                raise
            config = None  # an adapter whose base is elsewhere
        started_from = str(source) if adapters else None
        if is_adapter:  # wherever that is
            started_from = read_adapter_config(source).get("base_model_name_or_path") or None
        card = model_card(
            run,
            config,
            name=target.name,
            kind=kind,
            base=started_from,
            is_scored=is_adapter and is_scored(source),
            has_ends=keeps_adapter and (draft / GENERATION_CONFIG_NAME).exists(),
        )
        (draft / "README.md").write_text(card, encoding="utf-8")
        if run.curve is not None:
            shutil.copyfile(run.curve, draft / "loss.png")
        publish_over(draft, target, facts={"kind": "export"})
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "os error" not in str(error):
            raise
        free = shutil.disk_usage(next(path for path in target.parents if path.exists())).free
        raise StorageError(
            f"{target} could not be written ({error}): {free:,} bytes are free there. Nothing was "
            "left of it; make room or choose another `output_path`."
        ) from error
    finally:
        discard(draft)

    notes = []
    kept_as = run.options.get("quantization") if merge else None
    if kept_as not in (None, "released"):
        notes.append(
            f"the adapter was trained above a base kept as {kept_as} and is added to the base's "
            "own weights, which the few bits had rounded: answers are near those of training"
        )
    return ExportReport(target, keeps_adapter, tuple(notes))


def plain_folder(
    source: str | Path,
    *,
    cache: str | Path,
    adapter_paths: Sequence[str | Path] = (),
    adapter_weights: Sequence[float] | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Return the folder of a model for engines that read no other, exported first if need be.

    Args:
        source: a model folder, an adapter folder, or a checkpoint that a run saved.
        cache: folder of the exported folders.
        adapter_paths, adapter_weights: LoRA adapters that are merged into it.
    """
    folder = find_source(source)
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    # a run's folder may hold files that only training reads
    of_a_run = (folder / MANIFEST).exists() and read_manifest(folder).get("kind") != "export"
    if not (is_adapter or adapter_paths or of_a_run):
        weight_files(folder)  # all of them have come from a hub then
        return folder
    parts = [folder, *([find_base(folder)] if is_adapter else []), *map(Path, adapter_paths)]
    facts = [folder_facts(part.expanduser().absolute()) for part in parts]
    content = [facts, list(adapter_weights or ())]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    target = Path(cache).expanduser().absolute() / f"{folder.name}-{key}"
    if target.exists():
        return target
    return export_folder(
        folder,
        target,
        merge=is_adapter,
        adapter_paths=adapter_paths,
        adapter_weights=adapter_weights,
        trust_remote_code=trust_remote_code,
    ).folder


def folder_facts(folder: Path) -> object:
    """Return a fingerprint of a model folder: the checksum of its manifest, where it has one."""
    if (folder / MANIFEST).exists():
        return read_manifest(folder)["sha256"]
    if name_of(folder) is not None:  # not all of it need be here yet
        return str(name_of(folder))
    return [weights_fingerprint(folder), files_fingerprint(folder, answers=True)]
