"""Stages that answer, from a model folder, a checkpoint of a run or an adapter: built by key.

The train_model part of the model's architecture builds them, so a checkpoint answers as it was
trained, without an export.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from register import train_model_register
from stageline.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from stageline.checking.proof import ProveMode
    from stageline.checkpoint.layout import Ranks


@dataclass(frozen=True)
class AnsweringModel:
    """Where the stages of one model come from.

    Attributes:
        folder: a model folder, a checkpoint of a run, or an adapter folder.
        adapters: folders that are put on it; all but the last are merged.
        merges: the last one is merged too.
        key: of the train_model part; None: that of the architecture.
        partition: layers of each stage; None: what evens out a decoding step.
    """

    folder: Path
    num_stages: int
    dtype: "torch.dtype"
    adapters: tuple[str, ...] = ()
    merges: bool = False
    key: str | None = None
    partition: tuple[int, ...] | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    @functools.cached_property
    def base(self) -> Path:
        """The folder of the weights below all adapters."""
        from stageline.checkpoint.adapter import find_base
        from stageline.checkpoint.files import ADAPTER_CONFIG

        return find_base(self.folder) if (self.folder / ADAPTER_CONFIG).exists() else self.folder

    @functools.cached_property
    def config_folder(self) -> Path:
        """The folder with config.json: that of an adapter, if its run changed the base's."""
        from stageline.checkpoint.adapter import config_folder

        return config_folder(self.folder, self.adapters)

    @functools.cached_property
    def config(self) -> "PretrainedConfig":
        """The configuration of the whole model."""
        from stageline.model_folder import load_config

        return load_config(self.config_folder, trust_remote_code=self.trust_remote_code)

    def check_names(self, stage: int, ranks: "Ranks") -> None:
        """Refuses stages that do not add up to the whole model, before weights are read.

        Args:
            ranks: of the pipeline, which call this together.

        Raises:
            UserError: says which names, and why.
        """
        from stageline.checking.outline import check_outlines

        def outline(stage: int, num_stages: int) -> Any:
            layers = self.layers() if num_stages == self.num_stages else None
            build = self._part(num_stages)
            return build(checkpoint_path=None, stage=stage, device="meta", partition=layers)[0]

        check_outlines(
            outline,
            stages=[stage],
            num_stages=self.num_stages,
            ranks=ranks,
            checkpoint=str(self.folder),
        )

    def prove(self, mode: "ProveMode", ranks: "Ranks") -> None:
        """Compares a cut-down copy of the model, split and whole; all ranks call this.

        Args:
            mode: auto, always or never.
            ranks: of the whole run.

        Raises:
            UserError: they differ; says where.
        """
        from stageline.checking.proof import SplitToProve, options_of_proof, prove_split

        layers = self.layers() if self.num_stages > 1 else None
        split = SplitToProve(
            train_model_register[self.part_key()],
            str(self.config_folder),
            self.num_stages,
            partition=layers,
            trust_remote_code=self.trust_remote_code,
            gives_scores=train_model_register.entry(self.part_key()).facts["gives_scores"],
            options=options_of_proof({}, self.attn_implementation),
        )
        say = functools.partial(print, file=sys.stderr, flush=True)  # stdout is for answers
        prove_split(split, mode=mode, ranks=ranks, say=say)

    def _part(self, num_stages: int) -> functools.partial:
        return functools.partial(
            train_model_register[self.part_key()],
            config_path=str(self.config_folder),
            processor_path=None,
            num_stages=num_stages,
            is_piece=True,  # its processor is loaded apart
            trust_remote_code=self.trust_remote_code,
        )

    def build(self, stage: int, device: "torch.device | str") -> Any:
        """One stage with its weights, as the part makes it."""
        from stageline.checkpoint.files import ADAPTER_CONFIG
        from stageline.modules.lora import merge_lora

        build = self._part(self.num_stages)
        options: dict[str, object] = {}
        if (self.folder / ADAPTER_CONFIG).exists():
            options = lora_options(self.folder, build)
        if self.attn_implementation:
            options["attn_implementation"] = self.attn_implementation
        model, _, _ = build(
            checkpoint_path=str(self.folder),
            stage=stage,
            dtype=self.dtype,
            device=device,
            partition=self.layers(),
            adapter_path=list(self.adapters) or None,
            **options,
        )
        if self.merges:
            merge_lora(model)
        return model

    def part_key(self) -> str:
        """The key of the train_model part.

        Raises:
            UserError: no part serves this architecture.
        """
        key = self.key or stage_key(self.config)
        if key in (None, "reward"):
            raise UserError(
                f"{self.folder} holds {(self.config.architectures or ['a model'])[0]}, which no "
                "train_model part is made for. A language or vision-language model was expected: "
                "name a part of your own with --train-model, or use --engine device_map."
            )
        return key

    def layers(self) -> list[int] | None:
        """Layers of each stage; None: as even as can be, of a model that the library hasn't."""
        from stageline.inference.meta_model import decode_partition

        if self.partition is not None:
            return list(self.partition)
        if stage_key(self.config) is None:
            return None
        return decode_partition(
            self.config,
            self.num_stages,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
        )

    def processor_folder(self) -> Path:
        """Where the tokenizer or processor lies: with the last adapter, if it brought one."""
        from stageline.checkpoint.adapter import processor_folder

        last = Path(self.adapters[-1]) if self.adapters else self.folder
        return processor_folder(last, self.base)


def stage_key(config: "PretrainedConfig") -> str | None:
    """The key of the train_model part for a configuration: its family's, else a generic one."""
    import transformers

    name = (config.architectures or [""])[0]
    if name.endswith("ForSequenceClassification") and config.num_labels == 1:
        return "reward"
    kinds = {
        "vision_language": transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        "causal_lm": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    for generic, classes in kinds.items():
        if type(config) not in classes:
            continue
        found = classes[type(config)]
        names = [one.__name__ for one in (found if isinstance(found, tuple) else (found,)) if one]
        if config.architectures and not set(names) & set(config.architectures):
            continue  # the same layers with another head: a classifier
        families = [
            key
            for key in train_model_register
            if config.model_type in train_model_register.entry(key).facts["model_types"]
        ]
        # idefics3 serves smolvlm too, which has a key of its own
        return config.model_type if config.model_type in families else next(iter(families), generic)
    return None


def lora_options(folder: Path, build: functools.partial) -> dict[str, object]:
    """How many adapters each part has in an adapter folder, and on which layers.

    Ranks and scales are not among them: filling a stage sets those.
    """
    from stageline.checkpoint.adapter import read_stack

    whole, _, _ = build(checkpoint_path=None, stage=0, device="meta")
    counts: dict[str, int] = {}
    adapters = read_stack(folder)
    for adapter in adapters:
        for name in adapter.pairs:
            counts[name] = counts.get(name, 0) + 1
    depths: dict[str, int] = {}
    for name, count in counts.items():
        part = whole.part_of(name)
        depths[f"{part}_lora_num"] = max(count, depths.get(f"{part}_lora_num", 0))
    unknown = depths.keys() - {"vit_lora_num", "mlp_lora_num", "llm_lora_num"}
    if unknown:
        raise UserError(
            f"{folder} has LoRA outside of vision tower, projector and language model: stages "
            "have none there. Export with --no-verify."
        )
    kind = {"use_dora": True} if any(adapter.magnitudes for adapter in adapters) else {}
    return {**depths, **kind, "lora_target": sorted(counts)}
