"""Options about how each part of a model is trained: its LoRA, its learning rate, its new tokens.

Parts are vit (vision tower), mlp (projector), llm (language model) and lm_head (output layer).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from options.fields import OptionError, option

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
