"""Options of the LoRA family, of adapters that a run begins with, and of noise on embeddings."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from options.fields import OptionError, given_options, option, spelled

if TYPE_CHECKING:
    from options.train import RunConfig

STARTS = "default, gaussian, orthogonal, pissa or pissa_niter_N (N rounds of a quick SVD)"
_KNOWN = re.compile(r"default|gaussian|orthogonal|pissa(_niter_[1-9]\d*)?")
PISSA = "pissa"
PARTS = ("vit", "mlp", "llm")


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """LoRA"""

    use_rslora: bool = option(False, "scale an adapter by alpha / sqrt(rank)", to="train_model?")
    use_dora: bool = option(
        False, "learn a magnitude for each output beside LoRA (DoRA)", to="train_model?"
    )
    lora_init: str = option("default", f"start of a new adapter: {STARTS}", to="train_model?")
    lora_exclude: list[str] | None = option(
        None,
        "layers without LoRA, told as in --lora-target; for all parts",
        to="train_model?",
    )
    modules_to_save: list[str] | None = option(
        None,
        "modules trained whole beside LoRA and saved with it: embed_tokens,lm_head",
        to="train_model?",
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters to begin with, and noise"""

    adapter_path: list[str] | None = option(
        None,
        "adapter folders that the run begins with, on --model-path: all but the last are merged "
        "into it, the last is trained on",
        is_path=True,
        to="train_model?",
    )
    create_new_adapter: bool = option(
        False,
        "merge the last of --adapter-path, too, and train a new adapter",
        needs=(
            "--adapter-path FOLDER",
            "without an adapter to begin with, each run makes a new one",
        ),
        to="train_model?",
    )
    neftune_alpha: float = option(
        0.0,
        "noise on token embeddings in training (NEFTune); 5 is usual, 0: none",
        at_least=0,
        to="train_model?",
    )


def check_lora(run: Any) -> None:
    """Refuses what would do nothing, or not what it says.

    Raises:
        OptionError: it names the option and what it needs.
    """
    has_new = any(getattr(run, f"{part}_lora_num") for part in PARTS)
    resumes = run.adapter_path is not None and not run.create_new_adapter
    for name in given_options(run, of=LoRAOptions):
        if not (has_new or (resumes and name == "modules_to_save")):
            raise OptionError(
                f"{spelled(name)} came without LoRA. --llm-lora-num 1 (or --vit-lora-num, "
                "--mlp-lora-num) was expected, because the option is about adapters. Add it, or "
                "leave the option out."
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


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Methods"""

    freeze_trainable_layers: int | None = option(
        None,
        "of the language model only the last n layers train; -n: the first n",
        excludes={
            "--frozen-llm": "both say what of the language model trains",
            "--llm-lora-num": "both say what of the language model trains",
            "--frozen-lm-head": "both say what of the language model trains",
        },
    )
    freeze_trainable_modules: list[str] | None = option(
        None,
        "modules of those layers that train, mlp,self_attn; default: all",
        needs=("--freeze-trainable-layers 2", "it says what of those layers trains"),
    )
    freeze_extra_modules: list[str] | None = option(
        None,
        "modules outside the layers that train too, norm,embed_tokens,lm_head",
        needs=("--freeze-trainable-layers 2", "it says what trains besides those layers"),
    )
    use_llama_pro: bool = option(
        False,
        "the --freeze-trainable-layers are spread: those that expand_blocks.sh added",
        needs=("--freeze-trainable-layers 2", "it says which layers those are"),
    )
    resize_vocab: bool = option(
        False,
        "add rows of embedding and head for tokens of the tokenizer that have none",
        in_check=False,
    )
    vocab_multiple: int = option(
        64,
        "of --resize-vocab: rows are rounded up to a multiple of this",
        at_least=1,
        needs=("--resize-vocab", "it says how far the rows that are added are rounded up"),
    )
    rope_scaling: Literal["linear", "dynamic", "yarn", "llama3"] | None = option(
        None,
        "scale rotary positions where --max-token-num is above what the model has",
        in_check=False,
    )
    norms_fp32: bool = option(
        False,
        "keep and compute norms in float32 under --bf16 or --fp16",
        excludes={"--dp-shard": "shares of a layer have one type"},
        in_check=False,
    )
    upcast_lm_head: bool = option(False, "logits in float32 under --bf16 or --fp16", in_check=False)
    quantization: Literal["nf4", "int8", "torchao_int8", "torchao_int4"] | None = option(
        None,
        "keep the frozen base below LoRA in 4 or 8 bits (bitsandbytes or torchao)",
        excludes={"--dp-shard": "quantised weights have no shares"},
        not_streamed="cannot send packed weights yet",
        in_check=False,
    )
    quantization_compute: Literal["fp32", "bf16", "fp16"] | None = option(
        None,
        "type in which nf4 layers multiply; default: that of the run",
        needs=("--quantization nf4", "other kinds have no such choice"),
    )
    double_quantization: bool = option(
        False,
        "of nf4, keep the scales in 8 bits too",
        needs=("--quantization nf4", "other kinds have no such choice"),
    )


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
    if (run.norms_fp32 or run.upcast_lm_head) and not (run.bf16 or run.fp16):
        given = "--norms-fp32" if run.norms_fp32 else "--upcast-lm-head"
        raise OptionError(
            f"{given} came without --bf16 or --fp16. One of them was expected, because a run "
            "in float32 has all of it in float32 anyway. Leave it out."
        )
    layers = run.freeze_trainable_layers
    if layers is not None and (layers == 0 or (layers < 0 and run.use_llama_pro)):
        raise OptionError(
            f"--freeze-trainable-layers {layers} came{' with --use-llama-pro' if layers else ''}. "
            "A number of layers was expected: n the last, -n the first, with --use-llama-pro how "
            "many blocks were added. Give one, or --frozen-llm to train none."
        )
    if run.quantization is None:
        return
    given = f"--quantization {run.quantization}"
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


# -- options about how each part of a model is trained: its LoRA, its learning rate, its new tokens
# Parts are vit (vision tower), mlp (projector), llm (language model) and lm_head (output layer).

PART_NAMES = {
    "vit": "vision tower",
    "mlp": "projector",
    "llm": "language model",
    "lm_head": "head",
}
RATES = {part: f"{part}_learning_rate" for part in PART_NAMES}
_TARGET = "last names of the layers with LoRA in the {}; all: every linear layer"


@dataclass(frozen=True, kw_only=True)
class PartTrainingOptions:
    """What is trained, part by part"""

    vit_lora_rank: int | None = option(
        None,
        "default: --lora-rank",
        at_least=1,
        needs=("--vit-lora-num 1", "it is about LoRA on the vision tower alone"),
        to="train_model?",
    )
    mlp_lora_rank: int | None = option(
        None,
        "default: --lora-rank",
        at_least=1,
        needs=("--mlp-lora-num 1", "it is about LoRA on the projector alone"),
        to="train_model?",
    )
    llm_lora_rank: int | None = option(
        None,
        "default: --lora-rank",
        at_least=1,
        needs=("--llm-lora-num 1", "it is about LoRA on the language model alone"),
        to="train_model?",
    )
    vit_lora_alpha: float | None = option(
        None,
        "default: --lora-alpha",
        at_least=0,
        needs=("--vit-lora-num 1", "it is about LoRA on the vision tower alone"),
        to="train_model?",
    )
    mlp_lora_alpha: float | None = option(
        None,
        "default: --lora-alpha",
        at_least=0,
        needs=("--mlp-lora-num 1", "it is about LoRA on the projector alone"),
        to="train_model?",
    )
    llm_lora_alpha: float | None = option(
        None,
        "default: --lora-alpha",
        at_least=0,
        needs=("--llm-lora-num 1", "it is about LoRA on the language model alone"),
        to="train_model?",
    )
    vit_lora_target: list[str] | None = option(
        None,
        _TARGET.format("vision tower"),
        needs=("--vit-lora-num 1", "it is about LoRA on the vision tower alone"),
        to="train_model?",
    )
    mlp_lora_target: list[str] | None = option(
        None,
        _TARGET.format("projector"),
        needs=("--mlp-lora-num 1", "it is about LoRA on the projector alone"),
        to="train_model?",
    )
    llm_lora_target: list[str] | None = option(
        None,
        _TARGET.format("language model"),
        needs=("--llm-lora-num 1", "it is about LoRA on the language model alone"),
        to="train_model?",
    )
    vit_learning_rate: float | None = option(
        None,
        "of the vision tower, its LoRA too; default: --learning-rate",
        at_least=0,
        resume="steps",
    )
    mlp_learning_rate: float | None = option(
        None,
        "of the projector, its LoRA too; default: --learning-rate",
        at_least=0,
        resume="steps",
    )
    llm_learning_rate: float | None = option(
        None,
        "of the language model, its LoRA too; default: --learning-rate",
        at_least=0,
        resume="steps",
    )
    lm_head_learning_rate: float | None = option(
        None,
        "of a head with a weight of its own; default: --learning-rate",
        at_least=0,
        resume="steps",
    )
    new_tokens: list[str] | None = option(
        None,
        "tokens to add, <left>,<right>; @FILE has one a line (for tokens with commas)",
        in_check=False,
    )
    train_new_tokens: bool = option(
        False, "train of embedding and head the rows of --new-tokens alone"
    )


def learning_rate_scales(run: Any) -> dict[str, float]:
    """Part -> its learning rate as a multiple of --learning-rate, of those that were given."""
    given = {part: getattr(run, name) for part, name in RATES.items()}
    return {part: rate / run.learning_rate for part, rate in given.items() if rate is not None}


def check_part_training(run: Any) -> None:
    """Refuses what would do nothing.

    Raises:
        OptionError: a learning rate of a part that is frozen, or no tokens to train.
    """
    for part, name in RATES.items():
        if getattr(run, name) is not None:
            _check_rate(run, part, f"{spelled(name)} {getattr(run, name):g}")
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
            f"expected, because a frozen {PART_NAMES[part]} has no learning rate. Leave one of "
            "the two out."
        )


def read_tokens(given: list[str]) -> list[str]:
    """The tokens of --new-tokens, with the lines of a file in the place of @FILE.

    Raises:
        OptionError: one is no token, or is there twice.
    """
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


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Vision tower"""

    vision_stages: int = option(
        0,
        "first stages that the vision tower has for itself; 0: it lies on stage 0",
        at_least=0,
        excludes={
            "--visual-gpu-ratio": "a tower has one place: stages of its own, or a share of stage 0",
            "--plan": "the plan measures a tower on stage 0 alone",
        },
        to="train_model?",
        resume="free",
    )
    vision_partition: list[int] | None = option(
        None,
        "tower blocks of each of these stages, 12,12; default: equal numbers",
        to="train_model?",
        resume="free",
    )


def check_vision(run: "RunConfig") -> None:
    """Refuses stages of a tower that leave none for the decoder, and other numbers of them.

    Raises:
        OptionError: says which options do not go together.
    """
    if run.vision_partition is not None:
        _check_counts(run, run.vision_partition)
    if not run.vision_stages:
        return
    given = f"--vision-stages {run.vision_stages}"
    if run.partition in ("parameters", "measured"):
        raise OptionError(
            f"{given} came with --partition {run.partition}. The planner places decoder layers "
            "behind a tower that lies on stage 0. Give the layers of the stages behind the tower "
            "as numbers (--partition 10,10,8), or leave --partition out for equal ones."
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
    if len(counts) != run.vision_stages:
        raise OptionError(
            f"--vision-partition {shown} names {len(counts)} stages, --vision-stages is "
            f"{run.vision_stages}. One count a stage was expected, because it says how many blocks "
            "each stage gets. Change one of them; without --vision-stages it follows from "
            "--vision-partition."
        )
