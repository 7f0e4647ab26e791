"""The options of `--engine streaming`, and what it does not do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from options.fields import OptionError, option

if TYPE_CHECKING:
    from options.run_options import RunConfig


@dataclass(kw_only=True)
class StreamingOptions:
    """Streaming (--engine streaming)"""

    streaming_budget: float | None = option(
        None,
        "GiB of each device for weights and gradients; default: half of a GPU's free memory, "
        "no limit on the CPU",
        at_least=0,
    )
    streaming_stages: int = option(
        0, "stages on a device together; 0: as many as the budget allows", at_least=0
    )
    recompute_grain: Literal["stage", "layer"] = option(
        "stage",
        "what is recomputed at once: all stages on a device together (stage), or one after the "
        "other (layer), which keeps more inputs and fewer activations",
    )
    stale_step: bool = option(
        False, "the optimizer runs beside the next step's passes, whose weights are a step older"
    )
    pin_model: Literal["alloc", "register", "off"] = option(
        "alloc", "how GPUs reach the weights: a pinned copy, pinned in place, or as they lie"
    )


def check_streaming(run: "RunConfig", *, world_size: int) -> None:
    """Refuses what the streaming engine cannot follow.

    Args:
        world_size: processes that were started.

    Raises:
        OptionError: names the option, and what to do.
    """
    if world_size > 1:
        raise OptionError(
            f"{world_size} processes were started with --engine streaming, one was expected: it "
            "streams through all GPUs of this machine from one process. Start train_pp.py with "
            "python, or torchrun --nproc-per-node 1."
        )
    for name, value, wanted, why in _refused(run):
        if value not in (wanted, None, False):
            told = "" if value is True else f" {value}"
            raise OptionError(
                f"--{name.replace('_', '-')}{told} came with --engine streaming, which {why}. "
                "Leave the option out, or use --engine pipeline."
            )


def check_streaming_engine(run: "StreamingOptions", engine: str) -> None:
    """Refuses options of the streaming engine with another one.

    Raises:
        OptionError: names the option.
    """
    if engine == "streaming":
        return
    default = StreamingOptions()
    for name, value in vars(default).items():
        if getattr(run, name) != value:
            raise OptionError(
                f"--{name.replace('_', '-')} {getattr(run, name)} came with --engine {engine}, "
                "--engine streaming was expected: the option says how stages stream. Add --engine "
                "streaming, or leave it out."
            )


def _refused(run: "RunConfig") -> list[tuple[str, Any, Any, str]]:
    """(option, its value, the value that is all right, why no other one is)."""
    closed = "gives layers other weights for each pass, and cannot reach into this one"
    return [
        ("schedule", run.schedule, "1f1b", "has an order of its own"),
        ("stages_per_rank", run.stages_per_rank, None, "has all stages in one process"),
        ("dp_degree", run.dp_degree, 1, "has no replicas: more GPUs share the stages"),
        ("dp_shard", run.dp_shard, False, "has no replicas to share weights"),
        ("partition", _by_cost(run.partition), None, "places no stage on a device of its own"),
        ("logits_chunk", run.logits_chunk, 0, "streams the head, which the chunks would bypass"),
        ("compile_layers", run.compile_layers, False, closed),
        ("offload_activations", run.offload_activations, False, closed),
        ("quantization", run.quantization, None, "cannot send packed weights yet"),
        ("plan", run.plan, False, "chooses its plan by what is on the device, not by this table"),
    ]


def _by_cost(partition: object) -> object:
    return partition if partition in ("parameters", "measured") else None
