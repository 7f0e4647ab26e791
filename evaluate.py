"""Evaluate a model by generation: predictions, figures and pictures of one dataset."""

from commands.evaluate import main
from stageline.distributed.failure import run_entry

if __name__ == "__main__":
    run_entry(main)
