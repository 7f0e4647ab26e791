"""The options that say what runs the model of evaluate.py and infer.py, and on how many devices."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from options.fields import OptionError, option, spelled

# -- the options of pipelined decoding: how a model is spread over processes that answer together -


@dataclass(kw_only=True)
class DecodeOptions:
    """Pipelined decoding (--engine pipeline)"""

    num_stages: int | None = option(
        None,
        "stages, one process and device each; default: all GPUs, 1 on the CPU",
        at_least=1,
        is_common=True,
    )
    partition: list[int] | None = option(
        None, "layers of each stage, 12,10; default: what evens out a decoding step"
    )
    prove_split: Literal["auto", "always", "never"] = option(
        "auto",
        "compare the stages with the whole model first, on a cut-down copy; auto: unless that is "
        "recorded of this model, these versions and options",
    )
    train_model: str | None = option(
        None, "key of the stages' train_model part; default: that of the model's architecture"
    )
    max_running: int = option(64, "sequences that are answered at a time", at_least=1)
    num_groups: int | None = option(
        None,
        "groups that these are divided into, so that all stages work; default: what short "
        "measurements at the start advise",
        at_least=1,
    )
    prefill_tokens: int = option(
        2048,
        "tokens of prompts that are read in one pass; longer ones are read in pieces",
        at_least=1,
    )
    max_length: int | None = option(
        None,
        "longest prompt with its answer, in tokens; default: the model's positions",
        at_least=2,
    )
    cache_gib: float | None = option(
        None,
        "GiB on each device for keys and values; default: 0.8 of what is free on a GPU, 0.25 of "
        "the host's free memory",
        at_least=0,
    )
    merge_adapters: bool = option(
        False, "add adapters to the weights: fewer operations, rounded differently"
    )


# -------------------------------------------------------------------------------------------------

# engine -> the keys that go with it where none are given
ENGINE_KEYS: dict[str, dict[str, str | None]] = {
    "device_map": {"builder": "auto", "model": "generate"},
    "pipeline": {"builder": "auto", "model": "generate"},
    "vllm": {"builder": "auto", "model": "generate"},
    "api": {"builder": "remote", "model": "remote"},
}
# engines that several processes of a run may have copies of
WITH_REPLICAS = ("device_map", "pipeline")
# options of pipelined decoding that another engine has too
SHARED = {"max_length": ("pipeline", "vllm")}


@dataclass(kw_only=True)
class EngineOptions(DecodeOptions):
    """Engine"""

    engine: Literal["device_map", "pipeline", "vllm", "api"] = option(
        "device_map",
        "device_map: one process over all devices; pipeline: a process a stage, all at work; "
        "vllm: an exported folder in vLLM; api: a model behind an endpoint (--builder.name)",
        is_common=True,
    )
    num_replicas: int | None = option(
        None,
        "copies of the model that share the work; default: of a pipeline as many as the GPUs "
        "allow, else 1",
        at_least=1,
    )


def with_engine_keys(
    keys: Mapping[str, str | None], given: Mapping[str, Any]
) -> dict[str, str | None]:
    """The keys of a run with those that suit its --engine, where one was given."""
    item = given.get("engine")
    own = ENGINE_KEYS.get(item.values[0], {}) if item is not None and item.values else {}
    return {**keys, **own}


def check_engine(run: EngineOptions) -> None:
    """Refuses numbers that the engine has no use for."""
    for item in fields(DecodeOptions):
        value = getattr(run, item.name)
        engines = SHARED.get(item.name, ("pipeline",))
        if value != item.default and run.engine not in engines:
            raise OptionError(
                f"{spelled(item.name)} {value} came with --engine {run.engine}. It was expected "
                f"with --engine {' or '.join(engines)}, because no other has a use for it: leave "
                "it out, or choose that engine (--num-devices spreads a model without a pipeline)."
            )
    if (run.num_replicas or 1) > 1 and run.engine not in WITH_REPLICAS:
        raise OptionError(
            f"--num-replicas {run.num_replicas} came with --engine {run.engine}. It was expected "
            f"with {' or '.join(WITH_REPLICAS)}, because {run.engine} has many requests on their "
            "way by itself: leave it out."
        )


# -- the options of where a model lies that answers: evaluate.py, infer.py and chat.py ------------

_UNITS = {"": 1024**3, "g": 1024**3, "gib": 1024**3, "gb": 10**9, "mib": 1024**2, "mb": 10**6}


@dataclass(kw_only=True)
class PlacementOptions:
    """Devices"""

    visual_gpu_ratio: float | None = option(
        None,
        "share of the first device that the vision tower takes: layers are dealt out by number; "
        "default: by measured bytes",
        at_least=0,
    )
    plan: bool = option(False, "show what would lie on which device, load nothing, and stop")
    device_memory: list[str] | None = option(
        None,
        "free memory of each device, 24GiB,48GiB, or of all of them, 24GiB; default: they are "
        "asked. With --plan they need not exist",
    )
    plan_length: int = option(
        2048, "tokens of the longest prompt with its answer, for --plan and the cut", at_least=2
    )
    plan_images: int = option(
        1, "images of a row (tiles count each) for --plan and the cut", at_least=0
    )


def check_placement(run: Any) -> None:
    """Refuses sizes that cannot be read, and a number of them that fits no machine."""
    device_memory(run)


def device_memory(run: Any) -> tuple[int, ...] | None:
    """Bytes of each device; None where the devices are to be asked."""
    if not run.device_memory:
        return None
    sizes = tuple(_bytes(text) for text in run.device_memory)
    count = run.num_devices or len(sizes)
    if len(sizes) not in (1, count):
        raise OptionError(
            f"--device-memory {','.join(run.device_memory)} names {len(sizes)} devices, and "
            f"--num-devices {count} came. One size for all or one for each was expected, because "
            "layers are dealt out by them: change one of the two."
        )
    return sizes if len(sizes) == count else sizes * count


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise OptionError(
            f"--device-memory {text} cannot be read. A size such as 24GiB, 80GB or 24 (GiB) was "
            "expected, because layers are dealt out by it: write a number above 0 and its unit."
        )
    return int(float(match[1]) * unit)


# -- the options of a model that answers, where there is no run with data around it ---------------


@dataclass(kw_only=True)
class ModelOptions:
    """Model and machine"""

    model_path: str | None = option(
        None, "model folder, checkpoint of a run, or adapter folder", is_path=True, is_common=True
    )
    adapter_path: list[str] | None = option(
        None,
        "LoRA adapter folder in peft's format; several are merged one after the other",
        is_path=True,
        is_common=True,
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes GPUs where there are any")
    bf16: bool = option(False, "compute in bfloat16", is_common=True)
    fp16: bool = option(False, "compute in float16")
    trust_remote_code: bool = option(False, "run Python code that lies in the model folder")

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return precision_of(self)


def precision_of(config: Any) -> Literal["fp32", "bf16", "fp16"]:
    """The compute type that the options bf16 and fp16 say."""
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"


def check_has_model(config: ModelOptions) -> None:
    """Refuses options that name no model."""
    if config.model_path is None:
        raise OptionError(
            "--model-path is missing. A folder with config.json and weights, or an adapter folder, "
            "was expected, because it is what answers: give the checkpoint of a run, such as "
            "runs/digits/checkpoints/step-00000400."
        )


# -- the options of a run that answers: evaluate.py and infer.py ----------------------------------


@dataclass(kw_only=True)
class AnswerOptions:
    """Answers"""

    adapter_path: list[str] | None = option(
        None,
        "LoRA adapter folder in peft's format; several are merged one after the other",
        is_path=True,
        is_common=True,
    )
    adapter_weights: list[float] | None = option(
        None, "how much of each adapter is added; default: all of it"
    )
    batch_size: int = option(8, "samples generated together", at_least=1, is_common=True)
    max_new_tokens: int = option(64, "longest answer, in tokens", at_least=1, is_common=True)
    temperature: float = option(
        0.0, "0 takes the likeliest token, more samples", at_least=0, is_common=True
    )
    num_devices: int | None = option(
        None, "devices that the model is spread over; default: all", at_least=1, is_common=True
    )
    limit: int | None = option(None, "answer only the first samples", at_least=1, is_common=True)
