"""Run tasks of lm-evaluation-harness through a model that is spread over stages.

stageline lm-eval --model-path my_model --num-stages 2 --tasks arc_easy,hellaswag

The first rank runs lm_eval; the others follow its engine.
"""

from commands import check_installed, is_first, start
from commands.stages import place_stages
from options.answer import LmEvalConfig
from parse_args import parse_lm_eval_args


def main() -> int:
    """Run the tasks and print their figures; return the exit code."""
    run: LmEvalConfig = start(parse_lm_eval_args, "train_model").run
    from stageline.distributed.launch import launch_if_needed  # after the options: --help

    check_installed("lm_eval", extra="lm-eval")
    run, num_processes = place_stages(run)
    launch_if_needed(num_processes)
    from commands.decode_run import open_decoding  # not in the process that starts the others
    from stageline.evaluation.lm_eval import TaskSettings, find_tasks, results_table, run_tasks

    manager = None
    if is_first():  # before a model is loaded
        manager = find_tasks(run.task_names, include_path=run.lm_eval.include_path)
    if run.check_only:
        return 0
    given = {**vars(run), **vars(run.lm_eval)}
    about = {"pretrained": run.model_path, "dtype": run.precision, "num_stages": run.num_stages}
    with open_decoding(run) as engine:
        if engine is None:
            return 0
        results = run_tasks(
            engine,
            run.task_names,
            manager=manager,
            settings=TaskSettings(**{name: given[name] for name in vars(TaskSettings())}),
            add_bos_token=run.lm_eval.add_bos_token,
            seed=run.seed,
            described=about,
            output_path=run.output_path,
        )
        print(results_table(results))
        if run.output_path:
            print(f"the results are in {run.output_path}")
    return 0
