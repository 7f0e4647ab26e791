"""Options of the LoRA family, of adapters that a run begins with, and of noise on embeddings."""

import re
from dataclasses import dataclass
from typing import Any

from options.fields import OptionError, option

STARTS = "default, gaussian, orthogonal, pissa or pissa_niter_N (N rounds of a quick SVD)"
_KNOWN = re.compile(r"default|gaussian|orthogonal|pissa(_niter_[1-9]\d*)?")
PISSA = "pissa"
PARTS = ("vit", "mlp", "llm")
_PLAIN: dict[str, object] = {  # as options have them that nobody gave
    "use_rslora": False,
    "use_dora": False,
    "lora_init": "default",
    "lora_exclude": None,
    "modules_to_save": None,
    "adapter_path": None,
    "create_new_adapter": False,
    "neftune_alpha": 0.0,
}
_NEED_LORA = ("use_rslora", "use_dora", "lora_init", "lora_exclude", "modules_to_save")


@dataclass(kw_only=True)
class LoRAOptions:
    """LoRA and noise"""

    use_rslora: bool = option(False, "scale an adapter by alpha / sqrt(rank)")
    use_dora: bool = option(False, "learn a magnitude for each output beside LoRA (DoRA)")
    lora_init: str = option("default", f"start of a new adapter: {STARTS}")
    lora_exclude: list[str] | None = option(
        None, "layers without LoRA, told as in --lora-target; for all parts"
    )
    modules_to_save: list[str] | None = option(
        None, "modules trained whole beside LoRA and saved with it: embed_tokens,lm_head"
    )
    adapter_path: list[str] | None = option(
        None,
        "adapter folders that the run begins with, on --model-path: all but the last are merged "
        "into it, the last is trained on",
        is_path=True,
    )
    create_new_adapter: bool = option(
        False, "merge the last of --adapter-path, too, and train a new adapter"
    )
    neftune_alpha: float = option(
        0.0, "noise on token embeddings in training (NEFTune); 5 is usual, 0: none", at_least=0
    )


def lora_arguments(run: Any) -> dict[str, object]:
    """What was given of these options, by name."""
    return {
        name: getattr(run, name) for name, plain in _PLAIN.items() if getattr(run, name) != plain
    }


def check_lora(run: Any) -> None:
    """Refuses what would do nothing, or not what it says.

    Raises:
        OptionError: it names the option and what it needs.
    """
    given = lora_arguments(run)
    has_new = any(getattr(run, f"{part}_lora_num") for part in PARTS)
    resumes = run.adapter_path is not None and not run.create_new_adapter
    for name in _NEED_LORA:
        if name in given and not (has_new or (resumes and name == "modules_to_save")):
            raise OptionError(
                f"--{name.replace('_', '-')} came without LoRA. --llm-lora-num 1 (or "
                "--vit-lora-num, --mlp-lora-num) was expected, because the option is about "
                "adapters. Add it, or leave the option out."
            )
    if not _KNOWN.fullmatch(run.lora_init):
        raise OptionError(
            f"--lora-init {run.lora_init} is no start of an adapter. {STARTS} was expected, as in "
            "peft. Correct it."
        )
    if run.model_path is None and run.lora_init.startswith(PISSA):
        raise OptionError(
            f"--lora-init {run.lora_init} came without --model-path. Trained weights were "
            "expected, because their principal values are what it starts with; random ones have "
            "none. Add --model-path, or leave it out."
        )
    _check_adapters(run, has_new=has_new)
    _check_quantised(run)


def _check_quantised(run: Any) -> None:
    """Refuses what would change weights that are kept in few bits."""
    quantization = getattr(run, "quantization", None)
    paths = run.adapter_path or []
    merges = len(paths) > 1 or (paths and run.create_new_adapter)
    if quantization and (merges or run.lora_init.startswith(PISSA)):
        given = "merged --adapter-path" if merges else f"--lora-init {run.lora_init}"
        raise OptionError(
            f"{given} came with --quantization {quantization}. A base that stays as it is was "
            "expected, because a weight in few bits that changes is rounded anew. Merge with "
            "export.py first and quantise that model, or give one adapter to go on with."
        )


def _check_adapters(run: Any, *, has_new: bool) -> None:
    if run.adapter_path is None:
        if run.create_new_adapter:
            raise OptionError(
                "--create-new-adapter came without --adapter-path. Adapters to merge were "
                "expected, because without any each run makes a new one. Leave it out."
            )
        return
    if run.model_path is None:
        raise OptionError(
            "--adapter-path came without --model-path. The adapters' base was expected there, "
            "because they are added to its weights. Add --model-path."
        )
    stacked = [part for part in PARTS if getattr(run, f"{part}_lora_num") > 1]
    if stacked:
        raise OptionError(
            f"--adapter-path came with --{stacked[0]}-lora-num above 1. One adapter was expected, "
            "because earlier ones are merged and not stacked. Set it to 1."
        )
    if run.create_new_adapter and not has_new:
        raise OptionError(
            "--create-new-adapter came without LoRA. --llm-lora-num 1 (or --vit-lora-num, "
            "--mlp-lora-num) was expected, because it says where the new adapter goes. Add it."
        )
    if not run.create_new_adapter and run.lora_init != "default":
        raise OptionError(
            f"--lora-init {run.lora_init} came with an adapter that is trained on. "
            "--create-new-adapter was expected, because a start is that of a new adapter. Add it, "
            "or leave --lora-init out."
        )


def adapter_arguments(run: Any) -> dict[str, object]:
    """What a builder part is told of the adapters of an evaluation; of one its path alone.

    Raises:
        OptionError: another number of weights than of adapters.
    """
    paths, weights = run.adapter_path or [], run.adapter_weights
    if weights is None:
        return {"adapter_path": paths[0] if len(paths) == 1 else paths or None}
    if len(weights) != len(paths):
        raise OptionError(
            f"--adapter-weights has {len(weights)} numbers for {len(paths)} folders in "
            "--adapter-path. One a folder was expected, because each is added by its own. Give as "
            "many."
        )
    return {"adapter_path": paths, "adapter_weights": weights}
