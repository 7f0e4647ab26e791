"""A stand-in for `.venv` that the scripts take for complete, so that nothing is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PURPOSES = ("", "-serve", "-remote", "-lm-eval")
NOTING = """#!{python}
import json, sys
with open({notes!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def mark_ready(venv: Path, *, root: Path = ROOT) -> None:
    """Writes the stamps that `scripts/_env.sh` of a repository looks for."""
    text = (root / "scripts/_env.sh").read_text()
    function = text[text.index("stageline_fingerprint()") :].partition("\n}\n")[0] + "\n}\n"
    kept = {name: value for name, value in os.environ.items() if "STAGELINE" not in name}
    stamp = subprocess.run(
        ["bash", "-c", f"{function}stageline_fingerprint"],
        env={**kept, "ROOT": str(root)}, capture_output=True, check=True,
    ).stdout  # fmt: skip
    for purpose in PURPOSES:
        (venv / f".stageline-ready{purpose}").write_bytes(stamp)


class NotingVenv:
    """A stand-in for `.venv` whose Python only notes the command lines of a script."""

    def __init__(self, folder: Path, *, root: Path = ROOT) -> None:
        self.folder, self._notes = folder / "venv", folder / "notes.jsonl"
        python = self.folder / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(NOTING.format(python=sys.executable, notes=str(self._notes)))
        python.chmod(0o755)
        mark_ready(self.folder, root=root)

    def commands(self) -> list[list[str]]:
        """Return what stood behind `python`, in the order of the calls."""
        return [json.loads(line) for line in self._notes.read_text().splitlines()]
