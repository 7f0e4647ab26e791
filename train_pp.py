"""Trains a hand-split model, its stages on several processes; every part is chosen by its key."""

from commands.train import main
from stageline.distributed.failure import run_entry

if __name__ == "__main__":
    run_entry(main)
