"""Trackers get what the log gets; one that fails, or is missing, is reported once."""

import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from stageline.errors import UserError
from stageline.training.run_log import RunLog, StepRecord
from tracker import mlflow, swanlab, wandb

RECORD = StepRecord(
    step=1, loss=2.0, learning_rate=0.1, grad_norm=math.inf, num_tokens=8, num_targets=4,
    num_samples=2, seconds=0.5, peak_memory_bytes=(3, 4),
)  # fmt: skip


class Notes:
    """A module that records every call by its dotted name."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


def service(monkeypatch, name):
    notes = Notes()
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: getattr(notes, attribute)
    monkeypatch.setitem(sys.modules, name, module)
    return notes


@pytest.mark.parametrize(("part", "name"), [(wandb, "wandb"), (swanlab, "swanlab")])
def test_a_service_gets_the_run_and_its_figures(part, name, tmp_path, monkeypatch):
    notes = service(monkeypatch, name)
    tracker = part(folder=tmp_path / "r1", config={"seed": 3}, start_step=0, project="p")
    log = RunLog(tmp_path / "r1", total_steps=2, tracker=tracker)
    log.log_step(RECORD)
    log.log_eval(1, {"loss": 1.5})
    log.close()
    (start, _, how), *logs, (end, _, _) = notes.calls
    assert (start, end, how["config"], how["project"]) == ("init", "finish", {"seed": 3}, "p")
    (_, (train,), at), (_, (held_out,), _) = logs
    assert at == {"step": 1} and held_out == {"eval/loss": 1.5}
    assert train["train/loss"] == 2.0 and train["train/peak_memory_bytes/rank_1"] == 4
    assert "train/grad_norm" not in train, "inf is no number for a service"


def test_a_resumed_run_has_the_same_name_and_another_folder_another(tmp_path, monkeypatch):
    notes = service(monkeypatch, "wandb")
    for folder in ("a", "a", "b"):
        wandb(folder=tmp_path / folder, config={}, start_step=0)
    one, again, other = (how["id"] for _, _, how in notes.calls)
    assert one == again != other


def test_mlflow_gets_parameters_in_portions(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    notes = service(monkeypatch, "mlflow")
    tracker = mlflow(
        folder=tmp_path, config={**{f"o{i}": i for i in range(150)}, "none": None}, start_step=0
    )
    tracker.log("train", 3, {"loss": 1.0})
    tracker.close()
    portions = [args[0] for name, args, _ in notes.calls if name == "log_params"]
    assert [len(portion) for portion in portions] == [100, 50]
    assert ("log_metrics", ({"train/loss": 1.0},), {"step": 3}) in notes.calls
    assert notes.calls[0][0] == "set_tracking_uri" and notes.calls[-1][0] == "end_run"


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(UserError, match="pip install swanlab"):
        swanlab(folder=tmp_path, config={}, start_step=0)


def test_a_tracker_that_fails_is_told_of_once_and_ends_nothing(tmp_path, capsys):
    def fail(*args):
        raise ConnectionError("no route")

    log = RunLog(tmp_path, total_steps=2, tracker=SimpleNamespace(log=fail, close=fail))
    log.log_eval(1, {"loss": 1.5})
    log.log_eval(2, {"loss": 1.4})
    log.close()
    assert capsys.readouterr().out.count("ConnectionError: no route") == 1
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [1.5, 1.4]
