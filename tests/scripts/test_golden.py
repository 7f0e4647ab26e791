"""Interfaces of scripts: option names, keys, and exit code and a word of bad commands.

`STAGELINE_BLESS=1 bash scripts/test.sh tests/scripts/test_golden.py` updates names.txt.
"""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from commands import run_configs, train
from options.fields import option_fields
from register import ALL_REGISTERS, import_shelf
from tests.helpers.forked_entry import run_entry

import_shelf()  # here: what a test registers is taken back behind it
assert train.pipeline  # importing it registered the engines
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
OF_STAGELINE = {"infer.py": "infer", "chat.py": "chat", "check_model.py": "check"}
OF_STAGELINE |= {"lm_eval_run.py": "lm-eval"}


def names():
    """Option names by class of options, and keys by register."""
    found = {config.__name__: list(option_fields(config)) for config in run_configs()}
    found |= {
        f"{name} register": list(register)
        for name, register in ALL_REGISTERS.items()
        if len(register)
    }
    return "".join(f"{name}: {' '.join(sorted(found[name]))}\n" for name in sorted(found))


def test_options_and_keys_have_the_names_they_had():
    path = GOLDEN / "names.txt"
    if os.environ.get("STAGELINE_BLESS") == "1":
        path.write_text(names())
    assert names() == path.read_text(), "meant? STAGELINE_BLESS=1 updates them"


def test_there_are_at_most_160_options():
    """A mapping counts once, as does an option that several commands have."""
    classes = [line for line in names().splitlines() if " register: " not in line]
    options = {one.partition(".")[0] for line in classes for one in line.split()[1:]}
    assert len(options - {"help"}) <= 160


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Return the files that the bad command lines name."""
    folder = tmp_path_factory.mktemp("inputs") / "files"
    shutil.copytree(GOLDEN / "inputs", folder)
    rows = [json.dumps({"id": str(i), "question": f"{i}?", "answer": f"{i}!"}) for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    rows[16] = rows[16][:-5]
    (folder / "torn.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "parts.py").write_text("import register\n\nnot_defined\n")
    from tests.helpers.tiny_models import tiny_tokenizer

    tiny_tokenizer().save_pretrained(folder / "text-model")
    return folder


def test_a_bad_command_ends_with_its_code_and_says_why(inputs, tmp_path):
    lines = (GOLDEN / "errors.txt").read_text().splitlines()
    failed = []
    for number, line in enumerate(line for line in lines if not line.startswith("#")):
        code, word, command = line.split(" | ", 2)
        folder = shutil.copytree(inputs, tmp_path / str(number))  # others leave runs behind
        first, *others = shlex.split(command.replace("TRAIN", "train_pp.py --config train.yaml"))
        if first in OF_STAGELINE:
            others = ["stageline", OF_STAGELINE[first], *others]
        entry = "-m" if first in (*OF_STAGELINE, "-m") else ROOT / first
        done = run_entry([entry, *others], cwd=folder)
        if done.returncode != int(code) or word not in done.stderr or "Traceback" in done.stderr:
            failed.append(f"{line}: {done.returncode}\n{done.stderr}")
    assert not failed, "\n".join(failed)
