"""Exports a checkpoint as a plain Hugging Face folder, proved to compute what the checkpoint does.

For engines that read no other folder one is exported once, of a training checkpoint, an adapter, or
a model with adapters: it lies in a cache under a name made from the content.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from stageline.checkpoint.adapter import (
    base_of,
    config_folder,
    find_base,
    read_adapter_config,
    token_ids_on_disk,
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
from stageline.checkpoint.host_memory import available_memory
from stageline.checkpoint.init import round_weights
from stageline.checkpoint.layout import MANIFEST, discard, draft_name, read_manifest, verify
from stageline.checkpoint.plain_model import (
    CLASSIFIER,
    Answer,
    Inputs,
    answer_of_model,
    answer_of_stages,
    compare_answers,
    is_scored,
    load_base,
    load_plain,
    load_with_peft,
    make_probes,
    tensor_dtypes,
    weight_sizes,
)
from stageline.checkpoint.shards import save_stop_ids
from stageline.data.text.processor import get_pad_token_id
from stageline.data.text.tokenizers import processor_of_weights
from stageline.errors import CRASH, UserError
from stageline.hub import name_of
from stageline.model_folder import load_config
from stageline.modules.lora import merge_lora
from stageline.stage import Stage

# a checkpoint's folder -> its stages in float32 on the CPU, or why there are none
StageMaker = Callable[[Path], Sequence[Stage] | str]
# largest difference of a logit allowed, as a share of the largest; both sides are computed in
# float32, so that the greater ones are what rounding the weights to a half type does
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
COMPUTE = torch.float32


class ExportError(RuntimeError):
    """What was written does not compute what the checkpoint does."""

    exit_code = CRASH
    kind = "export"


@dataclass(frozen=True)
class ExportVerdict:
    """How an export was compared.

    Attributes:
        reference: what it was compared with, in words.
        difference: largest difference of a logit, as a share of the largest.
        probes: what was tried: text, image.
        notes: what was not compared, and why.
    """

    reference: str
    difference: float
    tolerance: float
    probes: tuple[str, ...]
    notes: tuple[str, ...] = ()


def lacks_memory(source: Path, *, trust_remote_code: bool = False) -> str | None:
    """Why a comparison does not fit into this machine's memory; None: it fits.

    Two models in float32, though they are never there at once: loading one has peaks.
    """
    available = available_memory()
    if available is None:
        return None
    count, _ = weight_sizes(base_of(source))
    config = read_config_of_base(source, trust_remote_code=trust_remote_code)
    vocab_size = getattr(config.get_text_config(decoder=True), "vocab_size", 0)
    needed = 2 * count * COMPUTE.itemsize + 64 * vocab_size * COMPUTE.itemsize * 8
    if needed <= available:
        return None
    return (
        f"comparing needs {needed / 1e9:.1f} GB of host memory (twice the model in float32), "
        f"{available / 1e9:.1f} GB are free"
    )


def read_config_of_base(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a model folder, or of the model that an adapter belongs to."""
    return load_config(config_folder(folder), trust_remote_code=trust_remote_code)


def check_export(
    source: Path,
    exported: Path,
    *,
    rounded_to: torch.dtype | None,
    make_stages: StageMaker | None = None,
    adapters: Adapters | None = None,
    trust_remote_code: bool = False,
) -> ExportVerdict:
    """Compares logits and greedy tokens of a checkpoint and of what was exported of it.

    Args:
        rounded_to: a half type that weights were rounded to; None: no weight was.
        make_stages: makes the stages of the checkpoint; None: it answers in plain transformers.
        adapters: what was added to the checkpoint.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    config = read_config_of_base(source, trust_remote_code=trust_remote_code)
    told = [source, *(adapters.paths if adapters else ())]
    new_ids = sorted({token for folder in told for token in token_ids_on_disk(folder)})
    probes, note = make_probes(
        config, exported, new_ids=new_ids, trust_remote_code=trust_remote_code
    )
    notes = [] if note is None else [f"compared without an image: {note}"]
    expected, reference, why = _expected(source, probes, make_stages, adapters, trust_remote_code)
    notes += [] if why is None else [why]
    model = _load_exported(exported, trust_remote_code=trust_remote_code)
    tolerance = TOLERANCE[rounded_to or COMPUTE]
    worst = 0.0
    for name, inputs in probes.items():
        answer = answer_of_model(model, inputs)
        difference, wrong_rows = compare_answers(expected[name], answer, tolerance=tolerance)
        if not difference <= tolerance:  # also when it is NaN
            raise ExportError(
                f"the exported model's logits differ from the checkpoint's by {difference:.2e} of "
                f"the largest ({name}, compared with {reference}), at most {tolerance} was "
                "expected: what was written is not the same model. Nothing was kept; export with "
                "`dtype` float32, and report this."
            )
        if wrong_rows:
            raise ExportError(
                f"the exported model generates other tokens than the checkpoint in {wrong_rows} "
                f"rows ({name}, compared with {reference}), though its logits agree: the same were "
                "expected, as nothing else decides about them. Nothing was kept; report this."
            )
        worst = max(worst, difference)
    return ExportVerdict(reference, worst, tolerance, tuple(probes), tuple(notes))


def _expected(
    source: Path,
    probes: dict[str, Inputs],
    make_stages: StageMaker | None,
    adapters: Adapters | None,
    trust_remote_code: bool,
) -> tuple[dict[str, Answer], str, str | None]:
    """Answers of the checkpoint, of whom they are, and why not of its stages."""
    why = None
    if make_stages is not None and adapters is None:
        stages = make_stages(source)
        if not isinstance(stages, str):
            answers = {name: answer_of_stages(stages, inputs) for name, inputs in probes.items()}
            return answers, f"its {len(stages)} stages", None
        why = f"compared with plain transformers, not with stages: {stages}"
    model = load_plain(source, dtype=COMPUTE, trust_remote_code=trust_remote_code)
    if adapters is not None:
        adapters.merge(model)
    answers = {name: answer_of_model(model, inputs, steps=True) for name, inputs in probes.items()}
    return answers, "the checkpoint in plain transformers", why


def _load_exported(folder: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """As its user would: an adapter through `peft` where that is installed."""
    if (folder / ADAPTER_CONFIG).exists():
        base = load_base(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)
        adapted = load_with_peft(folder, base)
        if adapted is not None:
            return adapted
    return load_plain(folder, dtype=COMPUTE, trust_remote_code=trust_remote_code)


MAX_SHARD_BYTES = 5_000_000_000
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ExportReport:
    """What was exported; `verdict` is None where it was not compared with the checkpoint."""

    folder: Path
    is_adapter: bool
    verdict: ExportVerdict | None
    notes: tuple[str, ...] = ()


def export_folder(
    source: str | Path,
    target: str | Path,
    *,
    verifies: bool = True,
    overwrites: bool = False,
    make_stages: StageMaker | None = None,
    **options: Any,
) -> ExportReport:
    """Exports a checkpoint folder, on one process that holds the whole model.

    Args:
        source: a folder that a run saved, or any Hugging Face model or adapter folder.
        target: a new folder; it gets its name when all is there and was compared.
        verifies: loads the result in plain transformers and compares logits and greedy tokens;
            left out, with a note, where the host's memory is too small for it.
        overwrites: a model folder that is there is replaced at the end.
        make_stages: makes the stages that the result is compared with; None: plain transformers.
        options: see `Export`.

    Raises:
        UserError: the source is not whole, or the target exists.
        StorageError: the new folder could not be written.
        ExportError: the result computes something else.
    """
    export = Export(find_source(source), Path(target).expanduser().absolute(), **options)
    check_target(export.source, export.target, overwrites=overwrites)
    if (export.source / MANIFEST).exists():
        verify(export.source)
    export.check_kinds()
    why_not = None
    if verifies:
        why_not = lacks_memory(export.source, trust_remote_code=export.trust_remote_code)
    verdict = export.run(checks=verifies and why_not is None, make_stages=make_stages)
    notes = [f"not compared: {why_not}"] if why_not else []
    notes += verdict.notes if verdict else ()
    kind = read_run_facts(export.source).options.get("quantization") if export.merge else None
    if kind:
        notes.append(
            f"the adapter was trained above a base kept as {kind} and is added to the base's own "
            "weights, which the few bits had rounded: answers are near those of training"
        )
    return ExportReport(export.target, export.keeps_adapter, verdict, tuple(notes))


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

    def run(self, *, checks: bool, make_stages: StageMaker | None) -> ExportVerdict | None:
        """Writes, compares and publishes; whatever goes wrong, the target is as it was."""
        draft = self.target.parent / draft_name(self.target)
        verdict = None
        needed = self.num_bytes()
        try:
            with storage_errors(self.target, needed):
                draft.mkdir(parents=True)
                self.write(draft)
            if checks:
                verdict = check_export(
                    self.source,
                    draft,
                    rounded_to=self.rounded_to(),
                    make_stages=make_stages,
                    adapters=self.adapters,
                    trust_remote_code=self.trust_remote_code,
                )
            with storage_errors(self.target, needed):
                publish_over(draft, self.target, facts={"kind": "export"})
        except BaseException:
            discard(draft)
            raise
        return verdict

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
            write_adapter(self.source, draft, self.dtype)
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

    def rounded_to(self) -> torch.dtype | None:
        """The half type that weights are rounded to, if they are."""
        before = tensor_dtypes(self.model_folder)
        if self.is_sum:  # the sum is
            written = before if self.dtype is None else {self.dtype}
        elif self.dtype is not None and before != {self.dtype}:
            written = {self.dtype}
        else:
            written = set()
        return next((half for half in HALVES if half in written), None)


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
        verify(target)
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
