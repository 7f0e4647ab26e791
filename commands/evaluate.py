"""Evaluates a model by generation: predictions, figures and pictures of one dataset.

Stop it at any time: started again with the same options it goes on where it was.
"""

from dataclasses import replace

from commands import importing, open_shelf, with_folders
from commands.stages import start_processes
from parse_args import parse_evaluate_args
from register import freeze_registers

SHELF = ("models", "train_model", "prompt", "prompt_fn", "dataset", "metric")


def main() -> int:
    open_shelf(*SHELF)
    arguments = parse_evaluate_args()
    freeze_registers()
    arguments = start_processes(replace(arguments, run=with_folders(arguments.run)))
    with importing():  # after the options: it imports torch and transformers
        from commands.evaluate_run import evaluate

    return evaluate(arguments)
