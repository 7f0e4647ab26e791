"""The options that say what runs the model of evaluate.py and infer.py, and on how many devices."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from options.decode_options import DecodeOptions
from options.fields import OptionError, option, spelled

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
        if value != item.default and run.engine not in engines and item.name != "num_replicas":
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
