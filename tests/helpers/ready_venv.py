"""A stand-in for `.venv` that the scripts take for complete, so that nothing is installed."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PURPOSES = ("", "-serve", "-remote", "-lm-eval")


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
