"""Finds tasks of lm-evaluation-harness, runs them through an engine, writes what it writes.

Not here: how a question becomes tokens (lm_eval_model.py). Needs the package lm_eval.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageline.errors import UserError


@dataclass(frozen=True)
class TaskSettings:
    """What `lm_eval.simple_evaluate` is told beside model and tasks, under its own names."""

    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = True
    gen_kwargs: str | None = None
    confirm_run_unsafe_code: bool = False
    log_samples: bool = False


def check_lm_eval() -> None:
    """Says how to get lm_eval where it is missing; loads nothing.

    Raises:
        UserError: it isn't installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "the package lm_eval is not installed, it was expected, because it brings the tasks: "
            "pip install 'stageline[lm-eval]'."
        )


def find_tasks(names: Sequence[str], *, include_path: str | Path | None = None) -> Any:
    """lm_eval's manager of tasks, which knows all of these.

    Args:
        names: of tasks, groups or tags.
        include_path: folder with tasks of one's own; lm_eval's are looked at (which takes some
            seconds) where these aren't enough.

    Raises:
        UserError: nobody has such a task.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if not _missing(own, names):
            return own
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    missing = _missing(manager, names)
    if missing:
        where = f"lm_eval and {include_path}" if include_path else "lm_eval"
        raise UserError(
            f"{where} has no task {', '.join(missing)}. Names of tasks, groups or tags were "
            "expected: `lm_eval ls tasks` lists those of lm_eval; give the folder of your own YAML "
            "files with --include-path."
        )
    return manager


def _missing(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]


def run_tasks(
    engine: Any,
    names: Sequence[str],
    *,
    manager: Any,
    settings: TaskSettings,
    add_bos_token: bool | None = None,
    seed: int = 0,
    described: Mapping[str, Any] = {},
    output_path: str | Path | None = None,
) -> dict[str, Any]:
    """Asks all questions of the tasks.

    Args:
        manager: what `find_tasks` found.
        seed: of sampled answers; that of examples is lm_eval's own, so that figures compare.
        described: the model in the words of the results file; its `pretrained` names a folder.
        output_path: folder of results_DATE.json, and samples_TASK_DATE.jsonl where they are logged.

    Returns:
        What `lm_eval.simple_evaluate` returns.
    """
    import lm_eval
    from lm_eval.loggers import EvaluationTracker

    from stageline.evaluation.lm_eval_model import StagelineLM

    tracker = EvaluationTracker(output_path=None if output_path is None else str(output_path))
    names = [name for pattern in names for name in manager.match_tasks([pattern])]
    results = lm_eval.simple_evaluate(
        StagelineLM(engine, add_bos_token=add_bos_token, seed=seed),
        model_args=dict(described),
        tasks=list(dict.fromkeys(names)),
        task_manager=manager,
        evaluation_tracker=tracker,
        **vars(settings),
    )
    samples = results.pop("samples", None)
    tracker.save_results_aggregated(results=results, samples=samples)
    if samples is not None:
        for name in results["configs"]:
            tracker.save_results_samples(task_name=name, samples=samples[name])
        results["samples"] = samples
    return results


def results_table(results: dict[str, Any]) -> str:
    """The figures as lm_eval prints them; of groups too."""
    from lm_eval.utils import make_table

    kinds = ["results", *(["groups"] if "groups" in results else [])]
    return "\n".join(make_table(results, kind) for kind in kinds)
