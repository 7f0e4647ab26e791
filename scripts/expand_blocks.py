"""Adds layers that change nothing yet. Usage: expand_blocks.py OLD NEW --num-expand N"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.distributed.failure import run_entry  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("old", type=Path, help="a model folder or hub name")
    parser.add_argument("new", type=Path, help="a new folder")
    parser.add_argument(
        "--num-expand", type=int, required=True, help="layers to add; it divides those there are"
    )
    options = parser.parse_args()
    from stageline.checkpoint.expand import expand_blocks
    from stageline.hub import local_folder

    old = local_folder(options.old, option="OLD")
    made = expand_blocks(old, options.new, num_expand=options.num_expand)
    print(
        f"expanded {options.old} to {made}; train its new layers alone with "
        f"--use-llama-pro --freeze-trainable-layers {options.num_expand}"
    )


if __name__ == "__main__":
    run_entry(main)
