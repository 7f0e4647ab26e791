"""The options that trade time for memory, and what they must be together."""

import importlib.util
from typing import TYPE_CHECKING, Any, Literal

from options.fields import (
    OptionError,
    Options,
    free_option,
    given_options,
    mapping,
    option,
    option_fields,
    spelled,
)

if TYPE_CHECKING:
    from options.train import RunConfig


class RecomputeSettings(Options):
    """What --gradient-checkpointing recomputes"""

    every: int = free_option(
        1,
        "of the layers of the whole model, every n-th is recomputed",
        at_least=1,
        needs=("--gradient-checkpointing",),
        to="train_model",
        argument="checkpoint_every",
    )
    mode: Literal["full", "operators"] = free_option(
        "full",
        "operators keeps the outputs of matrix products and attention",
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
        False,
        "keep saved activations in pinned host memory until the backward pass",
        not_streamed="gives layers other weights for each pass, and cannot reach into this one",
        to="train_model",
    )
    logits_chunk: int = free_option(
        0,
        "make logits and loss of so many tokens at a time; 0: of all at once",
        at_least=0,
        not_streamed="streams the head, which the chunks would bypass",
        to="train_model",
        in_check=False,
    )
    compile_layers: bool = free_option(
        False,
        "torch.compile each decoder layer",
        excludes=("--recompute.mode operators",),
        not_streamed="gives layers other weights for each pass, and cannot reach into this one",
        to="train_model",
        in_check=False,
    )
    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = option(
        "auto",
        "kernel of attention; auto: what the model has by default (sdpa, eager where it has none); "
        "flex needs CUDA or XPU, flash CUDA, the package flash-attn and --bf16 or --fp16",
    )


def check_memory(run: MemoryOptions, *, splits_backward: bool) -> None:
    """Refuses what a schedule cannot do.

    Args:
        splits_backward: whether the schedule makes the gradients of inputs and of weights apart,
            as zero-bubble schedules do.
    """
    if run.compile_layers and splits_backward:
        raise OptionError(
            "--compile-layers was given with a schedule that makes the gradients of weights later "
            "than those of inputs. Use --schedule 1f1b or drop --compile-layers."
        )


def memory_remedies(run: "RunConfig", *, has_gpu: bool, streams: bool = False) -> list[str]:
    """What a run without memory can still change, the cheapest first; no option that is on.

    Args:
        streams: with the streaming engine, which recomputes anyhow.
    """
    is_of_every = run.gradient_checkpointing and run.recompute.every == 1
    candidates = {
        f"a smaller --micro-batch-size (now {run.micro_batch_size})": run.micro_batch_size > 1,
        "--recompute-grain layer": streams and run.recompute_grain != "layer",
        "a smaller --streaming.budget": streams and has_gpu,
        "--gradient-checkpointing": not (run.gradient_checkpointing or streams),
        "--recompute.every 1": run.gradient_checkpointing and not is_of_every,
        "--recompute.mode full": run.recompute.mode != "full",
        "--dp-shard": (run.dp_degree or 1) > 1 and not run.dp_shard,
        "--logits-chunk 1024": not (run.logits_chunk or streams),
        "--offload-activations": has_gpu and not (run.offload_activations or streams),
        f"more --num-stages (now {run.num_stages})": True,
        f"a smaller --max-token-num (now {run.max_token_num})": True,
        "--bf16": not (run.bf16 or run.fp16),
    }
    return [what for what, is_open in candidates.items() if is_open]


def answering_remedies(run: "RunConfig") -> list[str]:
    """What a run that has no memory for the answers of its own model can change, likewise."""
    own = run.rollouts
    candidates = {
        f"a smaller --rollouts.prompts_together (now {own.prompts_together})": own.prompts_together
        > 1,
        f"a smaller --rollouts.max_completion_length (now {own.max_completion_length})": True,
        f"a smaller --rollouts.group_size (now {own.group_size})": own.group_size > 2,
        f"more --num-stages (now {run.num_stages})": True,
    }
    return [what for what, is_open in candidates.items() if is_open]


# as typed here -> as transformers calls it
KERNELS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}
# where a kernel trains; the package flash-attn has none but for CUDA
WHERE = {"flex": ("auto", "cuda", "xpu"), "flash": ("auto", "cuda")}


def attention_arguments(run: Any) -> dict[str, str]:
    """What a train_model part gets of it: nothing where it was left open."""
    return {} if run.attention == "auto" else {"attn_implementation": KERNELS[run.attention]}


def check_attention(run: Any, part: Any = None) -> None:
    """Refuses a kernel that cannot run here, before a model is loaded.

    Args:
        part: the chosen train_model part.
    """
    if run.attention == "auto":
        return
    given = f"--attention {run.attention}"
    own = None if part is None else part.kwargs.get("attn_implementation")
    if own not in (None, KERNELS[run.attention]):
        raise OptionError(
            f"{given} came with --train-model.attn_implementation {own}. Leave one out."
        )
    check_attention_device(run, run.device)
    if run.attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise OptionError(
            f"{given} came, and the package flash_attn is not installed. Install it (pip install "
            "flash-attn --no-build-isolation), or use --attention sdpa."
        )


def check_attention_device(run: Any, device: str) -> None:
    """Refuses a kernel that cannot train on a kind of device, or in the run's type.

    Args:
        device: auto: it is not known yet, as a type that `dtype` leaves to the config.
    """
    where = WHERE.get(run.attention, (device,))
    if device not in where:
        raise OptionError(
            f"--attention {run.attention} came for a run on {device}. Use --attention sdpa, or "
            "--device cuda."
        )
    if run.attention == "flash" and not (run.bf16 or run.fp16 or run.dtype):
        raise OptionError(
            "--attention flash came with float32. Add --bf16 (or --fp16), or use --attention sdpa."
        )


class StreamingSettings(Options):
    """Memory of --engine streaming"""

    budget: float | None = free_option(
        None,
        "GiB of each device for weights and gradients; default: half of its free memory, "
        "no limit on the CPU",
        at_least=0,
    )
    stages: int = free_option(
        0, "stages on a device together; 0: as many as the budget allows", at_least=0
    )


class StreamingOptions(Options):
    """Streaming (--engine streaming)"""

    streaming: StreamingSettings = mapping(StreamingSettings)
    recompute_grain: Literal["stage", "layer"] = free_option(
        "stage",
        "what is recomputed at once: all stages on a device together (stage), or one after the "
        "other (layer), which keeps more inputs and fewer activations",
    )
    stale_step: bool = option(
        False, "the optimizer runs beside the next step's passes, whose weights are a step older"
    )
    pin_model: Literal["alloc", "register", "off"] = free_option(
        "alloc",
        "how devices reach the weights: a pinned copy, pinned in place (CUDA), or as they lie",
    )


def check_streaming(run: "RunConfig", *, world_size: int) -> None:
    """Refuses what the streaming engine cannot follow.

    Args:
        world_size: processes that were started.
    """
    if world_size > 1:
        raise OptionError(
            f"{world_size} processes were started with --engine streaming, which takes one. "
            "Start train_pp.py with python, or torchrun --nproc-per-node 1."
        )
    fields = option_fields(run)
    for name, value in given_options(run).items():
        why = fields[name].metadata["not_streamed"]
        has_one_replica = name == "dp_degree" and value == 1
        if why and not has_one_replica and not isinstance(value, list):
            given = "" if value is True else f" {value}"
            raise OptionError(
                f"{spelled(name)}{given} came with --engine streaming, which {why}. Leave the "
                "option out, or use --engine pipeline."
            )


def check_streaming_engine(run: "StreamingOptions", engine: str) -> None:
    """Refuses options of the streaming engine with another one."""
    if engine == "streaming":
        return
    for name, value in given_options(run, of=StreamingOptions).items():
        raise OptionError(
            f"{spelled(name)} {value} came with --engine {engine}. Add --engine "
            "streaming, or leave it out."
        )
