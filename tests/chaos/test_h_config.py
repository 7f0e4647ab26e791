"""H11: words of a shell in paths are text. Wrong options: tests/unit/test_option_errors.py."""

import os
import shutil
import subprocess

import pytest

from tests.helpers.ready_venv import mark_ready
from tests.helpers.small_run import ROOT, Job

NASTY = "a; touch X1 $(touch X2) `touch X3` & | > X4\n#'\""
# stands for the python of a recipe: writes down its words
FAKE = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" >"$WORDS"\n'


@pytest.mark.parametrize("recipe", ["train_pp.sh", "export.sh"])
def test_h11_recipes_pass_words_on_as_they_are(tmp_path, recipe):
    root = tmp_path / NASTY
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "requirements.lock", root)
    shutil.copy(ROOT / "pyproject.toml", root)
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE)
    python.chmod(0o700)
    mark_ready(root / ".venv", root=root)
    names = ("MODEL_PATH", "OUTPUT_PATH", "CONFIG_PATH", "DATASET_PATH")
    environment = {
        **{name: value for name, value in os.environ.items() if "STAGELINE" not in name},
        **dict.fromkeys(names, NASTY),
        "WORDS": str(tmp_path / "words"),
    }
    done = subprocess.run(
        ["bash", str(root / "scripts" / recipe), "--output-dir", NASTY],
        cwd=root, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "words").read_text().split("\0")
    assert words[0].startswith(f"{root}/") and words[-3:] == ["--output-dir", NASTY, ""]
    made = [name for folder in (tmp_path, root) for name in os.listdir(folder)]
    assert [name for name in made if name.startswith("X")] == []


def test_h11_paths_are_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NASTY
    folder.mkdir()
    job = Job(folder)
    options = ("--total-steps", 1, "--save-steps", 1, "--lora.target", "q_proj")
    job.train(NASTY, *options, ranks=1)
    assert job.checkpoints(NASTY) == ["step-00000001"]
    job.train("again", "--config", folder / NASTY / "config.yaml", ranks=1)
    assert sorted(os.listdir(tmp_path)) == [NASTY]
    assert [name for name in os.listdir(folder) if name.startswith("X")] == []
