"""Options of LoRA, start adapters, frozen layers, vocabulary and quantization."""

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from options.fields import OptionError, Options, free_option, mapping, model_option, option, refuse

if TYPE_CHECKING:
    from options.train import RunConfig

PARTS = ("vit", "mlp", "llm")  # vision tower, projector, language model

STARTS = "default, gaussian, orthogonal, pissa or pissa_niter_N (N rounds of a quick SVD)"
_KNOWN = re.compile(r"default|gaussian|orthogonal|pissa(_niter_[1-9]\d*)?")
RopeScaling: TypeAlias = Literal["linear", "dynamic", "yarn", "llama3"]
ANY_LORA = "--llm-lora-num 1 or --vit-lora-num 1 or --mlp-lora-num 1"
_kind_option = functools.partial(option, needs=(ANY_LORA,), to="train_model?")
_lora_option = functools.partial(option, to="train_model", argument="lora_{name}")


class LoRASettings(Options):
    """Fine-tuning: LoRA"""

    rank: int = _lora_option(8, "LoRA rank", ge=1)
    alpha: float = _lora_option(16.0, "LoRA alpha (scale alpha / rank)", ge=0)
    dropout: float = _lora_option(0.0, "dropout on the input of an adapter", ge=0, le=1)
    target: list[str] | None = _lora_option(None, "layers with LoRA: q_proj,v_proj; default: all")
    exclude: list[str] | None = _kind_option(None, "layers without LoRA", argument="lora_{name}")
    init: str = _kind_option("default", f"start of an adapter: {STARTS}", argument="lora_{name}")
    use_rslora: bool = _kind_option(False, "scale by alpha / sqrt(rank) (rsLoRA)")
    use_dora: bool = _kind_option(False, "also train a magnitude per output (DoRA)")
    modules_to_save: list[str] | None = option(
        None,
        "modules trained in full and saved with LoRA, such as embed_tokens,lm_head",
        needs=(f"{ANY_LORA} or --adapter-path FOLDER",),
        to="train_model?",
    )


def check_lora(run: Any) -> None:
    """Refuse starts of an adapter, and merges of adapters, that cannot be."""
    given, paths = f"--lora.init {run.lora.init}", run.adapter_path or []
    is_pissa, merges = run.lora.init.startswith("pissa"), len(paths) > 1 or run.create_new_adapter
    stacked = [f"--{part}-lora-num" for part in PARTS if getattr(run, f"{part}_lora_num") > 1]
    what = "merged --adapter-path" if merges else given
    refuse(
        {
            f"{given} is not a start of an adapter. Give {STARTS}.": not _KNOWN.fullmatch(
                run.lora.init
            ),
            f"{given} requires --model-path. Add it or drop --lora.init.": is_pissa
            and run.model_path is None,
            f"--adapter-path excludes {' '.join(stacked[:1])} above 1. Set it to 1, or drop "
            "--adapter-path.": paths and stacked,
            f"{given} requires a new adapter. Add --create-new-adapter or drop --lora.init.": paths
            and not run.create_new_adapter
            and run.lora.init != "default",
            f"{what} does not go with --quantization {run.quantization}. Merge with export.py "
            "first and quantise that model, or give one adapter to continue with.": (
                run.quantization and (merges or is_pissa)
            ),
        }
    )


def adapter_arguments(run: Any) -> dict[str, object]:
    """Return what a builder component gets of --adapter-path: the path itself of a single one."""
    paths, weights = run.adapter_path or [], run.adapter_weights
    if weights is None:
        return {"adapter_path": paths[0] if len(paths) == 1 else paths or None}
    if len(weights) != len(paths):
        raise OptionError(
            f"--adapter-weights has {len(weights)} numbers for {len(paths)} folders in "
            "--adapter-path. Give one for each folder."
        )
    return {"adapter_path": paths, "adapter_weights": weights}


_freeze_option = functools.partial(option, needs=("--freeze.layers 2",))


class LayerFreezing(Options):
    """Fine-tuning: frozen layers of the language model"""

    layers: int | None = option(
        None,
        "number of trained layers: n = the last n, -n = the first n",
        excludes=("--parts.llm.frozen", "--llm-lora-num", "--parts.lm_head.frozen"),
    )
    modules: list[str] | None = _freeze_option(None, "trained modules there, mlp; default: all")
    extra: list[str] | None = _freeze_option(None, "trained modules outside, such as norm,lm_head")
    llama_pro: bool = _freeze_option(False, "train the layers that tools/expand_blocks.py added")


class VocabularySettings(Options):
    """Fine-tuning: vocabulary"""

    new_tokens: list[str] | None = option(None, "tokens to add: <left>,<right>; @FILE = its lines")
    train_new: bool = option(
        False,
        "train only the new-token rows of embedding and LM head",
        needs=("--vocab.new_tokens <left>,<right> or --vocab.resize",),
    )
    resize: bool = option(False, "add rows to embedding and LM head for tokens without one")
    multiple: int = option(64, "rows are a multiple of this", ge=1, needs=("--vocab.resize",))


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_half_option = functools.partial(option, needs=("--bf16 or --fp16 or --dtype auto",))


class Float32Settings(Options):
    """Model: float32 under --bf16 or --fp16"""

    norms: bool = _half_option(False, "norms in float32", excludes=("--dp-shard",))
    logits: bool | None = _half_option(
        None, "LM head in float32; default: with --loss-fn grpo or --teacher.lmbda"
    )


def method_arguments(run: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of a train_model component for these options, in plain values."""
    given: dict[str, Any] = {}
    if run.freeze.layers is not None:
        given["freeze"] = {
            "num_layers": run.freeze.layers,
            "modules": tuple(run.freeze.modules or ("all",)),
            "extra": tuple(run.freeze.extra or ()),
            "spreads": run.freeze.llama_pro,
        }
    if run.rope_scaling is not None:
        given["rope_scaling"] = {"kind": run.rope_scaling, "max_token_num": run.max_token_num}
    given |= {"norms_fp32": True} if run.fp32.norms else {}
    given |= {"upcast_lm_head": True} if run.fp32.logits else {}
    if run.quantization is not None:
        given["quantization"] = {
            "kind": run.quantization,
            "compute_dtype": run.quantization_compute and DTYPES[run.quantization_compute],
            "double": run.double_quantization,
        }
    return {"methods": given} if given else {}


class HeadTraining(Options):
    """LM head"""

    frozen: bool = option(False, "freeze this part", to="train_model", argument="frozen_{part}")
    lr: float | None = option(None, "learning rate; default: --learning-rate", ge=0, resume="steps")


_part = functools.partial(
    option, None, needs=("--{part}-lora-num 1",), to="train_model?", argument="{part}_{name}"
)


class PartTraining(HeadTraining):
    """Part of the model"""

    lora_rank: int | None = _part("LoRA rank; default: --lora.rank", ge=1)
    lora_alpha: float | None = _part("LoRA alpha; default: --lora.alpha", ge=0)
    lora_target: list[str] | None = _part("layers with LoRA, all = every; default: --lora.target")


class PartsTraining(Options):
    """Fine-tuning: parts of the model"""

    vit: PartTraining = mapping(PartTraining)
    mlp: PartTraining = mapping(PartTraining)
    llm: PartTraining = mapping(PartTraining)
    lm_head: HeadTraining = mapping(HeadTraining)


def _num_adapters(part: str) -> Any:
    text = f"LoRA adapters on the {part} (0 = none, 1 = usual)"
    return option(0, text, ge=0, to="train_model")


class TrainedOptions(Options):
    """Fine-tuning"""

    adapter_path: list[str] | None = model_option(
        None,
        "adapters to continue: the last is trained, the others are merged into --model-path",
        needs=("--model-path FOLDER",),
        to="train_model?",
    )
    create_new_adapter: bool = option(
        False,
        "merge all of --adapter-path and train a new adapter",
        needs=("--adapter-path FOLDER", ANY_LORA),
        to="train_model?",
    )
    neftune_alpha: float = option(0.0, "NEFTune noise (often 5, 0 = off)", ge=0, to="train_model?")
    rope_scaling: RopeScaling | None = option(None, "RoPE scaling beyond the model's positions")
    fp32: Float32Settings = mapping(Float32Settings)
    quantization: Literal["nf4", "int8", "released"] | None = option(
        None,
        "bits of the frozen base under LoRA; released = the checkpoint's own FP8 or MXFP4",
        needs=("--llm-lora-num 1 or --vocab.train_new", "--model-path FOLDER"),
        excludes=("--dp-shard",),
    )
    quantization_compute: Literal["fp32", "bf16", "fp16"] | None = option(
        None, "compute dtype of nf4 layers; default: the run's", needs=("--quantization nf4",)
    )
    double_quantization: bool = option(False, "8-bit scales of nf4", needs=("--quantization nf4",))
    vit_lora_num: int = _num_adapters("vision tower")
    mlp_lora_num: int = _num_adapters("projector")
    llm_lora_num: int = _num_adapters("language model")
    parts: PartsTraining = mapping(PartsTraining)
    lora: LoRASettings = mapping(LoRASettings)
    freeze: LayerFreezing = mapping(LayerFreezing)
    vocab: VocabularySettings = mapping(VocabularySettings)
    reference: Literal["auto", "adapters_off", "precompute", "columns", "frozen_copy"] = option(
        "auto",
        "log-probabilities of the reference model: adapters_off = the stages without LoRA, before "
        "each step, precompute = once before the first step, columns = read from the rows, "
        "frozen_copy = a copy of the start weights on the host (grpo), auto = columns if present, "
        "adapters_off if only adapters are trained, else frozen_copy (grpo) or precompute",
        resume="steps",
    )


def learning_rate_scales(run: Any) -> dict[str, float]:
    """Return the learning rates of parts that have one, as multiples of --learning-rate."""
    given = {part: getattr(run.parts, part).lr for part in vars(run.parts)}
    return {part: rate / run.learning_rate for part, rate in given.items() if rate is not None}


def check_part_training(run: Any) -> None:
    """Refuse learning rates of frozen parts, and ratios to 0."""
    for part, own in vars(run.parts).items():
        if own.lr is None:
            continue
        given = f"--parts.{part}.lr {own.lr:g}"
        if run.learning_rate == 0:
            raise OptionError(
                f"{given} is a multiple of --learning-rate 0. Give --learning-rate the rate of "
                "this part, and the other parts a rate of 0 each."
            )
        has_rows = run.vocab.train_new and part in ("llm", "lm_head")
        if own.frozen and not getattr(run, f"{part}_lora_num", 0) and not has_rows:
            raise OptionError(
                f"{given} and --parts.{part}.frozen exclude each other. Drop one of them."
            )


def read_tokens(given: list[str]) -> list[str]:
    """Return the tokens of --vocab.new_tokens, with the lines of a file in the place of @FILE."""
    tokens: list[str] = []
    for entry in given:
        lines = [entry]
        if entry.startswith("@"):
            try:
                lines = Path(entry[1:]).expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise OptionError(
                    f"--vocab.new_tokens {entry} can't be read ({error}). Give a file with one "
                    "token a line."
                ) from error
        tokens += [line.strip() for line in lines if line.strip()]
    for token in tokens or [""]:
        if not token or tokens.count(token) > 1:
            raise OptionError(f"--vocab.new_tokens: {token!r} is empty or twice. Correct it.")
    return tokens


class VisionOptions(Options):
    """Parallelism: vision tower"""

    vision_stages: int = free_option(
        0,
        "number of first stages for the vision tower only (0 = the tower is on stage 0)",
        ge=0,
        excludes=("--visual-gpu-ratio", "--plan"),
        to="train_model?",
    )
    vision_partition: list[int] | None = free_option(
        None, "tower blocks of these stages, 12,12; default: equal numbers", to="train_model?"
    )


def check_vision(run: "RunConfig") -> None:
    """Refuse stages of a tower that leave none for the decoder, and other numbers of them."""
    if run.vision_partition is not None:
        check_counts(
            "--vision-partition",
            run.vision_partition,
            "block",
            other=f"--vision-stages is {run.vision_stages}",
            num_stages=run.vision_stages,
        )
    if not run.vision_stages:
        return
    given = f"--vision-stages {run.vision_stages}"
    if run.partition in ("parameters", "measured"):
        raise OptionError(
            f"{given} does not go with --partition {run.partition}. Give the layers of the stages "
            "behind the tower as numbers (--partition 10,10,8), or drop --partition."
        )
    if run.num_stages is not None and run.vision_stages >= run.num_stages:
        raise OptionError(
            f"{given} of --num-stages {run.num_stages} leaves no stage for the decoder. Use "
            f"--num-stages {run.vision_stages + 1} or more, or fewer --vision-stages."
        )


def check_counts(option: str, counts: list[int], what: str, *, other: str, num_stages: int) -> None:
    """Refuse a stage without a layer or block, and another number of stages than `other` has."""
    given = f"{option} {','.join(map(str, counts)) or '[]'}"
    if not counts or min(counts) < 1:
        raise OptionError(f"{given} has a stage without a {what}. Give counts from 1 upwards.")
    if len(counts) != num_stages:
        raise OptionError(
            f"{given} names {len(counts)} stages, {other}. Change one of them, or drop "
            f"{other.partition(' ')[0]}."
        )
