"""The options of infer.py: what is asked."""

from dataclasses import dataclass

from options.data import ImageOptions
from options.engine import AnswerOptions, EngineOptions, ModelOptions, PlacementOptions
from options.fields import OptionError, option
from options.train import EvaluateConfig, SharedOptions


@dataclass(kw_only=True)
class PromptOptions:
    """What is asked; one of --prompts, --text and --dataset"""

    prompts: str | None = option(
        None,
        "file of prompts: a line each (.txt), or rows with question, instruction or messages, and "
        "image, which need no answer (.jsonl, .json)",
        is_path=True,
        is_common=True,
    )
    text: list[str] | None = option(
        None, "prompts themselves; repeat it, or give a list in a config file", is_common=True
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

    output_dir: str = option(
        "runs/infer", "folder of predictions.jsonl", is_output=True, is_common=True
    )
    max_new_tokens: int = option(256, "longest answer, in tokens", at_least=1, is_common=True)

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


# -- the options of chat.py -----------------------------------------------------------------------


@dataclass(kw_only=True)
class ChatServerOptions:
    """A server that answers"""

    server: str | None = option(
        None, "address of a server with OpenAI's API, such as http://127.0.0.1:8000", is_common=True
    )
    server_model: str | None = option(
        None, "the model's name there; default: the first that the server names"
    )
    api_key_env: str = option(
        "OPENAI_API_KEY", "environment variable that holds the key, if the server wants one"
    )


@dataclass(kw_only=True)
class ChatConfig(ChatServerOptions, PlacementOptions, ModelOptions):
    """Chat"""

    adapter_weights: list[float] | None = option(
        None, "how much of each adapter is added; default: all of it"
    )
    max_new_tokens: int = option(512, "longest answer, in tokens", at_least=1, is_common=True)
    temperature: float = option(
        0.0, "0 takes the likeliest token, more samples", at_least=0, is_common=True
    )
    top_p: float = option(
        1.0, "with a temperature: the likeliest tokens that hold this share", at_least=0, at_most=1
    )
    top_k: int = option(50, "with a temperature: so many of the likeliest tokens", at_least=0)
    repetition_penalty: float = option(
        1.0, "above 1 makes tokens that were there before less likely", at_least=0.01
    )
    seed: int = option(0, "seed of sampling", at_least=0)
    num_devices: int | None = option(
        None, "devices that the model is spread over; default: all", at_least=1, is_common=True
    )


def check_server(run: ChatConfig) -> None:
    """Refuses a server together with a model that is loaded here.

    Raises:
        OptionError: names both.
    """
    if run.server is not None and run.model_path is not None:
        raise OptionError(
            f"--server {run.server} and --model-path {run.model_path} came together. One of them "
            "was expected, because a model answers either there or here: leave one out."
        )
    if run.server is None and run.server_model is not None:
        raise OptionError(
            f"--server-model {run.server_model} came without --server. The name belongs to a model "
            "of a server: give its address, or leave the name out."
        )
