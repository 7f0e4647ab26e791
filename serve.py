"""Answer over HTTP as OpenAI's API does, with a web page."""

from commands.serve import main
from stageline.distributed.failure import run_entry

if __name__ == "__main__":
    run_entry(main)
