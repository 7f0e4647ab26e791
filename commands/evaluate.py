"""Evaluates a model by generation: predictions, figures and pictures of one dataset.

Stop it at any time: started again with the same options it goes on where it was.
"""

import sys

from parse_args import parse_evaluate_args
from register import freeze_registers, import_shelf

SHELF = ("models", "pp_models", "prompt", "prompt_fn", "dataset", "metric")


def main() -> int:
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_evaluate_args()
    freeze_registers()
    from commands.evaluate_run import evaluate  # after the options: it imports torch

    return evaluate(arguments)
