"""Evaluates a model by generation: predictions, figures and pictures of one dataset.

Stop it at any time: started again with the same options it goes on where it was.
"""

from dataclasses import replace

from commands import open_shelf, with_folders
from parse_args import parse_evaluate_args
from register import freeze_registers

SHELF = ("models", "pp_models", "prompt", "prompt_fn", "dataset", "metric")


def main() -> int:
    open_shelf(*SHELF)
    arguments = parse_evaluate_args()
    freeze_registers()
    arguments = replace(arguments, run=with_folders(arguments.run))
    from commands.evaluate_run import evaluate  # after the options: it imports torch

    return evaluate(arguments)
