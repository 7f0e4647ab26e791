"""Train a model that is split into pipeline stages; every component is chosen by its key."""

from commands.train import main
from stageline.distributed.failure import run_entry

if __name__ == "__main__":
    run_entry(main)
