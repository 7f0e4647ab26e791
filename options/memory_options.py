"""The options that trade time for memory, and what they must be together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from options.fields import OptionError, option

if TYPE_CHECKING:
    from options.run_options import RunConfig


@dataclass(kw_only=True)
class MemoryOptions:
    """Memory"""

    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")
    checkpoint_every: int = option(
        1, "of the layers of the whole model, every n-th is recomputed", at_least=1
    )
    checkpoint_mode: Literal["full", "operators"] = option(
        "full", "operators keeps the outputs of matrix products and attention"
    )
    offload_activations: bool = option(
        False, "keep saved activations in pinned host memory until the backward pass"
    )
    logits_chunk: int = option(
        0, "make logits and loss of so many tokens at a time; 0: of all at once", at_least=0
    )
    compile_layers: bool = option(False, "torch.compile each decoder layer")


def check_memory(run: MemoryOptions, *, splits_backward: bool = False) -> None:
    """Refuses levers that do nothing or cannot work together.

    Args:
        splits_backward: whether the schedule makes the gradients of inputs and of weights apart,
            as zero-bubble schedules do.
    """
    is_set = [
        name
        for name, default in (("checkpoint_every", 1), ("checkpoint_mode", "full"))
        if getattr(run, name) != default
    ]
    if is_set and not run.gradient_checkpointing:
        name = is_set[0]
        raise OptionError(
            f"--{name.replace('_', '-')} {getattr(run, name)} came without "
            f"--gradient-checkpointing. It says which activations are recomputed, and nothing is "
            f"without that option. Add --gradient-checkpointing."
        )
    if run.compile_layers and run.gradient_checkpointing and run.checkpoint_mode == "operators":
        raise OptionError(
            "--compile-layers and --checkpoint-mode operators were both given. A compiled layer "
            "hides its operators, so none could be kept. Use --checkpoint-mode full, or leave "
            "--compile-layers out."
        )
    if run.compile_layers and splits_backward:
        raise OptionError(
            "--compile-layers was given with a schedule that makes the gradients of weights later "
            "than those of inputs. A compiled layer makes both at once. Use --schedule 1f1b, or "
            "leave --compile-layers out."
        )


def memory_remedies(run: "RunConfig", *, has_gpu: bool) -> list[str]:
    """What a run without memory can still change, the cheapest first; no option that is on."""
    is_of_every = run.gradient_checkpointing and run.checkpoint_every == 1
    candidates = {
        f"a smaller --micro-batch-size (now {run.micro_batch_size})": run.micro_batch_size > 1,
        "--gradient-checkpointing": not run.gradient_checkpointing,
        "--checkpoint-every 1": run.gradient_checkpointing and not is_of_every,
        "--checkpoint-mode full": run.checkpoint_mode != "full",
        "--dp-shard": (run.dp_degree or 1) > 1 and not run.dp_shard,
        "--logits-chunk 1024": not run.logits_chunk,
        "--offload-activations": has_gpu and not run.offload_activations,
        f"more --num-stages (now {run.num_stages})": True,
        f"a smaller --max-token-num (now {run.max_token_num})": True,
        "--bf16": not (run.bf16 or run.fp16),
    }
    return [what for what, is_open in candidates.items() if is_open]
