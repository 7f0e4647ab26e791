"""Which kernel computes attention; every stage is built with it, and so is a packed row's mask."""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from options.fields import OptionError, option

# as typed here -> as transformers calls it
KERNELS = {
    "eager": "eager",
    "sdpa": "sdpa",
    "flex": "flex_attention",
    "flash": "flash_attention_2",
}


@dataclass(kw_only=True)
class AttentionOptions:
    """Attention"""

    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = option(
        "auto",
        "kernel of attention; auto: what the model has by default (sdpa, eager where it has none); "
        "flex and flash need a GPU, flash also the package flash-attn and --bf16 or --fp16",
    )


def attention_arguments(run: Any) -> dict[str, str]:
    """What a train_model part gets of it: nothing where it was left open."""
    return {} if run.attention == "auto" else {"attn_implementation": KERNELS[run.attention]}


def check_attention(run: Any, part: Any = None) -> None:
    """Refuses a kernel that cannot run here, before a model is loaded.

    Args:
        part: the chosen train_model part with its `kwargs`.

    Raises:
        OptionError: says what is missing, and what to do.
    """
    if run.attention == "auto":
        return
    given = f"--attention {run.attention}"
    own = None if part is None else part.kwargs.get("attn_implementation")
    if own not in (None, KERNELS[run.attention]):
        raise OptionError(
            f"{given} came with --train-model.attn_implementation {own}. One of the two was "
            "expected, because both choose the kernel of attention. Leave one out."
        )
    check_attention_device(run, run.device)
    if run.attention != "flash":
        return
    if not (run.bf16 or run.fp16):
        raise OptionError(
            f"{given} came with float32. A half type was expected, because flash attention "
            "computes in no other. Add --bf16 (or --fp16), or use --attention sdpa."
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise OptionError(
            f"{given} came, and the package flash_attn is not installed. It was expected, because "
            "it has the kernel. Install it (pip install flash-attn --no-build-isolation), or use "
            "--attention sdpa."
        )


def check_attention_device(run: Any, device: str) -> None:
    """Refuses a kernel that cannot train on a kind of device: auto (not known yet), cpu or cuda.

    Raises:
        OptionError: says what to do.
    """
    if device == "cpu" and run.attention in ("flex", "flash"):
        raise OptionError(
            f"--attention {run.attention} came for a run on the CPU. A GPU was expected, because "
            "this kernel has no backward pass on a CPU. Use --attention sdpa, or --device cuda."
        )
