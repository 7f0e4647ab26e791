"""The command `stageline runs`: a table and a plot of runs, and the runs of a sweep."""

import fcntl
import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from commands import runs
from stageline.checkpoint.resume import LOCK_FILE, is_claimed
from stageline.errors import UserError


def write_run(folder, *, losses, held_out=(), total=3, **config):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"total-steps": total, "output-dir": str(folder), **config})
    )
    lines = [
        {"kind": "train", "step": step, "loss": loss, "seconds": 2.5}
        for step, loss in enumerate(losses, 1)
    ]
    lines += [
        {"kind": "eval", "step": step, "loss": loss, "token_accuracy": 1 - loss}
        for step, loss in held_out
    ]
    lines.sort(key=lambda line: line["step"])  # an evaluation comes behind its step
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def call(monkeypatch, *words):
    monkeypatch.setattr(runs, "command_words", lambda: list(map(str, words)))
    return runs.main()


def test_a_table_says_what_differs_and_how_far_runs_came(tmp_path, monkeypatch, capsys):
    same = {"seed": 0, "batch-size": 8}
    write_run(tmp_path / "a10", losses=[3.0], learning_rate=1e-3, **same)
    done = {"losses": [3.0, 2.0, 1.5], "held_out": [(1, 0.9), (2, 0.4), (3, 0.5)]}
    write_run(tmp_path / "a9", learning_rate=1e-4, **done, **same)
    write_run(tmp_path / "deep" / "b", losses=[], learning_rate=1e-4, **same)
    (tmp_path / "deep" / "b" / "failure.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("of: another program")
    assert call(monkeypatch, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        "run learning_rate state loss best held-out loss at step seconds".split(),
        "a9 0.0001 done 1.5000 0.4000 2 8".split(),
        "a10 0.001 1 of 3 steps 3.0000 - - 2".split(),
        "deep/b 0.0001 0 of 3 steps, failed - - - 0".split(),
    ]
    assert (tmp_path / "runs.png").stat().st_size > 1000
    assert call(monkeypatch, tmp_path, "--metric", "token_accuracy") == 0
    assert "0.6000" in capsys.readouterr().out, "the highest one"
    with pytest.raises(UserError, match="--metric bleu .* Choose one of loss, token_accuracy"):
        call(monkeypatch, tmp_path, "--metric", "bleu")
    with pytest.raises(UserError, match="has no runs"):
        call(monkeypatch, tmp_path / "deep" / "b")


def test_a_run_that_goes_on_is_told(tmp_path):
    write_run(tmp_path / "a", losses=[1.0])
    assert not is_claimed(tmp_path / "a")
    with (tmp_path / "a" / LOCK_FILE).open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        pid = os.fork()  # the locks are those of a process
        if pid == 0:
            os._exit(runs.read_run(tmp_path / "a")["state"] == "1 of 3 steps, running")
        assert os.waitpid(pid, 0)[1] >> 8 == 1
    assert not is_claimed(tmp_path / "a")


def test_a_sweep_has_all_combinations():
    made = runs.combinations(["lr=1e-4,1e-3", "loss_fn.smoothing=0", "model_path=a/b,c"])
    assert list(made) == [
        f"lr={rate},loss_fn.smoothing=0,model_path={path}"
        for rate in ("1e-4", "1e-3")
        for path in ("a-b", "c")
    ]
    assert list(made.values())[1] == [
        *("--learning-rate=1e-4", "--loss-fn.smoothing=0", "--model-path=c")
    ]
    for words in (["seed"], ["seed="], ["seed=0,,1"], ["seed=0,0"]):
        with pytest.raises(UserError, match="--sweep seed"):
            runs.combinations(words)


def test_a_sweep_trains_what_is_not_done(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "seed=0", losses=[1.0, 1.0, 1.0], seed=0)
    write_run(tmp_path / "seed=1", losses=[1.0], seed=1)
    (tmp_path / "seed=1" / "checkpoints" / "step-00000001").mkdir(parents=True)
    codes = {"1": 0, "2": 6, "3": 2}
    started = []

    def start(command):
        started.append(command[2:])
        return SimpleNamespace(returncode=codes[command[-1 - resumes(command)][-1]])

    def resumes(command):
        return command[-1] == "--resume=auto"

    monkeypatch.setattr(subprocess, "run", start)
    job = ["job.yaml", "total_steps=3", "--fp16"]
    sweep = [tmp_path, "--sweep", "seed=0,1,2", "--", *job]
    assert call(monkeypatch, *sweep) == 6
    words = ["--config", "job.yaml", "--total-steps=3", "--fp16"]
    assert started == [
        [*words, "--seed=1", f"--output-dir={tmp_path / 'seed=1'}", "--resume=auto"],
        [*words, "--seed=2", f"--output-dir={tmp_path / 'seed=2'}"],
    ]
    assert "run 1 of 3: seed=0 is done" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, tmp_path, "--sweep", "seed=3,2", "--", *job)
    for words in (["--sweep", "seed=1"], ["--", "job.yaml"]):
        with pytest.raises(UserError, match="belong together"):
            call(monkeypatch, tmp_path, *words)
