"""Options about which layers train, positions of long texts, precision of parts, and the base.

What each does is in docs/methods.md.
"""

from dataclasses import dataclass
from typing import Any, Literal

from options.fields import OptionError, option

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(kw_only=True)
class MethodOptions:
    """Methods"""

    freeze_trainable_layers: int | None = option(
        None, "of the language model only the last n layers train; -n: the first n"
    )
    freeze_trainable_modules: list[str] | None = option(
        None, "modules of those layers that train, mlp,self_attn; default: all"
    )
    freeze_extra_modules: list[str] | None = option(
        None, "modules outside the layers that train too, norm,embed_tokens,lm_head"
    )
    use_llama_pro: bool = option(
        False, "the --freeze-trainable-layers are spread: those that expand_blocks.sh added"
    )
    resize_vocab: bool = option(
        False, "add rows of embedding and head for tokens of the tokenizer that have none"
    )
    vocab_multiple: int = option(
        64, "of --resize-vocab: rows are rounded up to a multiple of this", at_least=1
    )
    rope_scaling: Literal["linear", "dynamic", "yarn", "llama3"] | None = option(
        None, "scale rotary positions where --max-token-num is above what the model has"
    )
    norms_fp32: bool = option(False, "keep and compute norms in float32 under --bf16 or --fp16")
    upcast_lm_head: bool = option(False, "logits in float32 under --bf16 or --fp16")
    quantization: Literal["nf4", "int8", "torchao_int8", "torchao_int4"] | None = option(
        None, "keep the frozen base below LoRA in 4 or 8 bits (bitsandbytes or torchao)"
    )
    quantization_compute: Literal["fp32", "bf16", "fp16"] | None = option(
        None, "type in which nf4 layers multiply; default: that of the run"
    )
    double_quantization: bool = option(False, "of nf4, keep the scales in 8 bits too")


def method_arguments(run: Any) -> dict[str, dict[str, Any]]:
    """What a train_model part is told of these options, in plain values; nothing if none came."""
    asked = {
        "freeze": _freeze_rule(run),
        "rope_scaling": _rope_scaling(run),
        "norms_fp32": run.norms_fp32,
        "upcast_lm_head": run.upcast_lm_head,
        "quantization": _quantization(run),
    }
    given = {name: value for name, value in asked.items() if value}
    return {"methods": given} if given else {}


def without_methods() -> dict[str, object]:
    """The options under which a model computes what plain transformers does, for a comparison."""
    return {
        "rope_scaling": None,
        "norms_fp32": False,
        "upcast_lm_head": False,
        "quantization": None,
    }


def _freeze_rule(run: Any) -> dict[str, Any] | None:
    if run.freeze_trainable_layers is None:
        return None
    return {
        "num_layers": run.freeze_trainable_layers,
        "modules": tuple(run.freeze_trainable_modules or ("all",)),
        "extra": tuple(run.freeze_extra_modules or ()),
        "spreads": run.use_llama_pro,
    }


def _rope_scaling(run: Any) -> dict[str, Any] | None:
    if run.rope_scaling is None:
        return None
    return {"kind": run.rope_scaling, "max_token_num": run.max_token_num}


def _quantization(run: Any) -> dict[str, Any] | None:
    if run.quantization is None:
        return None
    compute = run.quantization_compute and DTYPES[run.quantization_compute]
    double = run.double_quantization
    return {"kind": run.quantization, "compute_dtype": compute, "double": double}


def check_methods(run: Any) -> None:
    """Refuses what would do nothing or cannot work.

    Raises:
        OptionError: it names both options.
    """
    _check_freeze(run)
    _check_quantization(run)
    if run.vocab_multiple != 64 and not run.resize_vocab:
        raise OptionError(
            f"--vocab-multiple {run.vocab_multiple} came without --resize-vocab. That was "
            "expected, because it says how far rows that are added are rounded up. Add it, or "
            "leave this out."
        )
    if run.norms_fp32 or run.upcast_lm_head:
        given = "--norms-fp32" if run.norms_fp32 else "--upcast-lm-head"
        if not (run.bf16 or run.fp16):
            raise OptionError(
                f"{given} came without --bf16 or --fp16. One of them was expected, because a run "
                "in float32 has all of it in float32 anyway. Leave it out."
            )
    if run.norms_fp32 and run.dp_shard:
        raise _both("--norms-fp32", "--dp-shard", "shares of a layer have one type")


def _check_freeze(run: Any) -> None:
    layers = run.freeze_trainable_layers
    for name in ("freeze_trainable_modules", "freeze_extra_modules", "use_llama_pro"):
        if getattr(run, name) and layers is None:
            raise OptionError(
                f"--{name.replace('_', '-')} came without --freeze-trainable-layers. A number of "
                "layers was expected, because the option is about what trains besides the rest "
                "that is frozen. Add --freeze-trainable-layers 2, or leave it out."
            )
    if layers is None:
        return
    given = f"--freeze-trainable-layers {layers}"
    if layers == 0 or (layers < 0 and run.use_llama_pro):
        raise OptionError(
            f"{given} came{' with --use-llama-pro' if run.use_llama_pro else ''}. A number of "
            "layers was expected: n the last, -n the first, with --use-llama-pro how many blocks "
            "were added. Give one, or --frozen-llm to train none."
        )
    for name in ("frozen_llm", "llm_lora_num", "frozen_lm_head"):
        if getattr(run, name):
            other = f"--{name.replace('_', '-')}"
            why = "both say what of the language model trains"
            raise _both(given, other, why)


def _check_quantization(run: Any) -> None:
    kind = run.quantization
    for name in ("quantization_compute", "double_quantization"):
        if getattr(run, name) and kind != "nf4":
            raise OptionError(
                f"--{name.replace('_', '-')} came without --quantization nf4. That was expected, "
                "because other kinds have no such choice. Add it, or leave the option out."
            )
    if kind is None:
        return
    given = f"--quantization {kind}"
    if not (run.llm_lora_num or run.train_new_tokens):
        raise OptionError(
            f"{given} came without --llm-lora-num. LoRA was expected, because weights of few bits "
            "can't be trained, only adapters above them (and rows of --train-new-tokens). Add "
            "--llm-lora-num 1."
        )
    if run.model_path is None:
        raise OptionError(
            f"{given} came without --model-path. Weights were expected there, because a "
            "checkpoint holds the adapter alone and names its base. Give the model's folder."
        )
    if run.dp_shard:
        raise _both(given, "--dp-shard", "quantised weights have no shares")


def _both(one: str, other: str, why: str) -> OptionError:
    return OptionError(
        f"{one} and {other} were both given. One of them was expected, because {why}. Leave one "
        "out."
    )
