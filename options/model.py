"""Options of the LoRA family, of adapters that a run begins with, and of noise on embeddings."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from options.fields import OptionError, option

if TYPE_CHECKING:
    from options.train import RunConfig

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


# -- options about which layers train, positions of long texts, precision of parts, and the base --
# What each does is in docs/methods.md.

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


# -- options about how each part of a model is trained: its LoRA, its learning rate, its new tokens
# Parts are vit (vision tower), mlp (projector), llm (language model) and lm_head (output layer).

TOLD = {"vit": "vision tower", "mlp": "projector", "llm": "language model", "lm_head": "head"}
LORA_OPTIONS = tuple(
    f"{part}_lora_{name}" for part in ("vit", "mlp", "llm") for name in ("rank", "alpha", "target")
)
RATES = {part: f"{part}_learning_rate" for part in TOLD}
_TARGET = "last names of the layers with LoRA in the {}; all: every linear layer"


@dataclass(kw_only=True)
class PartTrainingOptions:
    """What is trained, part by part"""

    vit_lora_rank: int | None = option(None, "default: --lora-rank", at_least=1)
    mlp_lora_rank: int | None = option(None, "default: --lora-rank", at_least=1)
    llm_lora_rank: int | None = option(None, "default: --lora-rank", at_least=1)
    vit_lora_alpha: float | None = option(None, "default: --lora-alpha", at_least=0)
    mlp_lora_alpha: float | None = option(None, "default: --lora-alpha", at_least=0)
    llm_lora_alpha: float | None = option(None, "default: --lora-alpha", at_least=0)
    vit_lora_target: list[str] | None = option(None, _TARGET.format("vision tower"))
    mlp_lora_target: list[str] | None = option(None, _TARGET.format("projector"))
    llm_lora_target: list[str] | None = option(None, _TARGET.format("language model"))
    vit_learning_rate: float | None = option(
        None, "of the vision tower, its LoRA too; default: --learning-rate", at_least=0
    )
    mlp_learning_rate: float | None = option(
        None, "of the projector, its LoRA too; default: --learning-rate", at_least=0
    )
    llm_learning_rate: float | None = option(
        None, "of the language model, its LoRA too; default: --learning-rate", at_least=0
    )
    lm_head_learning_rate: float | None = option(
        None, "of a head with a weight of its own; default: --learning-rate", at_least=0
    )
    new_tokens: list[str] | None = option(
        None, "tokens to add, <left>,<right>; @FILE has one a line (for tokens with commas)"
    )
    train_new_tokens: bool = option(
        False, "train of embedding and head the rows of --new-tokens alone"
    )


def part_options(run: Any) -> dict[str, object]:
    """The LoRA options of single parts that were given, by name."""
    return {name: getattr(run, name) for name in LORA_OPTIONS if getattr(run, name) is not None}


def learning_rate_scales(run: Any) -> dict[str, float]:
    """Part -> its learning rate as a multiple of --learning-rate, of those that were given."""
    given = {part: getattr(run, name) for part, name in RATES.items()}
    return {part: rate / run.learning_rate for part, rate in given.items() if rate is not None}


def check_part_training(run: Any) -> None:
    """Refuses what would do nothing; puts the lines of a file in the place of @FILE.

    Raises:
        OptionError: an option of a part that has no LoRA or is frozen, or a token that is none.
    """
    for name in LORA_OPTIONS:
        part = name.partition("_")[0]
        if getattr(run, name) is not None and not getattr(run, f"{part}_lora_num"):
            raise OptionError(
                f"--{name.replace('_', '-')} came without --{part}-lora-num. LoRA on the "
                f"{TOLD[part]} was expected, because the option is about it alone. Add "
                f"--{part}-lora-num 1, or leave it out."
            )
    for part, name in RATES.items():
        if getattr(run, name) is not None:
            _check_rate(run, part, f"--{name.replace('_', '-')} {getattr(run, name):g}")
    if run.new_tokens is not None:
        run.new_tokens = _read_tokens(run.new_tokens)
    if run.train_new_tokens and not (run.new_tokens or run.resize_vocab):
        raise OptionError(
            "--train-new-tokens came without --new-tokens. The tokens were expected, because their "
            "rows are what is trained; tokens that the tokenizer has already may be named. Add "
            "--new-tokens, or leave it out."
        )


def _check_rate(run: Any, part: str, given: str) -> None:
    if run.learning_rate == 0:
        raise OptionError(
            f"{given} came with --learning-rate 0. A rate above 0 was expected there, because the "
            "schedule of a part is that of --learning-rate times the ratio of the two. Give the "
            "other parts a rate of 0 each, and --learning-rate that of this one."
        )
    frozen, lora = getattr(run, f"frozen_{part}"), getattr(run, f"{part}_lora_num", 0)
    has_rows = run.train_new_tokens and part in ("llm", "lm_head")
    if frozen and not lora and not has_rows:
        raise OptionError(
            f"{given} came with --frozen-{part.replace('_', '-')}. A part that trains was "
            f"expected, because a frozen {TOLD[part]} has no learning rate. Leave one of the two "
            "out."
        )


def _read_tokens(given: list[str]) -> list[str]:
    tokens: list[str] = []
    for entry in given:
        tokens += _lines(entry[1:]) if entry.startswith("@") else [entry]
    for index, token in enumerate(tokens):
        why = (
            "it is empty"
            if not token
            else "it begins or ends with white space"
            if token != token.strip()
            else "it begins with @, which means a file"
            if token.startswith("@")
            else "it is there twice"
            if token in tokens[:index]
            else None
        )
        if why:
            raise OptionError(
                f"--new-tokens has {token!r} in place {index + 1}: {why}. Different texts without "
                "white space around them were expected, because each becomes one token. Correct "
                "it."
            )
    if not tokens:
        raise OptionError(
            "--new-tokens names no token. One at least was expected. Give some, or leave it out."
        )
    return tokens


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--new-tokens @{path} can't be read ({error}). A text file with one token a line was "
            "expected, because @ means a file. Correct the path."
        ) from error
    return [line.strip() for line in lines if line.strip()]


# -- the options that place a vision tower on stages of its own, and what they must be together ---


@dataclass(kw_only=True)
class VisionOptions:
    """Vision tower"""

    vision_stages: int = option(
        0, "first stages that the vision tower has for itself; 0: it lies on stage 0", at_least=0
    )
    vision_partition: list[int] | None = option(
        None, "tower blocks of each of these stages, 12,12; default: equal numbers"
    )


def check_vision(run: "RunConfig") -> None:
    """Refuses two placements of one tower; a vision partition gives the number left open.

    Raises:
        OptionError: says which options do not go together.
    """
    counts = run.vision_partition
    if counts is not None:
        _check_counts(run, counts)
    if not run.vision_stages:
        return
    given = f"--vision-stages {run.vision_stages}"
    if run.visual_gpu_ratio > 0:
        raise OptionError(
            f"{given} and --visual-gpu-ratio {run.visual_gpu_ratio:g} were both given. One of them "
            "was expected, because a tower has one place: stages of its own, or a share of stage "
            "0. Leave one out."
        )
    if run.partition in ("parameters", "measured"):
        raise OptionError(
            f"{given} came with --partition {run.partition}. The planner places decoder layers "
            "behind a tower that lies on stage 0. Give the layers of the stages behind the tower "
            "as numbers (--partition 10,10,8), or leave --partition out for equal ones."
        )
    if run.plan:
        raise OptionError(
            f"{given} came with --plan, which measures a tower on stage 0 only. Leave one out; a "
            "run prints the stages and their weights when it starts."
        )
    if run.num_stages is not None and run.vision_stages >= run.num_stages:
        raise OptionError(
            f"{given} of --num-stages {run.num_stages} leaves no stage for the decoder, which "
            f"needs at least one. Use --num-stages {run.vision_stages + 1} or more, or fewer "
            "--vision-stages."
        )


def _check_counts(run: "RunConfig", counts: list[int]) -> None:
    shown = ",".join(map(str, counts))
    if not counts or min(counts) < 1:
        raise OptionError(
            f"--vision-partition {shown or '[]'} has a stage without a block. Each stage of the "
            "tower needs at least one, because a stage passes on what its blocks make. Give counts "
            "from 1 upwards."
        )
    run.vision_stages = run.vision_stages or len(counts)
    if len(counts) != run.vision_stages:
        raise OptionError(
            f"--vision-partition {shown} names {len(counts)} stages, --vision-stages is "
            f"{run.vision_stages}. One count a stage was expected, because it says how many blocks "
            "each stage gets. Change one of them; without --vision-stages it follows from "
            "--vision-partition."
        )
