"""The `stageline` command: its list, its rewriting of words, and runs equal to those by file."""

import importlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from commands import command_line
from commands.command_line import COMMANDS, find_command, overview, rewritten
from options.command_line import command_words
from stageline.distributed import failure
from stageline.errors import UserError
from tests.helpers.small_run import Job
from tests.helpers.warm_start import WarmLauncher

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def stageline(*words, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "stageline", *map(str, words)],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], []),
        (["run.yaml", "--total-steps", "5"], ["--config", "run.yaml", "--total-steps", "5"]),
        (["learning_rate=1e-4"], ["--learning-rate=1e-4"]),
        (["r.yaml", "dataset.test_size=0.2"], ["--config", "r.yaml", "--dataset.test_size=0.2"]),
        (["model_path=/a b/x=y.yaml"], ["--model-path=/a b/x=y.yaml"]),
        (["parts.vit.frozen=true", "model_path="], ["--parts.vit.frozen=true", "--model-path="]),
        (["--lora.target", "a=b", "c.yaml"], ["--lora.target", "a=b", "c.yaml"]),
    ],
)
def test_words_in_front_become_options(words, wanted):
    assert rewritten(words) == wanted


def test_a_word_that_is_neither_file_nor_assignment_is_refused():
    for words in (["run.txt"], ["=1"], ["r.yaml", "5"]):
        with pytest.raises(UserError, match="belongs to no option. Put"):
            rewritten(words)


def test_commands_are_listed_and_others_refused(tmp_path):
    for name, command in COMMANDS.items():
        assert f"\n  {name} " in overview()
        assert (ROOT / "commands" / f"{command.module}.py").is_file()
        assert not command.door or (ROOT / command.door).is_file()
    with pytest.raises(UserError, match="'evla' is not a command of stageline. Did you mean eval"):
        find_command("evla")
    package = tmp_path / "stageline"
    package.mkdir()
    (package / "__main__.py").write_bytes((ROOT / "stageline" / "__main__.py").read_bytes())
    done = subprocess.run([sys.executable, package / "__main__.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the folder commands is not next to it" in done.stderr and "--editable" in done.stderr


def test_the_list_loads_no_torch_and_the_script_is_declared(tmp_path):
    code = (
        "import sys; sys.argv = ['stageline', '--help']\n"
        "from commands.command_line import main\n"
        "code = main()\n"
        "big = {'torch', 'transformers', 'yaml', 'numpy', 'register'} & set(sys.modules)\n"
        "sys.exit(code or (str(big) if big else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == overview()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"stageline": "stageline.__main__:main"}


WORDS = ['it\'s "so"', "two\nlines; $HOME", "", "--a=b c"]


def test_env_names_versions(tmp_path):
    done = stageline("env", cwd=tmp_path)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert lines["python"] == sys.version.split()[0]
    assert {"torch", "transformers", "datasets", "accelerator", "cores", "memory"} <= set(lines)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("train", [str(ROOT / "train_pp.py")]),
        ("infer", [str(ROOT / "stageline" / "__main__.py"), "infer"]),
    ],
)
def test_workers_are_started_with_the_words_of_the_command(name, told, monkeypatch):
    """Arguments with spaces and quotes reach it whole; its exit code is the command's."""
    seen = []

    def look():
        seen.append((list(sys.argv), command_words()))
        return 3

    monkeypatch.setattr(importlib.import_module(f"commands.{COMMANDS[name].module}"), "main", look)
    monkeypatch.setattr(failure, "run_entry", lambda main: sys.exit(main()))
    monkeypatch.setattr(command_line, "rewritten", list)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/stageline", name, *WORDS])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 3
    assert seen == [([*told, *WORDS], WORDS)]


def test_a_run_of_two_processes_and_ctrl_c_that_leaves_none(tmp_path, monkeypatch):
    """A config file and overrides, from a folder of one's own; all ranks save and end."""
    job = Job(tmp_path / "it's a job")
    words = job.command("by_file", "--num-stages", 2, "--warmup-steps", 0)[2:]
    config = dict(zip((word[2:] for word in words[::2]), words[1::2], strict=True))
    (job.folder / "run.yaml").write_text(yaml.safe_dump(config))
    name = 'a "b" c'
    monkeypatch.chdir(job.folder)
    process = WarmLauncher(
        ["-m", "stageline", "train", "run.yaml", "total_steps=100000",
         "dataset.test_size=4", f"output_dir={name}"],
        {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    log = job.folder / name / "log.jsonl"
    try:
        wait_for(lambda: log.exists() and '"train"' in log.read_text(), process, seconds=200)
        family = [process.pid, *children_of(process.pid)]
        assert len(family) >= 3, "the command, and a process a stage"
        os.killpg(process.pid, signal.SIGINT)
        ended = process.finish(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert ended.code == 130, ended.err
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    saved = yaml.safe_load((job.folder / name / "config.yaml").read_text())
    assert saved["total-steps"] == 100000 and saved["dataset.test_size"] == 4
    assert len(job.checkpoints(name)) > 0


def children_of(parent):
    """Return the processes that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == parent:
            found.append(int(path.parent.name))
    return found


def wait_for(is_so, process, *, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert process.poll() is None, process.finish().err
        assert time.monotonic() < deadline
        time.sleep(0.1)
