"""The options of infer.py and chat.py -> their run configs and the kwargs of each chosen part."""

from collections.abc import Sequence
from dataclasses import dataclass

from options.answer import ChatConfig, InferConfig, check_prompts, check_server
from options.command_line import by_name, command_words, read_words
from options.data import check_images
from options.engine import (
    DecodeOptions,
    ModelOptions,
    check_engine,
    check_has_model,
    check_placement,
    with_engine_keys,
)
from options.fields import OptionError, check_limits, option
from options.train import check_precision
from parse_args import Arguments, read_arguments, with_configs

# register -> key that is taken when none is given; as in parse_args.py
INFER_KEYS: dict[str, str | None] = {
    "model": "generate",
    "builder": "auto",
    "prompt": "chat",
    "prompt_fn": "chat",
    "image_token": "auto",
}
CHAT_KEYS: dict[str, str | None] = {
    "builder": "auto",
    "prompt_fn": "chat",
    "image_token": "auto",
}


@dataclass
class InferArguments(Arguments):
    """What `infer.py` runs."""

    run: InferConfig


@dataclass
class ChatArguments(Arguments):
    """What `chat.py` runs."""

    run: ChatConfig


def parse_infer_args(argv: Sequence[str] | None = None) -> InferArguments:
    """Reads the options of a run that answers; raises as `parse_train_args` does."""
    words = command_words(argv)
    given = by_name(with_configs(read_words(words)))
    asks_dataset = "dataset" in given
    keys = {**with_engine_keys(INFER_KEYS, given), **({"dataset": None} if asks_dataset else {})}
    run, parts, imports = read_arguments(
        words, InferConfig, keys=keys, listed={"dataset": {"split": "test"}}, repeated=("text",)
    )
    check_limits(run)
    check_precision(run)
    check_images(run)
    check_placement(run)
    check_engine(run)
    check_prompts(run, has_dataset=asks_dataset)
    return InferArguments(run=run, parts=parts, imports=imports)


def parse_chat_args(argv: Sequence[str] | None = None) -> ChatArguments:
    """Reads the options of a chat; raises as `parse_train_args` does."""
    run, parts, imports = read_arguments(argv, ChatConfig, keys=CHAT_KEYS)
    check_limits(run)
    check_precision(run)
    check_placement(run)
    check_server(run)
    return ChatArguments(run=run, parts=parts, imports=imports)


# -- the options of lm_eval_run.py: which tasks of lm-evaluation-harness a model is given, and how


@dataclass(kw_only=True)
class TaskOptions:
    """Tasks of lm_eval"""

    tasks: str | None = option(
        None, "names of tasks, groups or tags, between commas", is_common=True
    )
    include_path: str | None = option(
        None, "folder with tasks of your own (YAML), which come before those of lm_eval",
        is_path=True,
    )  # fmt: skip
    num_fewshot: int | None = option(
        None, "examples before each question; default: as the task says", at_least=0, is_common=True
    )
    limit: float | None = option(
        None,
        "only so many questions of each task; below 1: such a share of them",
        at_least=0,
        is_common=True,
    )
    apply_chat_template: bool = option(
        False, "ask in the chat template of the model", is_common=True
    )
    system_instruction: str | None = option(None, "what the model is told first")
    fewshot_as_multiturn: bool = option(
        True, "with the chat template: examples as earlier turns, not as one text"
    )
    gen_kwargs: str | None = option(
        None, "in place of the tasks' own: do_sample=True,temperature=0.7,max_gen_toks=64"
    )
    add_bos_token: bool | None = option(
        None, "begin each text with that token; default: as the tokenizer does"
    )
    confirm_run_unsafe_code: bool = option(False, "run tasks that execute what the model wrote")
    output_path: str | None = option(
        None, "folder of results_DATE.json, as lm_eval writes it", is_output=True, is_common=True
    )
    log_samples: bool = option(False, "write each question with its answer there as well")


@dataclass(kw_only=True)
class LmEvalConfig(TaskOptions, DecodeOptions, ModelOptions):
    """Run"""

    seed: int = option(0, "seed of sampled answers", at_least=0)
    check_only: bool = option(False, "check everything that can be checked, then stop")


def parse_lm_eval_args(argv: Sequence[str] | None = None) -> Arguments:
    """Reads the options; raises as `parse_train_args` does."""
    words = command_words(argv)
    run, parts, imports = read_arguments(words, LmEvalConfig, keys={})
    check_limits(run)
    check_precision(run)
    _check(run)
    return Arguments(run=run, parts=parts, imports=imports)


def _check(run: LmEvalConfig) -> None:
    check_has_model(run)
    if not task_names(run):
        raise OptionError(
            "--tasks is missing. Names between commas were expected, such as --tasks arc_easy,"
            "hellaswag, because they say what is asked: `lm_eval ls tasks` lists them."
        )
    if run.log_samples and run.output_path is None:
        raise OptionError(
            "--log-samples came without --output-path. A folder was expected, because the samples "
            "are written there: add it."
        )


def task_names(run: TaskOptions) -> list[str]:
    """What stands between the commas."""
    return [name.strip() for name in (run.tasks or "").split(",") if name.strip()]
