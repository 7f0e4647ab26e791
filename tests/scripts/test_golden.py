"""What users see is what tests/golden holds: `--list` and some bad command lines of it.

CONTRIBUTING.md says how all of it is compared.
"""

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden"
PROGRAM = TESTS / "helpers" / "golden.py"
QUICK = ("errors/quick.txt", "list/train_pp.txt")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A folder with what users see now."""
    folder = tmp_path_factory.mktemp("golden")
    subprocess.run([sys.executable, str(PROGRAM), "--quick", str(folder)], check=True, timeout=280)
    if os.environ.get("STAGELINE_BLESS") == "1":
        shutil.copytree(folder, GOLDEN, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("name", QUICK)
def test_users_see_what_they_saw(seen, name):
    old, new = ((top / name).read_text(encoding="utf-8") for top in (GOLDEN, seen))
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "tests/golden", "now")
    assert old == new, "\n".join([*lines, "meant? see CONTRIBUTING.md on how to bless it"])


def test_a_difference_is_found(tmp_path):
    for name, text in (("old", "a\nb\n"), ("new", "a\nc\n")):
        (tmp_path / name / "help").mkdir(parents=True)
        (tmp_path / name / "help" / "x.txt").write_text(text)
    folders = [str(tmp_path / name) for name in ("old", "new")]
    command = [sys.executable, str(PROGRAM), "--compare"]
    assert subprocess.run([*command, folders[0], folders[0]]).returncode == 0
    done = subprocess.run([*command, *folders], capture_output=True, text=True)
    assert done.returncode == 1
    assert "-b\n+c\n" in done.stdout
