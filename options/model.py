"""Options of the LoRA family, of adapters that a run begins with, and of noise on embeddings."""

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from options.fields import OptionError, Options, free_option, given_options, mapping, option

if TYPE_CHECKING:
    from options.train import RunConfig

# parts of a model: their names in options -> what they are
PART_NAMES = {"vit": "vision tower", "mlp": "projector", "llm": "language model", "lm_head": "head"}
PARTS = ("vit", "mlp", "llm")  # those that may have LoRA

STARTS = "default, gaussian, orthogonal, pissa or pissa_niter_N (N rounds of a quick SVD)"
_KNOWN = re.compile(r"default|gaussian|orthogonal|pissa(_niter_[1-9]\d*)?")
PISSA = "pissa"
ANY_LORA = "--llm-lora-num 1 or --vit-lora-num 1 or --mlp-lora-num 1"
_kind_option = functools.partial(option, needs=(ANY_LORA,), to="train_model?")


class LoRASettings(Options):
    """LoRA of all parts"""

    rank: int = option(8, "rank of an adapter", at_least=1, to="train_model", argument="lora_rank")
    alpha: float = option(
        16.0,
        "an adapter's output is scaled by alpha / rank",
        at_least=0,
        to="train_model",
        argument="lora_alpha",
    )
    dropout: float = option(
        0.0,
        "dropout before an adapter",
        at_least=0,
        below=1,
        to="train_model",
        argument="lora_dropout",
        in_check=False,
    )
    target: list[str] | None = option(
        None,
        "last names of the wrapped linear layers, q_proj,v_proj; default: all",
        to="train_model",
        argument="lora_target",
    )
    exclude: list[str] | None = _kind_option(
        None, "layers without LoRA, named as in target", argument="lora_exclude"
    )
    init: str = _kind_option("default", f"start of a new adapter: {STARTS}", argument="lora_init")
    use_rslora: bool = _kind_option(False, "scale an adapter by alpha / sqrt(rank)")
    use_dora: bool = _kind_option(False, "learn a magnitude for each output beside LoRA (DoRA)")
    modules_to_save: list[str] | None = option(
        None,
        "modules trained whole beside LoRA and saved with it: embed_tokens,lm_head",
        needs=(f"{ANY_LORA} or --adapter-path FOLDER",),
        to="train_model?",
    )


def check_lora(run: Any) -> None:
    """Refuses starts of an adapter, and merges of adapters, that cannot be."""
    given = f"--lora.init {run.lora.init}"
    if not _KNOWN.fullmatch(run.lora.init):
        raise OptionError(f"{given} is no start of an adapter. Give {STARTS}.")
    is_pissa = run.lora.init.startswith(PISSA)
    if run.model_path is None and is_pissa:
        raise OptionError(f"{given} requires --model-path. Add it, or drop --lora.init.")
    paths = run.adapter_path or []
    stacked = [part for part in PARTS if getattr(run, f"{part}_lora_num") > 1]
    if paths and stacked:
        raise OptionError(f"--adapter-path came with --{stacked[0]}-lora-num above 1. Set it to 1.")
    if paths and not run.create_new_adapter and run.lora.init != "default":
        raise OptionError(
            f"{given} came with an adapter that is trained on. Add --create-new-adapter or drop "
            "--lora.init."
        )
    merges = len(paths) > 1 or run.create_new_adapter
    if run.quantization and (merges or is_pissa):
        raise OptionError(
            f"{'merged --adapter-path' if merges else given} came with --quantization "
            f"{run.quantization}. Merge with export.py first and quantise that model, or give one "
            "adapter to continue with."
        )


def adapter_arguments(run: Any) -> dict[str, object]:
    """What a builder part is told of the adapters of an evaluation; of one its path alone."""
    paths, weights = run.adapter_path or [], run.adapter_weights
    if weights is None:
        return {"adapter_path": paths[0] if len(paths) == 1 else paths or None}
    if len(weights) != len(paths):
        raise OptionError(
            f"--adapter-weights has {len(weights)} numbers for {len(paths)} folders in "
            "--adapter-path. Give one for each folder."
        )
    return {"adapter_path": paths, "adapter_weights": weights}


class LayerFreezing(Options):
    """Layers of the language model that train"""

    layers: int | None = option(
        None,
        "only the last n layers train; -n: the first n",
        excludes=("--parts.llm.frozen", "--llm-lora-num", "--parts.lm_head.frozen"),
    )
    modules: list[str] | None = option(
        None,
        "modules of those layers that train, mlp,self_attn; default: all",
        needs=("--freeze.layers 2",),
    )
    extra: list[str] | None = option(
        None,
        "modules outside the layers that train too, norm,embed_tokens,lm_head",
        needs=("--freeze.layers 2",),
    )
    llama_pro: bool = option(
        False,
        "those layers are spread: the ones that tools/expand_blocks.py added",
        needs=("--freeze.layers 2",),
    )


class VocabularySettings(Options):
    """Tokens that the model has no row for"""

    new_tokens: list[str] | None = option(
        None,
        "tokens to add, <left>,<right>; @FILE has one a line (for tokens with commas)",
        in_check=False,
    )
    train_new: bool = option(
        False,
        "train of embedding and head the rows of new_tokens alone",
        needs=("--vocab.new_tokens <left>,<right> or --vocab.resize",),
    )
    resize: bool = option(
        False,
        "add rows of embedding and head for tokens of the tokenizer that have none",
        in_check=False,
    )
    multiple: int = option(
        64,
        "with resize: rows are rounded up to a multiple of this",
        at_least=1,
        needs=("--vocab.resize",),
    )


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ANY_HALF = ("--bf16 or --fp16 or --dtype auto",)


class Float32Settings(Options):
    """Float32 under --bf16 or --fp16"""

    norms: bool = option(
        False,
        "keep and compute norms in float32",
        needs=ANY_HALF,
        excludes=("--dp-shard",),
        in_check=False,
    )
    logits: bool = option(False, "logits in float32", needs=ANY_HALF, in_check=False)


def method_arguments(run: Any) -> dict[str, dict[str, Any]]:
    """What a train_model part is told of these options, in plain values; nothing if none came."""
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


def check_methods(run: Any) -> None:
    """Refuses numbers of layers that say nothing."""
    layers = run.freeze.layers
    if layers is not None and (layers == 0 or (layers < 0 and run.freeze.llama_pro)):
        raise OptionError(
            f"--freeze.layers {layers} came{' with --freeze.llama_pro' if layers else ''}. Give n "
            "for the last layers, -n for the first, with --freeze.llama_pro the number of blocks "
            "that were added, or --parts.llm.frozen to train none."
        )


class HeadTraining(Options):
    """Training of the head"""

    frozen: bool = option(False, "keep it as it is", to="train_model", argument="frozen_{}")
    lr: float | None = option(None, "default: --learning-rate", at_least=0, resume="steps")


_part = functools.partial(option, None, to="train_model?")


class PartTraining(HeadTraining):
    """Training of a part"""

    lora_rank: int | None = _part("default: --lora.rank", at_least=1, argument="{}_lora_rank")
    lora_alpha: float | None = _part("default: --lora.alpha", at_least=0, argument="{}_lora_alpha")
    lora_target: list[str] | None = _part(
        "last names of its layers with LoRA; all: every linear layer", argument="{}_lora_target"
    )


class PartsTraining(Options):
    """Training, part by part"""

    vit: PartTraining = mapping(PartTraining)
    mlp: PartTraining = mapping(PartTraining)
    llm: PartTraining = mapping(PartTraining)
    lm_head: HeadTraining = mapping(HeadTraining)


class TrainedOptions(Options):
    """What is trained, and how (docs/methods.md)"""

    adapter_path: list[str] | None = option(
        None,
        "adapter folders or hub names that the run begins with, on --model-path: all but the last "
        "are merged into it, the last is trained on",
        is_path=True,
        takes_name=True,
        needs=("--model-path FOLDER",),
        to="train_model?",
    )
    create_new_adapter: bool = option(
        False,
        "merge the last of --adapter-path, too, and train a new adapter",
        needs=("--adapter-path FOLDER", ANY_LORA),
        to="train_model?",
    )
    neftune_alpha: float = option(
        0.0,
        "noise on token embeddings in training (NEFTune); 5 is usual, 0: none",
        at_least=0,
        to="train_model?",
    )
    rope_scaling: Literal["linear", "dynamic", "yarn", "llama3"] | None = option(
        None, "scale rotary positions beyond those that the model has", in_check=False
    )
    fp32: Float32Settings = mapping(Float32Settings)
    quantization: Literal["nf4", "int8"] | None = option(
        None,
        "keep the frozen base below LoRA in 4 or 8 bits (bitsandbytes)",
        needs=("--llm-lora-num 1 or --vocab.train_new", "--model-path FOLDER"),
        excludes=("--dp-shard",),
        not_streamed="cannot send packed weights yet",
        in_check=False,
    )
    quantization_compute: Literal["fp32", "bf16", "fp16"] | None = option(
        None,
        "type in which nf4 layers multiply; default: that of the run",
        needs=("--quantization nf4",),
    )
    double_quantization: bool = option(
        False, "of nf4, keep the scales in 8 bits too", needs=("--quantization nf4",)
    )
    vit_lora_num: int = option(0, "adapters of the vision tower", at_least=0, to="train_model")
    mlp_lora_num: int = option(0, "adapters of the projector", at_least=0, to="train_model")
    llm_lora_num: int = option(
        0, "LoRA adapters of the language model", at_least=0, is_common=True, to="train_model"
    )
    parts: PartsTraining = mapping(PartsTraining)
    lora: LoRASettings = mapping(LoRASettings)
    freeze: LayerFreezing = mapping(LayerFreezing)
    vocab: VocabularySettings = mapping(VocabularySettings)
    reference: Literal["auto", "adapters_off", "precompute", "columns", "frozen_copy"] = option(
        "auto",
        "log-probabilities of the start model: adapters_off runs the stages without LoRA before "
        "each step; precompute: once, before the first one; columns: the rows bring them; auto: "
        "columns where they are, adapters_off where adapters alone are trained, else precompute, "
        "or with --loss-fn grpo frozen_copy: the start weights of what is trained, on the host",
        resume="steps",
    )


def learning_rate_scales(run: Any) -> dict[str, float]:
    """Part -> its learning rate as a multiple of --learning-rate, of those that were given."""
    given = {part: getattr(run.parts, part).lr for part in PART_NAMES}
    return {part: rate / run.learning_rate for part, rate in given.items() if rate is not None}


def check_part_training(run: Any) -> None:
    """Refuses LoRA of parts without adapters, learning rates of frozen ones, ratios to 0."""
    for part, what in PART_NAMES.items():
        own = getattr(run.parts, part)
        lora = getattr(run, f"{part}_lora_num", 0)
        about_lora = [name for name in given_options(own) if name.startswith("lora_")]
        if about_lora and not lora:
            raise OptionError(
                f"--parts.{part}.{about_lora[0]} is about LoRA on the {what}, which has none. Add "
                f"--{part}-lora-num 1, or leave it out."
            )
        if own.lr is None:
            continue
        given = f"--parts.{part}.lr {own.lr:g}"
        if run.learning_rate == 0:
            raise OptionError(
                f"{given} came with --learning-rate 0. Give the other parts a rate of 0 each, and "
                "--learning-rate that of this one."
            )
        has_rows = run.vocab.train_new and part in ("llm", "lm_head")
        if own.frozen and not lora and not has_rows:
            raise OptionError(f"{given} came with --parts.{part}.frozen. Leave one of the two out.")


def read_tokens(given: list[str]) -> list[str]:
    """The tokens of --vocab.new_tokens, with the lines of a file in the place of @FILE."""
    tokens: list[str] = []
    for entry in given:
        if not entry.startswith("@"):
            tokens.append(entry)
            continue
        try:
            lines = Path(entry[1:]).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"--vocab.new_tokens {entry} can't be read ({error}). Correct the path of the "
                "file, one token a line."
            ) from error
        tokens += [line.strip() for line in lines if line.strip()]
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
                f"--vocab.new_tokens has {token!r} in place {index + 1}: {why}. Correct "
                "it; each becomes one token."
            )
    if not tokens:
        raise OptionError("--vocab.new_tokens names no token. Give some, or leave it out.")
    return tokens


class VisionOptions(Options):
    """Vision tower"""

    vision_stages: int = free_option(
        0,
        "first stages that the vision tower has for itself; 0: it lies on stage 0",
        at_least=0,
        excludes=("--visual-gpu-ratio", "--plan"),
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
                f"{len(run.vision_partition)} stages, --vision-stages is {run.vision_stages}. "
                "Change one of them; without --vision-stages it follows from --vision-partition."
            )
    if not run.vision_stages:
        return
    given = f"--vision-stages {run.vision_stages}"
    if run.partition in ("parameters", "measured"):
        raise OptionError(
            f"{given} came with --partition {run.partition}. Give the layers of the stages behind "
            "the tower as numbers (--partition 10,10,8), or leave --partition out for equal ones."
        )
    if run.num_stages is not None and run.vision_stages >= run.num_stages:
        raise OptionError(
            f"{given} of --num-stages {run.num_stages} leaves no stage for the decoder. Use "
            f"--num-stages {run.vision_stages + 1} or more, or fewer --vision-stages."
        )


def check_counts(option: str, counts: list[int], what: str) -> None:
    """Refuses a stage that has none of the layers or blocks that are dealt out."""
    if not counts or min(counts) < 1:
        raise OptionError(
            f"{option} {','.join(map(str, counts)) or '[]'} has a stage without a {what}. Give "
            "counts from 1 upwards."
        )
