"""Options that trade time for memory, and checks of their combinations."""

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from options.fields import (
    OptionError,
    Options,
    free_option,
    given_options,
    mapping,
    option,
    spelled,
)

if TYPE_CHECKING:
    from options.train import RunConfig


class RecomputeSettings(Options):
    """Activation checkpointing"""

    every: int = free_option(
        1,
        "recompute every n-th layer of the model",
        at_least=1,
        needs=("--gradient-checkpointing",),
        to="train_model",
        argument="checkpoint_every",
    )
    mode: Literal["full", "operators"] = free_option(
        "full",
        "full = recompute all, operators = keep the outputs of matrix products and attention",
        needs=("--gradient-checkpointing",),
        to="train_model",
        argument="checkpoint_mode",
    )


class MemoryOptions(Options):
    """Memory and attention"""

    gradient_checkpointing: bool = free_option(
        False, "recompute activations in the backward pass", to="train_model"
    )
    recompute: RecomputeSettings = mapping(RecomputeSettings)
    offload_activations: bool = free_option(
        False, "keep activations in pinned host memory until the backward pass", to="train_model"
    )
    logits_chunk: int = free_option(
        0, "tokens per chunk of logits and loss (0 = all at once)", at_least=0, to="train_model"
    )
    compile_layers: bool = free_option(
        False,
        "compile each layer with torch.compile",
        excludes=("--recompute.mode operators",),
        to="train_model",
    )
    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = option(
        "auto",
        "attention kernel: auto = the model's default, flex = FlexAttention (CUDA or XPU), flash = "
        "flash-attn (CUDA, with --bf16 or --fp16)",
    )


def check_memory(run: MemoryOptions, *, splits_backward: bool) -> None:
    """Refuse options that a schedule with late weight gradients (zero-bubble) cannot run."""
    if run.compile_layers and splits_backward:
        raise OptionError(
            "--compile-layers does not go with a schedule that computes the gradients of weights "
            "later than those of inputs. Use --schedule 1f1b or drop --compile-layers."
        )


def memory_remedies(run: "RunConfig", *, has_gpu: bool, streams: bool = False) -> list[str]:
    """Return the remedies for a run out of memory, the cheapest first."""
    own = run.recompute
    candidates = {
        f"a smaller --micro-batch-size (now {run.micro_batch_size})": run.micro_batch_size > 1,
        "--recompute-grain layer": streams and run.recompute_grain != "layer",
        "a smaller --streaming.budget": streams and has_gpu,
        "--gradient-checkpointing": not (run.gradient_checkpointing or streams),
        "--recompute.every 1": run.gradient_checkpointing and own.every != 1,
        "--recompute.mode full": own.mode != "full",
        "--dp-shard": (run.dp_degree or 1) > 1 and not run.dp_shard,
        "--logits-chunk 1024": not (run.logits_chunk or streams),
        "--offload-activations": has_gpu and not (run.offload_activations or streams),
        f"more --num-stages (now {run.num_stages})": True,
        f"a smaller --max-token-num (now {run.max_token_num})": True,
        "--bf16": not (run.bf16 or run.fp16),
    }
    return [what for what, is_open in candidates.items() if is_open]


def answering_remedies(run: "RunConfig") -> list[str]:
    """Return the remedies for a run out of memory during the answers of its own model."""
    limits = {"prompts_together": 1, "max_completion_length": 0, "group_size": 2}
    given = {name: getattr(run.rollouts, name) for name in limits}
    found = [
        f"a smaller --rollouts.{name} (now {value})"
        for name, value in given.items()
        if value > limits[name]
    ]
    return [*found, f"more --num-stages (now {run.num_stages})"]


# the name of the option -> the name in transformers
KERNELS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}
# devices on which a kernel trains; flash-attn has kernels only for CUDA
WHERE = {"flex": ("auto", "cuda", "xpu"), "flash": ("auto", "cuda")}


def attention_arguments(run: Any) -> dict[str, str]:
    """Return the argument of a train_model component for --attention."""
    return {} if run.attention == "auto" else {"attn_implementation": KERNELS[run.attention]}


def check_attention(run: Any, part: Any = None) -> None:
    """Refuse a kernel that cannot run here with a train_model component."""
    if run.attention == "auto":
        return
    own = None if part is None else part.kwargs.get("attn_implementation")
    if own not in (None, KERNELS[run.attention]):
        raise OptionError(
            f"--attention {run.attention} and --train-model.attn_implementation {own} exclude each "
            "other. Drop one of them."
        )
    check_attention_device(run, run.device)
    if run.attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise OptionError(
            "--attention flash requires the package flash_attn. Install it (pip install "
            "flash-attn --no-build-isolation), or use --attention sdpa."
        )


def check_attention_device(run: Any, device: str) -> None:
    """Refuse a kernel that cannot train on a kind of device (auto = unknown) or in the type."""
    if device not in WHERE.get(run.attention, (device,)):
        raise OptionError(
            f"--attention {run.attention} does not train on {device}. Use --attention sdpa, or "
            "--device cuda."
        )
    if run.attention == "flash" and not (run.bf16 or run.fp16 or run.dtype):
        raise OptionError(
            "--attention flash does not compute in float32. Add --bf16 (or --fp16), or use "
            "--attention sdpa."
        )


class StreamingSettings(Options):
    """Memory of --engine streaming"""

    budget: float | None = free_option(
        None,
        "memory of each device for weights and gradients, in GiB; default: half of the free "
        "memory, no limit on the CPU",
        at_least=0,
    )
    stages: int = free_option(
        0, "number of stages on a device at a time (0 = as many as the budget allows)", at_least=0
    )


class StreamingOptions(Options):
    """Streaming (--engine streaming)"""

    streaming: StreamingSettings = mapping(StreamingSettings)
    recompute_grain: Literal["stage", "layer"] = free_option(
        "stage",
        "unit of recomputation: stage = all stages on a device, layer = one layer at a time, with "
        "more inputs and fewer activations kept",
    )
    stale_step: bool = option(
        False, "run the optimizer during the next step, which uses weights one step old"
    )
    pin_model: Literal["alloc", "register", "off"] = free_option(
        "alloc", "pinning of host weights: alloc = a pinned copy, register = in place, off = none"
    )


# options without a meaning in one process, or that change layers, which get new weights for each
# pass (docs/streaming.md)
NOT_STREAMED = (
    *("schedule", "stages_per_rank", "dp_degree", "dp_shard", "partition", "plan"),
    *("offload_activations", "logits_chunk", "compile_layers", "quantization"),
)
ONE_REPLICA = ("dp_degree", 1)


def check_streaming(run: "RunConfig", engine: str, *, world_size: int) -> None:
    """Refuse options that --engine streaming lacks, and its own with another engine."""
    if engine != "streaming":
        for name, value in given_options(run, of=StreamingOptions).items():
            raise OptionError(
                f"{spelled(name)} {value} requires --engine streaming. Add it or drop "
                f"{spelled(name)}."
            )
        return
    if world_size > 1:
        raise OptionError(
            f"--engine streaming takes one process, and {world_size} were started. Start "
            "train_pp.py with python, or torchrun --nproc-per-node 1."
        )
    for name, value in given_options(run).items():
        # dp_degree 1 is allowed, and so is a list: layer counts follow from the stages
        if name in NOT_STREAMED and not isinstance(value, list) and (name, value) != ONE_REPLICA:
            raise OptionError(
                f"{spelled(name)} does not go with --engine streaming. Drop {spelled(name)} or use "
                "--engine pipeline."
            )
