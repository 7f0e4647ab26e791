"""Build a corpus for pre-training; show, merge, check and copy it."""

from commands.corpus import main
from stageline.distributed.failure import run_entry

if __name__ == "__main__":
    run_entry(main)
