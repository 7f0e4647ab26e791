"""Make one plain Hugging Face folder of a checkpoint that a run saved."""

from commands.export import main
from stageline.distributed.failure import run_entry

if __name__ == "__main__":
    run_entry(main)
