"""Entry point of the command `stageline`: find commands/ next to this package and run them.

Only the package is installed. The repository is cloned and edited, so its commands have no other
place, and only this file of the package refers to them.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the command of the command line; return its exit code."""
    if not (ROOT / "commands").is_dir():
        print(
            f"error[usage]: stageline is in {ROOT}, and the folder commands is not next to it. Run "
            "`pip install --editable .` in the repository.",
            file=sys.stderr,
        )
        return 2
    if not sys.flags.safe_path:  # the folder of this file, of the command, or the current one
        del sys.path[0]
    sys.path.insert(0, str(ROOT))
    from commands.command_line import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
