"""Run tasks of lm-evaluation-harness through a model that is spread over stages.

stageline lm-eval --model-path my_model --num-stages 2 --tasks arc_easy,hellaswag

The first rank runs lm_eval; the others follow its engine.
"""

from collections.abc import Sequence
from typing import Any

from commands import check_installed, is_first, start
from commands.stages import place_stages
from options.answer import LmEvalConfig
from parse_args import parse_lm_eval_args
from stageline.errors import UserError


def main() -> int:
    """Run the tasks and print their figures; return the exit code."""
    run: LmEvalConfig = start(parse_lm_eval_args, "train_model").run
    from stageline.distributed.launch import launch_if_needed  # after the options: --help

    check_installed("lm_eval", extra="lm-eval")
    run, num_processes = place_stages(run)
    launch_if_needed(num_processes)
    import lm_eval  # not in the process that starts the others
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.utils import make_table

    from commands.decode_run import open_decoding
    from stageline.evaluation.lm_eval import StagelineLM

    manager: Any = None
    if is_first():  # before a model is loaded
        manager = find_tasks(run.task_names, include_path=run.lm_eval.include_path)
    if run.check_only:
        return 0
    ours = ("include_path", "add_bos_token")  # lm_eval has all other settings by the same names
    settings = {name: value for name, value in vars(run.lm_eval).items() if name not in ours}
    # the model in the words of the results file, which names a folder `pretrained`
    about = {"pretrained": run.model_path, "dtype": run.precision, "num_stages": run.num_stages}
    with open_decoding(run) as engine:
        if engine is None:
            return 0
        names = [name for asked in run.task_names for name in manager.match_tasks([asked])]
        tracker = EvaluationTracker(output_path=run.output_path)
        results = lm_eval.simple_evaluate(
            StagelineLM(engine, add_bos_token=run.lm_eval.add_bos_token, seed=run.seed),
            model_args=about,
            tasks=list(dict.fromkeys(names)),
            task_manager=manager,
            evaluation_tracker=tracker,
            num_fewshot=run.num_fewshot,
            limit=run.limit,
            **settings,
        )
        samples = results.pop("samples", None)
        tracker.save_results_aggregated(results=results, samples=samples)
        for name in results["configs"] if samples is not None else ():
            tracker.save_results_samples(task_name=name, samples=samples[name])
        for kind in ("results", "groups"):
            if kind in results:
                print(make_table(results, kind))
        if run.output_path:
            print(f"the results are in {run.output_path}")
    return 0


def find_tasks(names: Sequence[str], *, include_path: str | None) -> Any:
    """Return lm_eval's manager of tasks, which has all of these tasks, groups or tags.

    Args:
        include_path: folder with tasks of one's own; lm_eval's are looked at (which takes some
            seconds) where these are not enough.

    Raises:
        UserError: there is no such task.
    """
    from lm_eval.tasks import TaskManager

    missing = list(names)
    for has_all in (False, True) if include_path is not None else (True,):
        manager = TaskManager(include_path=include_path, include_defaults=has_all)
        missing = [name for name in names if not manager.match_tasks([name])]
        if not missing:
            break
    if missing:
        where = f"lm_eval and {include_path}" if include_path else "lm_eval"
        raise UserError(
            f"{where} has no task {', '.join(missing)}. Choose one that `lm_eval ls tasks` lists, "
            "or give the folder of your own YAML files with --lm-eval.include_path."
        )
    return manager
