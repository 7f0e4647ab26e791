"""The options of infer.py: what is asked."""

from dataclasses import dataclass

from options.answer_options import AnswerOptions
from options.engine_options import EngineOptions
from options.fields import OptionError, option
from options.image_options import ImageOptions
from options.placement_options import PlacementOptions
from options.run_options import EvaluateConfig, SharedOptions


@dataclass(kw_only=True)
class PromptOptions:
    """What is asked; one of --prompts, --text and --dataset"""

    prompts: str | None = option(
        None,
        "file of prompts: a line each (.txt), or rows with question, instruction or messages, and "
        "image, which need no answer (.jsonl, .json)",
        is_path=True,
    )
    text: list[str] | None = option(
        None, "prompts themselves; repeat it, or give a list in a config file"
    )
    print_answers: int = option(
        20, "up to so many answers are printed; more stand in the file alone", at_least=0
    )
    skip_bad_rows: int = option(
        0, "bad rows that are left out and listed in bad_rows.jsonl; one more ends the run",
        at_least=0,
    )  # fmt: skip


@dataclass(kw_only=True)
class InferConfig(
    PlacementOptions, PromptOptions, EngineOptions, AnswerOptions, ImageOptions, SharedOptions
):
    """Every option of infer.py."""

    output_dir: str = option("runs/infer", "folder of predictions.jsonl", is_output=True)
    max_new_tokens: int = option(256, "longest answer, in tokens", at_least=1)

    precision = EvaluateConfig.precision


def check_prompts(run: InferConfig, *, has_dataset: bool) -> None:
    """Refuses a run that asks nothing, or from two places."""
    given = [
        *(["--prompts"] if run.prompts else []),
        *(["--text"] if run.text else []),
        *(["--dataset"] if has_dataset else []),
    ]
    if len(given) != 1:
        raise OptionError(
            f"{' and '.join(given) or 'nothing to ask'} came. One of --prompts FILE, --text '...' "
            "and --dataset KEY was expected, because each says what is asked: give one of them."
        )
