"""Options of the LoRA family, of adapters that a run begins with, and of noise on embeddings."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from options.fields import OptionError, free_option, option, spelled

if TYPE_CHECKING:
    from options.train import RunConfig

# parts of a model: their names in options -> what they are
PART_NAMES = {
    "vit": "vision tower",
    "mlp": "projector",
    "llm": "language model",
    "lm_head": "head",
}
PARTS = ("vit", "mlp", "llm")  # those that may have LoRA

STARTS = "default, gaussian, orthogonal, pissa or pissa_niter_N (N rounds of a quick SVD)"
_KNOWN = re.compile(r"default|gaussian|orthogonal|pissa(_niter_[1-9]\d*)?")
PISSA = "pissa"
ANY_LORA = "--llm-lora-num 1 or --vit-lora-num 1 or --mlp-lora-num 1"
_lora_option = functools.partial(
    option, needs={ANY_LORA: "the option is about adapters"}, to="train_model?"
)


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """LoRA"""

    use_rslora: bool = _lora_option(False, "scale an adapter by alpha / sqrt(rank)")
    use_dora: bool = _lora_option(False, "learn a magnitude for each output beside LoRA (DoRA)")
    lora_init: str = _lora_option("default", f"start of a new adapter: {STARTS}")
    lora_exclude: list[str] | None = _lora_option(
        None, "layers without LoRA, told as in --lora-target; for all parts"
    )
    modules_to_save: list[str] | None = option(
        None,
        "modules trained whole beside LoRA and saved with it: embed_tokens,lm_head",
        needs={f"{ANY_LORA} or --adapter-path FOLDER": "the option is about adapters"},
        to="train_model?",
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters to begin with, and noise"""

    adapter_path: list[str] | None = option(
        None,
        "adapter folders or hub names that the run begins with, on --model-path: all but the last "
        "are merged into it, the last is trained on",
        is_path=True,
        takes_name=True,
        needs={"--model-path FOLDER": "adapters are added to the weights of their base"},
        to="train_model?",
    )
    create_new_adapter: bool = option(
        False,
        "merge the last of --adapter-path, too, and train a new adapter",
        needs={
            "--adapter-path FOLDER": "without an adapter to begin with, each run makes a new one",
            ANY_LORA: "it says where the new adapter goes",
        },
        to="train_model?",
    )
    neftune_alpha: float = option(
        0.0,
        "noise on token embeddings in training (NEFTune); 5 is usual, 0: none",
        at_least=0,
        to="train_model?",
    )


def check_lora(run: Any) -> None:
    """Refuses starts of an adapter, and merges of adapters, that cannot be."""
    if not _KNOWN.fullmatch(run.lora_init):
        raise OptionError(
            f"--lora-init {run.lora_init} is no start of an adapter. {STARTS} was expected, as in "
            "peft. Correct it."
        )
    is_pissa = run.lora_init.startswith(PISSA)
    if run.model_path is None and is_pissa:
        raise OptionError(
            f"--lora-init {run.lora_init} came without --model-path. Trained weights were "
            "expected, because their principal values are what it starts with; random ones have "
            "none. Add --model-path, or leave it out."
        )
    paths = run.adapter_path or []
    stacked = [part for part in PARTS if getattr(run, f"{part}_lora_num") > 1]
    if paths and stacked:
        raise OptionError(
            f"--adapter-path came with --{stacked[0]}-lora-num above 1. One adapter was expected, "
            "because earlier ones are merged and not stacked. Set it to 1."
        )
    if paths and not run.create_new_adapter and run.lora_init != "default":
        raise OptionError(
            f"--lora-init {run.lora_init} came with an adapter that is trained on. "
            "--create-new-adapter was expected, because a start is that of a new adapter. Add it, "
            "or leave --lora-init out."
        )
    merges = len(paths) > 1 or run.create_new_adapter
    if run.quantization and (merges or is_pissa):
        given = "merged --adapter-path" if merges else f"--lora-init {run.lora_init}"
        raise OptionError(
            f"{given} came with --quantization {run.quantization}. A base that stays as it is was "
            "expected, because a weight in few bits that changes is rounded anew. Merge with "
            "export.py first and quantise that model, or give one adapter to go on with."
        )


def adapter_arguments(run: Any) -> dict[str, object]:
    """What a builder part is told of the adapters of an evaluation; of one its path alone."""
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


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
IN_FP32 = "a run in float32 has all of it in float32 anyway"


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Methods"""

    # what each does is in docs/methods.md

    freeze_trainable_layers: int | None = option(
        None,
        "of the language model only the last n layers train; -n: the first n",
        excludes=dict.fromkeys(
            ("--frozen-llm", "--llm-lora-num", "--frozen-lm-head"),
            "both say what of the language model trains",
        ),
    )
    freeze_trainable_modules: list[str] | None = option(
        None,
        "modules of those layers that train, mlp,self_attn; default: all",
        needs={"--freeze-trainable-layers 2": "it says what of those layers trains"},
    )
    freeze_extra_modules: list[str] | None = option(
        None,
        "modules outside the layers that train too, norm,embed_tokens,lm_head",
        needs={"--freeze-trainable-layers 2": "it says what trains besides those layers"},
    )
    use_llama_pro: bool = option(
        False,
        "the --freeze-trainable-layers are spread: those that tools/expand_blocks.py added",
        needs={"--freeze-trainable-layers 2": "it says which layers those are"},
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
        needs={"--resize-vocab": "it says how far the rows that are added are rounded up"},
    )
    rope_scaling: Literal["linear", "dynamic", "yarn", "llama3"] | None = option(
        None,
        "scale rotary positions where --max-token-num is above what the model has",
        in_check=False,
    )
    norms_fp32: bool = option(
        False,
        "keep and compute norms in float32 under --bf16 or --fp16",
        needs={"--bf16 or --fp16 or --dtype auto": IN_FP32},
        excludes={"--dp-shard": "shares of a layer have one type"},
        in_check=False,
    )
    upcast_lm_head: bool = option(
        False,
        "logits in float32 under --bf16 or --fp16",
        needs={"--bf16 or --fp16 or --dtype auto": IN_FP32},
        in_check=False,
    )
    quantization: Literal["nf4", "int8"] | None = option(
        None,
        "keep the frozen base below LoRA in 4 or 8 bits (bitsandbytes)",
        needs={
            "--llm-lora-num 1 or --train-new-tokens": "weights of few bits can't be trained, only "
            "adapters above them and rows of new tokens",
            "--model-path FOLDER": "a checkpoint holds the adapter alone and names its base",
        },
        excludes={"--dp-shard": "quantised weights have no shares"},
        not_streamed="cannot send packed weights yet",
        in_check=False,
    )
    quantization_compute: Literal["fp32", "bf16", "fp16"] | None = option(
        None,
        "type in which nf4 layers multiply; default: that of the run",
        needs={"--quantization nf4": "other kinds have no such choice"},
    )
    double_quantization: bool = option(
        False,
        "of nf4, keep the scales in 8 bits too",
        needs={"--quantization nf4": "other kinds have no such choice"},
    )


def method_arguments(run: Any) -> dict[str, dict[str, Any]]:
    """What a train_model part is told of these options, in plain values; nothing if none came."""
    given: dict[str, Any] = {}
    if run.freeze_trainable_layers is not None:
        given["freeze"] = {
            "num_layers": run.freeze_trainable_layers,
            "modules": tuple(run.freeze_trainable_modules or ("all",)),
            "extra": tuple(run.freeze_extra_modules or ()),
            "spreads": run.use_llama_pro,
        }
    if run.rope_scaling is not None:
        given["rope_scaling"] = {"kind": run.rope_scaling, "max_token_num": run.max_token_num}
    given |= {name: True for name in ("norms_fp32", "upcast_lm_head") if getattr(run, name)}
    if run.quantization is not None:
        given["quantization"] = {
            "kind": run.quantization,
            "compute_dtype": run.quantization_compute and DTYPES[run.quantization_compute],
            "double": run.double_quantization,
        }
    return {"methods": given} if given else {}


def check_methods(run: Any) -> None:
    """Refuses numbers of layers that say nothing."""
    layers = run.freeze_trainable_layers
    if layers is not None and (layers == 0 or (layers < 0 and run.use_llama_pro)):
        raise OptionError(
            f"--freeze-trainable-layers {layers} came{' with --use-llama-pro' if layers else ''}. "
            "A number of layers was expected: n the last, -n the first, with --use-llama-pro how "
            "many blocks were added. Give one, or --frozen-llm to train none."
        )


RATES = {part: f"{part}_learning_rate" for part in PART_NAMES}
_rate_option = functools.partial(option, None, at_least=0, resume="steps")


def _part_option(part: str, help_text: str, **limits: Any) -> Any:
    why = f"it is about LoRA on the {PART_NAMES[part]} alone"
    needs = {f"--{part}-lora-num 1": why}
    return option(None, help_text, needs=needs, to="train_model?", **limits)


def _target_option(part: str) -> Any:
    name = PART_NAMES[part]
    return _part_option(
        part, f"last names of the layers with LoRA in the {name}; all: every linear layer"
    )


@dataclass(frozen=True, kw_only=True)
class PartTrainingOptions:
    """What is trained, part by part"""

    vit_lora_rank: int | None = _part_option("vit", "default: --lora-rank", at_least=1)
    mlp_lora_rank: int | None = _part_option("mlp", "default: --lora-rank", at_least=1)
    llm_lora_rank: int | None = _part_option("llm", "default: --lora-rank", at_least=1)
    vit_lora_alpha: float | None = _part_option("vit", "default: --lora-alpha", at_least=0)
    mlp_lora_alpha: float | None = _part_option("mlp", "default: --lora-alpha", at_least=0)
    llm_lora_alpha: float | None = _part_option("llm", "default: --lora-alpha", at_least=0)
    vit_lora_target: list[str] | None = _target_option("vit")
    mlp_lora_target: list[str] | None = _target_option("mlp")
    llm_lora_target: list[str] | None = _target_option("llm")
    vit_learning_rate: float | None = _rate_option(
        "of the vision tower, its LoRA too; default: --learning-rate"
    )
    mlp_learning_rate: float | None = _rate_option(
        "of the projector, its LoRA too; default: --learning-rate"
    )
    llm_learning_rate: float | None = _rate_option(
        "of the language model, its LoRA too; default: --learning-rate"
    )
    lm_head_learning_rate: float | None = _rate_option(
        "of a head with a weight of its own; default: --learning-rate"
    )
    new_tokens: list[str] | None = option(
        None,
        "tokens to add, <left>,<right>; @FILE has one a line (for tokens with commas)",
        in_check=False,
    )
    train_new_tokens: bool = option(
        False,
        "train of embedding and head the rows of --new-tokens alone",
        needs={
            "--new-tokens <left>,<right> or --resize-vocab": "their rows are what is trained; "
            "tokens that the tokenizer has already may be named"
        },
    )


def learning_rate_scales(run: Any) -> dict[str, float]:
    """Part -> its learning rate as a multiple of --learning-rate, of those that were given."""
    given = {part: getattr(run, name) for part, name in RATES.items()}
    return {part: rate / run.learning_rate for part, rate in given.items() if rate is not None}


def check_part_training(run: Any) -> None:
    """Refuses learning rates of parts that are frozen, and ratios to a rate of 0."""
    for part, name in RATES.items():
        if getattr(run, name) is None:
            continue
        given = f"{spelled(name)} {getattr(run, name):g}"
        if run.learning_rate == 0:
            raise OptionError(
                f"{given} came with --learning-rate 0. A rate above 0 was expected there, because "
                "the schedule of a part is that of --learning-rate times the ratio of the two. "
                "Give the other parts a rate of 0 each, and --learning-rate that of this one."
            )
        frozen, lora = getattr(run, f"frozen_{part}"), getattr(run, f"{part}_lora_num", 0)
        has_rows = run.train_new_tokens and part in ("llm", "lm_head")
        if frozen and not lora and not has_rows:
            raise OptionError(
                f"{given} came with {spelled(f'frozen_{part}')}. A part that trains was expected, "
                f"because a frozen {PART_NAMES[part]} has no learning rate. Leave one of the two "
                "out."
            )


def read_tokens(given: list[str]) -> list[str]:
    """The tokens of --new-tokens, with the lines of a file in the place of @FILE."""
    tokens: list[str] = []
    for entry in given:
        tokens += _lines(entry[1:]) if entry.startswith("@") else [entry]
    for index, token in enumerate(tokens):
        problems = {
            "it is empty": not token,
            "it begins or ends with white space": token != token.strip(),
            "it begins with @, which means a file": token.startswith("@"),
            "it is there twice": token in tokens[:index],
        }
        why = next((why for why, is_so in problems.items() if is_so), None)
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


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Vision tower"""

    vision_stages: int = free_option(
        0,
        "first stages that the vision tower has for itself; 0: it lies on stage 0",
        at_least=0,
        excludes={
            "--visual-gpu-ratio": "a tower has one place: stages of its own, or a share of stage 0",
            "--plan": "the plan measures a tower on stage 0 alone",
        },
        to="train_model?",
    )
    vision_partition: list[int] | None = free_option(
        None,
        "tower blocks of each of these stages, 12,12; default: equal numbers",
        to="train_model?",
    )


def check_vision(run: "RunConfig") -> None:
    """Refuses stages of a tower that leave none for the decoder, and other numbers of them."""
    if run.vision_partition is not None:
        check_counts("--vision-partition", run.vision_partition, "block")
        if len(run.vision_partition) != run.vision_stages:
            raise OptionError(
                f"--vision-partition {','.join(map(str, run.vision_partition))} names "
                f"{len(run.vision_partition)} stages, --vision-stages is {run.vision_stages}. One "
                "count a stage was expected, because it says how many blocks each stage gets. "
                "Change one of them; without --vision-stages it follows from --vision-partition."
            )
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


def check_counts(option: str, counts: list[int], what: str) -> None:
    """Refuses a stage that has none of the layers or blocks that are dealt out."""
    if not counts or min(counts) < 1:
        raise OptionError(
            f"{option} {','.join(map(str, counts)) or '[]'} has a stage without a {what}. Each "
            f"stage needs at least one, because a stage passes on what its {what}s make. Give "
            "counts from 1 upwards."
        )
