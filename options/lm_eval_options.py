"""The options of lm_eval_run.py: which tasks of lm-evaluation-harness a model is given, and how."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from options.checks import check_precision
from options.decode_options import DecodeOptions
from options.fields import OptionError, check_limits, option
from options.model_options import ModelOptions, check_has_model
from parse_args import Arguments, read_arguments


@dataclass(kw_only=True)
class TaskOptions:
    """Tasks of lm_eval"""

    tasks: str | None = option(None, "names of tasks, groups or tags, between commas")
    include_path: str | None = option(
        None, "folder with tasks of your own (YAML), which come before those of lm_eval",
        is_path=True,
    )  # fmt: skip
    num_fewshot: int | None = option(
        None, "examples before each question; default: as the task says", at_least=0
    )
    limit: float | None = option(
        None, "only so many questions of each task; below 1: such a share of them", at_least=0
    )
    apply_chat_template: bool = option(False, "ask in the chat template of the model")
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
        None, "folder of results_DATE.json, as lm_eval writes it", is_output=True
    )
    log_samples: bool = option(False, "write each question with its answer there as well")


@dataclass(kw_only=True)
class LmEvalConfig(TaskOptions, DecodeOptions, ModelOptions):
    """Run"""

    seed: int = option(0, "seed of sampled answers", at_least=0)
    check_only: bool = option(False, "check everything that can be checked, then stop")


def parse_lm_eval_args(argv: Sequence[str] | None = None) -> Arguments:
    """Reads the options; raises as `parse_train_args` does."""
    words = sys.argv[1:] if argv is None else argv
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
    run.num_replicas = run.num_replicas or 1
    if run.num_replicas != 1:
        raise OptionError(
            f"--num-replicas {run.num_replicas} came with lm_eval. 1 was expected, because one "
            "process puts all questions of a task together: use more stages, or start a run for "
            "each task."
        )
    if run.log_samples and run.output_path is None:
        raise OptionError(
            "--log-samples came without --output-path. A folder was expected, because the samples "
            "are written there: add it."
        )


def task_names(run: TaskOptions) -> list[str]:
    """What stands between the commas."""
    return [name.strip() for name in (run.tasks or "").split(",") if name.strip()]
