"""The one builder of stages, for training, answering, export and checks.

The train_model component of the model's architecture builds them, so a checkpoint answers as it was
trained, without an export.
"""

import dataclasses
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from options.answer import check_has_model
from options.fields import option_fields
from options.model import DTYPES, PARTS, VisionOptions
from options.parts import ChosenPart, chosen_part
from register import train_model_register
from stageline.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from parse_args import Arguments
    from stageline.distributed.ranks import Ranks
    from stageline.verify.scaled_copy import VerifyMode

AnyArguments = TypeVar("AnyArguments", bound="Arguments")
PROVES = "STAGELINE_PROVE_SPLIT"  # replaces auto, such as with never where many short runs start
# placement of a tower, which the unsplit model does not have
_OF_A_CUT = frozenset(option_fields(VisionOptions))


def dtype_of(run: Any) -> "torch.dtype":
    """Return the type that a run computes in."""
    import torch

    return getattr(torch, DTYPES[run.precision])


def place_stages(run: Any, *, num_replicas: int | None = 1) -> tuple[Any, int]:
    """Return the options of decoding with the number of stages, and the processes they take.

    `num_replicas` of the pipeline share the work; None: as many as the GPUs allow.
    """
    have = started = int(os.environ.get("WORLD_SIZE", "0"))
    if not started and run.device != "cpu":
        from stageline.device import accelerators

        have = len(accelerators(run.device))
    num_stages = run.num_stages or max(1, have // (num_replicas or 1))
    if num_replicas is None:
        num_replicas = max(1, have // num_stages)
    wanted = num_stages * num_replicas
    check_started(wanted, f"--num-stages {num_stages} and --num-replicas {num_replicas}")
    return dataclasses.replace(run, num_stages=num_stages), wanted


def check_started(wanted: int, given: str) -> None:
    """Refuse another number of processes than the options name, where torchrun has started them."""
    started = int(os.environ.get("WORLD_SIZE", wanted))
    if started != wanted:
        raise UserError(
            f"{started} processes were started for {given}. Start it without torchrun, or correct "
            "the numbers."
        )


def start_processes(config: AnyArguments) -> AnyArguments:
    """Start the processes of a run that answers, and return its numbers of stages and replicas."""
    from stageline.distributed.launch import launch_if_needed

    run = config.run
    check_model_path(run, config.parts["builder"].part)
    if run.plan or run.check_only:
        return config
    if run.engine == "pipeline":
        run, wanted = place_stages(run, num_replicas=run.num_replicas)
        num_replicas = wanted // run.num_stages
    else:
        num_replicas = wanted = run.num_replicas or 1
    check_started(wanted, f"--num-replicas {num_replicas}")
    launch_if_needed(wanted)
    run = dataclasses.replace(run, num_replicas=num_replicas)
    return dataclasses.replace(config, run=run)


def check_model_path(run: Any, builder: Callable) -> None:
    """Refuse a missing --model-path, where the builder takes one: its first argument."""
    first = next(iter(inspect.signature(builder).parameters.values()))
    if first.default is first.empty:
        check_has_model(run)


def texts_of(parts: Mapping[str, ChosenPart]) -> dict[str, Any]:
    """Return what makes a text of a sample: the template and what fills it."""
    return {
        "prompt": parts["prompt"].part,
        "prompt_fn": parts["prompt_fn"].bound,
        "image_token": parts["image_token"].bound,
    }


def prepare(config: "Arguments", processor: Any, model: Any = None) -> None:
    """Prepare a processor for texts and images of the options, and a model to match it."""
    from stageline.data.images.image_files import ImageSettings
    from stageline.data.images.tiling import Tiling, match_config, prepare_images

    images = config.run.images
    tiling = Tiling(**images.tiling())
    prepare_texts(config.parts["prompt_fn"], processor, model)
    prepare_images(processor, ImageSettings(**images.limits()), tiling)
    if tiling != Tiling():
        match_config(getattr(model, "config", None), processor)


def prepare_texts(prompt_fn: ChosenPart, processor: Any, model: Any) -> None:
    """Prepare a processor for its prompt_fn; an engine stops where the template ends turns."""
    from stageline.data.text.chat import stop_ids_with

    if processor is None or prompt_fn.facts.prepare is None:
        return
    prompt_fn.facts.prepare(processor, **prompt_fn.kwargs)
    if hasattr(model, "stop_ids"):
        model.stop_ids = tuple(stop_ids_with(list(model.stop_ids), processor))


@dataclass(frozen=True)
class StageBuilder:
    """Builds the stages of one model by its train_model component."""

    part: ChosenPart
    config_path: str | None  # the folder of config.json, or the file
    num_stages: int
    checkpoint_path: str | None = None  # weights of the stages; None: random ones
    partition: Sequence[int] | None = None  # layers of each stage; None: as even as can be
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the run, by name
    images: Any = None  # the processor of the data, where options change how it makes tiles

    def build(self, stage: int, *, num_stages: int | None = None, **changes: Any) -> Any:
        """Build one stage.

        Args:
            num_stages: another number than that of the run; its partition is left out then.
            changes: of what the component gets.
        """
        from stageline.contracts import call
        from stageline.data.images.tiling import match_config
        from stageline.pipeline.stage_passes import check_stage

        is_cut = num_stages in (None, self.num_stages)
        given = {
            "processor_path": None,
            **self.part.kwargs,
            **self.options,  # after the component's own, which hold None for absent options
            "config_path": self.config_path,
            "checkpoint_path": self.checkpoint_path,
            "stage": stage,
            "num_stages": self.num_stages if is_cut else num_stages,
            "partition": list(self.partition) if self.partition and is_cut else None,
            "trust_remote_code": self.trust_remote_code,
            **changes,
        }
        if not is_cut and num_stages == 1:
            given = {name: value for name, value in given.items() if name not in _OF_A_CUT}
        model = check_stage(call("train_model", self.part.part, **given), part=self.part.part)
        if self.images is not None:
            match_config(model.config, self.images)
        return model

    def check_names(
        self,
        stages: Sequence[int],
        *,
        ranks: "Ranks",
        checkpoint: str | None,
        has_shapes: bool = False,
    ) -> bool:
        """Run `check_outlines` on these stages, before anything is read."""
        from stageline.verify.names import check_outlines

        # for names only: methods that change none are off
        changes: dict[str, Any] = {"checkpoint_path": None, "device": "meta", "is_piece": True}
        changes |= {"methods": None} if "methods" in self.options else {}
        return check_outlines(
            functools.partial(self.build, **changes),
            stages=stages,
            num_stages=self.num_stages,
            ranks=ranks,
            checkpoint=checkpoint,
            has_shapes=has_shapes,
        )

    def check_fit(self) -> None:
        """Compare weights in a folder with the model of the options; read none of them."""
        from stageline.distributed.ranks import Ranks

        if self.checkpoint_path is not None:
            stages, ranks = range(self.num_stages), Ranks(0, 1, None)
            self.check_names(stages, ranks=ranks, checkpoint=self.checkpoint_path, has_shapes=True)

    def verify(
        self,
        mode: "VerifyMode",
        *,
        say: Callable[[str], None],
        answers: bool = False,
        packed_rows: int = 0,
    ) -> None:
        """Compare a scaled-down copy of the model, split and whole; all ranks of the run call this.

        `answers` checks decoding too, `packed_rows` micro-batches of that number of packed rows.
        """
        from stageline.distributed.ranks import Ranks

        is_split, ranks = self.num_stages > 1, Ranks.of(None)
        if mode == "never" or (mode == "auto" and os.environ.get(PROVES) == "never"):
            if is_split and ranks.rank == 0:
                say("WARNING: --prove-split never: the split is not compared with the whole model")
            return
        if not (is_split or answers or packed_rows):
            return  # imports below take a while
        from stageline.verify.answers import answers as check_answers
        from stageline.verify.scaled_copy import Check, ScaledCopy, verify
        from stageline.verify.scaled_copy import packed_rows as check_rows
        from stageline.verify.training import training

        checks: dict[str, Check] = {"loss and gradients": training} if is_split else {}
        if packed_rows:
            checks[f"{packed_rows} packed rows"] = functools.partial(check_rows, rows=packed_rows)
        if answers:
            checks["answers"] = check_answers
        options = {name: value for name, value in self.part.kwargs.items() if value is not None}
        attention = self.options.get("attn_implementation")
        attention = attention or options.pop("attn_implementation", None)
        if attention in ("eager", "sdpa"):  # sdpa on the CPU is what the kernels of a GPU compute
            options["attn_implementation"] = attention
        copy = ScaledCopy(
            self.part.part,
            self.config_path,
            self.num_stages,
            partition=self.partition,
            visual_gpu_ratio=self.options.get("visual_gpu_ratio", 0.0),
            vision_stages=self.options.get("vision_stages", 0),
            trust_remote_code=self.trust_remote_code,
            gives_scores=self.part.facts.gives_scores,
            options=options,
        )
        verify(copy, checks, mode=mode, ranks=ranks, say=say)


def stage_key(model_config: "PretrainedConfig") -> str | None:
    """Return the train_model key of a configuration: its family's, else a generic one."""
    import transformers

    name = (model_config.architectures or [""])[0]
    if name.endswith("ForSequenceClassification") and model_config.num_labels == 1:
        return "reward"
    kinds = (
        ("vision_language", "ImageTextToText", transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
        ("causal_lm", "CausalLM", transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
    )
    remote = getattr(model_config, "auto_map", None) or {}  # registered when the model is built
    for generic, kind, classes in kinds:
        if f"AutoModelFor{kind}" in remote:
            return generic
        if type(model_config) not in classes:
            continue
        found = classes[type(model_config)]
        names = [one.__name__ for one in (found if isinstance(found, tuple) else (found,)) if one]
        if model_config.architectures and not set(names) & set(model_config.architectures):
            continue  # the same layers with another head: a classifier
        families = [
            key
            for key in train_model_register
            if model_config.model_type in train_model_register.entry(key).facts.model_types
        ]
        # idefics3 serves smolvlm too, which has a key of its own
        own = model_config.model_type
        return own if own in families else next(iter(families), generic)
    return None


def family_key(folder: str, *, trust_remote_code: bool = False) -> str:
    """Return the train_model key of the architecture that a folder's config.json names."""
    from stageline.checkpoint.adapter import config_folder
    from stageline.model_folder import load_config

    if not folder:
        raise UserError("--train-model auto requires a config.json. Add --model-path FOLDER.")
    model_config = load_config(config_folder(Path(folder)), trust_remote_code=trust_remote_code)
    key = stage_key(model_config)
    if key is None:
        raise UserError(
            f"--train-model auto has no component for {(model_config.architectures or ['it'])[0]}. "
            "Choose one of `stageline list`."
        )
    return key


def with_family_key(config: AnyArguments) -> AnyArguments:
    """Return the arguments with the component that --train-model auto stands for."""
    run, parts = config.run, config.parts
    chosen = parts.get("train_model")
    if chosen is None or chosen.key != "auto":
        return config
    key = "reward"  # for a loss over scores, whatever head the model has
    if parts["loss_fn"].facts.predicts_tokens:
        key = family_key(run.config_folder, trust_remote_code=run.trust_remote_code)
    part = chosen_part("train_model", key, chosen.kwargs)
    return dataclasses.replace(config, parts={**parts, "train_model": part})


def lora_options(folder: Path, builder: StageBuilder) -> dict[str, Any]:
    """Return the numbers of adapters in an adapter folder, by part, and their layers.

    Ranks and scales are not among them: filling a stage sets those.
    """
    from stageline.checkpoint.adapter import read_stack

    whole = builder.build(0, checkpoint_path=None, device="meta")
    adapters = read_stack(folder, whole.parameter_order)
    counts = Counter(name for adapter in adapters for name in adapter.pairs)
    depths: dict[str, int] = {}
    for name, count in counts.items():
        option = f"{whole.part_of(name)}_lora_num"
        depths[option] = max(count, depths.get(option, 0))
    if depths.keys() - {f"{part}_lora_num" for part in PARTS}:
        raise UserError(
            f"{folder} has LoRA outside of vision tower, projector and language model, where "
            "stages have none. Use --engine device_map."
        )
    kind = {"use_dora": True} if any(adapter.magnitudes for adapter in adapters) else {}
    return {**depths, **kind, "lora_target": sorted(counts)}
