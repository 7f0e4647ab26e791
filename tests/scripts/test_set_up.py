"""The set-up of `.venv` by purpose: what is installed when, with stand-ins for pip and uv."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCK = dict(
    line.split("==")
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if not line.startswith("#")
)
UNLOCKED = {"vllm", "icu"}  # they bring builds of their own
# answers for the python that makes .venv and for the one in it; notes what pip is told
PYTHON = """#!/usr/bin/env bash
case "$*" in
-c*) exit 0 ;;
-) [ -n "${{HAS_TORCH:-}}" ] && exit 0 || exit 1 ;;
"-m venv"*) venv="${{!#}}"; mkdir -p "$venv/bin"; cp "$0" "$venv/bin/python"; echo "$*" >>"{log}" ;;
"-m pip"*)
    sleep "${{SLOW:-0}}"
    echo "$*" >>"{log}"
    [[ "$*" != *"${{FAILS_AT:-nothing}}"* ]] ;;
*) exec "{python}" "$@" ;;
esac
"""


class Machine:
    """A copy of what the set-up reads, and stand-ins that write down what they are told."""

    def __init__(self, folder):
        self.root, self.log = folder / "repo", folder / "log"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("requirements.lock", "pyproject.toml", "scripts/_env.sh", "scripts/setup.sh"):
            shutil.copy(ROOT / name, self.root / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add("base", PYTHON.format(log=self.log, python=sys.executable))

    def add(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *purposes, **environment):
        kept = {name: value for name, value in os.environ.items() if "STAGELINE" not in name}
        path = f"{self.bin}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(self.root / "scripts/setup.sh"), *purposes],
            env={**kept, "STAGELINE_PYTHON": str(self.bin / "base"), "PATH": path, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def set_up(self, *purposes, code=0, **environment):
        """Return the calls of pip, uv and venv in one set-up, and what it said."""
        self.log.write_text("")
        running = self.start(*purposes, **environment)
        out, err = running.communicate(timeout=60)
        assert running.returncode == code, out + err
        return self.log.read_text().splitlines(), err

    def needs(self):
        return names((self.root / ".venv/needs.txt").read_text().splitlines())


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def names(requirements):
    return {Requirement(line).name for line in requirements}


def test_training_installs_what_training_needs_and_a_second_use_nothing(machine):
    calls, said = machine.set_up()
    assert "-m venv" in calls[0] and "torch==2.13.0" in calls[1]
    assert machine.needs() == names(PROJECT["dependencies"]) - {"torch"}
    assert "pytest" not in machine.needs() and "fastapi" not in machine.needs()
    assert f"--constraint {machine.root}/requirements.lock" in calls[3]
    assert machine.set_up() == ([], "")


def test_a_purpose_adds_what_is_missing_and_makes_nothing_again(machine):
    machine.set_up()
    calls, said = machine.set_up("serve")
    assert len(calls) == 1 and "venv" not in calls[0].split()[1] and "adding" in said
    wanted = names([*PROJECT["dependencies"], *EXTRAS["serve"]]) - {"torch"}
    assert machine.needs() == wanted
    assert machine.set_up("serve") == ([], "") and machine.set_up() == ([], "")
    assert len(machine.set_up("serve", "remote")[0]) == 1


def test_a_changed_list_makes_it_again(machine):
    machine.set_up("serve")
    stale = machine.root / ".venv/stale"
    stale.touch()
    file = machine.root / "pyproject.toml"
    file.write_text(file.read_text().replace("numpy", "numpy2", 1))
    calls, _ = machine.set_up()
    assert "-m venv" in calls[0] and not stale.exists()
    assert len(machine.set_up("serve")[0]) == 1  # the purpose is added again


def test_an_interrupted_set_up_starts_again(machine):
    machine.set_up(FAILS_AT="needs.txt", code=1)
    calls, _ = machine.set_up()
    assert "-m venv" in calls[0] and machine.set_up()[0] == []


def test_uv_installs_all_but_torch_where_it_is_there(machine):
    machine.add(
        "uv", f'#!/usr/bin/env bash\necho "uv $*" >>"{machine.log}"\nexit ${{UV_CODE:-0}}\n'
    )
    calls, _ = machine.set_up("serve")
    told = [call for call in calls if call.startswith("uv")]
    assert len(told) == 1 and f"--python {machine.root}/.venv/bin/python" in told[0]
    assert f"--override {machine.root}/.venv/no-torch.txt" in told[0]
    never = Requirement((machine.root / ".venv/no-torch.txt").read_text().strip())
    assert never.name == "torch" and not never.marker.evaluate()
    assert any("pip install" in call and "torch==2.13.0" in call for call in calls)
    calls, said = machine.set_up("remote", UV_CODE="1")
    assert "pip tries" in said and "-m pip" in calls[1] and "needs.txt" in calls[1]


def test_an_unknown_purpose_is_refused_before_anything_is_made(machine):
    calls, said = machine.set_up("servr", code=2)
    assert calls == [] and "servr" in said and "serve" in said and "quantization" in said
    assert not (machine.root / ".venv").exists()


@pytest.mark.parametrize("purpose", [None, *sorted(set(EXTRAS) - UNLOCKED)])
def test_the_lock_has_a_version_of_all_that_a_purpose_brings(purpose):
    waiting = [Requirement(line) for line in EXTRAS.get(purpose, PROJECT["dependencies"])]
    seen = set()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        key = (name, *sorted(need.extras))
        # torch comes first, with packages of its own, and limits setuptools
        if (
            name in ("torch", "setuptools")
            or key in seen
            or (need.marker and not need.marker.evaluate({"extra": ""}))
        ):
            continue
        seen.add(key)
        assert name in LOCK, f"requirements.lock has no {name}"
        assert need.specifier.contains(LOCK[name]), f"{need} came, and the lock has {LOCK[name]}"
        try:
            brought = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed here
        for line in map(Requirement, brought):
            marks = [{"extra": extra} for extra in (*need.extras, "")]
            if line.marker is None or any(line.marker.evaluate(mark) for mark in marks):
                line.marker = None
                waiting.append(line)
