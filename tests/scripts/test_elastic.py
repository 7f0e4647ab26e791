"""scripts/train_elastic.sh, with a recipe that records its command and ends as it is told."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_elastic.sh"
RECIPE = """
echo "cards=${CUDA_VISIBLE_DEVICES:-} $*" >>"$FOLDER/starts"
code=$(sed -n "$(wc -l <"$FOLDER/starts")p" "$FOLDER/codes")
if [ "$code" = wait ]; then
    trap 'exit 143' TERM
    touch "$FOLDER/waits"
    while true; do sleep 0.05; done
fi
exit "$code"
"""

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv").is_dir(), reason="the scripts' environment is not there"
)


def start(folder, codes, *, cards=0, broken="", **told):
    """Start a run whose starts end with these codes, on a machine with `cards` GPUs."""
    (folder / "recipe.sh").write_text(RECIPE)
    (folder / "codes").write_text("\n".join(map(str, codes)) + "\n")
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\nseq {cards}\n[ {cards} -gt 0 ]\n")
    (folder / "nvidia-smi").chmod(0o755)
    probe = f"import os; assert os.environ['CUDA_VISIBLE_DEVICES'] not in {broken.split()}"
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    names = {"FOLDER": folder, "OUTPUT_DIR": folder / "run", "PROBE": probe, **told}
    names["PATH"] = f"{folder}:{os.environ['PATH']}"
    words = ["bash", SCRIPT, folder / "recipe.sh", "--save-steps", "5"]
    return subprocess.Popen(
        list(map(str, words)),
        env={**kept, **{name: str(value) for name, value in names.items()}},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def starts(folder):
    """Return (cards, stages) of each start."""
    lines = (folder / "starts").read_text().splitlines()
    end = f" --output-dir {folder / 'run'} --resume auto"
    found = [line.removesuffix(end).split(" --save-steps 5 --num-stages ") for line in lines]
    return [(cards.removeprefix("cards="), int(stages)) for cards, stages in found]


def test_a_run_goes_on_with_the_cards_that_compute(tmp_path):
    run = start(tmp_path, [9, 8, 0], cards=4, broken="1", NUM_STAGES=4)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert starts(tmp_path) == [("", 4), ("0,2,3", 3), ("0,2,3", 3)]
    assert "restart 1 of 10, 3 of 4 stages, cards 0,2,3" in err


def test_without_cards_it_starts_the_same_again_and_not_for_ever(tmp_path):
    run = start(tmp_path, [9] * 5, MAX_RESTARTS=2)
    run.communicate(timeout=60)
    assert run.returncode == 9 and starts(tmp_path) == [("", 2)] * 3


def test_a_failure_that_would_come_back_ends_it(tmp_path):
    run = start(tmp_path, [2])
    run.communicate(timeout=60)
    assert run.returncode == 2 and len(starts(tmp_path)) == 1


def test_a_signal_is_passed_on_and_ends_it(tmp_path):
    run = start(tmp_path, ["wait"])
    deadline = time.monotonic() + 60
    while not (tmp_path / "waits").exists():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 143 and len(starts(tmp_path)) == 1
