"""`import_shelf()` imports only modules next to register.py. Each test has its own process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from register import ROOT


def _run(folder: Path, *, entry: str, **environment: str) -> subprocess.CompletedProcess:
    """Run an entry file in a folder with a copy of register.py."""
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "register.py", folder)
    (folder / "entry.py").write_text(entry)
    return subprocess.run(
        [sys.executable, str(folder / "entry.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


CATCHING = """
import sys, register
try:
    register.import_shelf({names})
except register.RegisterError as error:
    print(error)
    sys.exit(error.exit_code)
print(sorted(register.dataset_register))
"""
SHELF_FILE = "from register import dataset_register\ndataset_register['mine'] = print\n"
STRANGER = "raise SystemExit('a stranger ran')\n"


def _catching(*names: str) -> str:
    return CATCHING.format(names=", ".join(map(repr, names)))


def test_a_module_beside_register_is_imported(tmp_path):
    house = tmp_path / "house"
    house.mkdir()
    (house / "dataset.py").write_text(SHELF_FILE)
    done = _run(house, entry=_catching("dataset"))
    assert (done.returncode, done.stdout) == (0, "['mine']\n")


def test_a_shadowing_package_is_named_and_never_runs(tmp_path):
    house, installed = tmp_path / "house", tmp_path / "installed"
    (installed / "dataset").mkdir(parents=True)
    (installed / "dataset" / "__init__.py").write_text(STRANGER)
    house.mkdir()
    (house / "dataset.py").write_text(SHELF_FILE)
    entry = f"import sys; sys.path.insert(0, {str(installed)!r})\n" + _catching("dataset")
    done = _run(house, entry=entry)
    assert done.returncode == 2, done.stderr
    for wanted in (str(installed / "dataset"), str(house), "rename the other 'dataset'"):
        assert wanted in done.stdout
