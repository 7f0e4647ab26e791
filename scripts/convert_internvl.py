"""Converts an InternVL2 folder of the remote-code class. Usage: convert_internvl.py OLD NEW"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stageline.distributed.failure import run_entry  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "old", type=Path, help="folder or hub name of InternVL2-*, InternVL2_5-*, InternVL3-*"
    )
    parser.add_argument("new", type=Path, help="a new folder")
    options = parser.parse_args()
    from stageline.checkpoint.convert import convert_internvl
    from stageline.hub import local_folder

    made = convert_internvl(local_folder(options.old, option="OLD"), options.new)
    print(f"converted {options.old} to {made}")


if __name__ == "__main__":
    run_entry(main)
