"""Evaluate a model by generation: predictions, figures and pictures of one dataset.

Stop it at any time: started again with the same options it continues.
"""

from commands import importing, start
from commands.stages import start_processes
from parse_args import parse_evaluate_args

SHELF = ("models", "pp_models", "prompt", "prompt_fn", "dataset", "metric")


def main() -> int:
    arguments = start_processes(start(parse_evaluate_args, *SHELF))
    with importing():  # after the options: it imports torch and transformers
        from commands.evaluate_run import evaluate

    return evaluate(arguments)
