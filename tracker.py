"""The tracker components: services that show a run in addition to its own log.

A component is called once, on the rank that logs, as `part(folder=..., config=..., start_step=...,
**options)`, and returns an object with `log(kind, step, figures)` and `close()`; or None. `kind` is
"train" or "eval", figures are numbers by name. A tracker that fails is reported once
and not called again; it never ends a run. TensorBoard events are always written, without one.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from register import tracker_register
from stageline.errors import package


@dataclass(frozen=True)
class Service:
    """An opened tracker: the functions of its package that send figures and end the run."""

    send: Callable[..., Any]
    end: Callable[[], Any]

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Send the figures of one step or evaluation."""
        self.send({f"{kind}/{name}": value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        """End the run at the service."""
        self.end()


@tracker_register("none")
def none(*, folder: Path, config: Mapping[str, Any], start_step: int) -> None:
    """Only the run's own log and TensorBoard events."""


@tracker_register("wandb")
def wandb(
    *,
    folder: Path,
    config: Mapping[str, Any],
    start_step: int,
    project: str = "stageline",
    name: str | None = None,
    mode: str = "online",
) -> Service:
    """Weights & Biases; `wandb login` first, or --tracker.mode offline.

    Args:
        project: project at the service.
        name: name of the run; default: its folder's.
        mode: online, or offline = keep everything in the run folder for `wandb sync`.
    """
    # one id for each folder, so that a resumed run continues the same curves
    run_id = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    run = _package("wandb").init(
        project=project,
        name=name or folder.name,
        id=run_id,
        resume="allow",
        config=dict(config),
        dir=str(folder),
        mode=mode,
    )
    return Service(run.log, run.finish)


@tracker_register("swanlab")
def swanlab(
    *,
    folder: Path,
    config: Mapping[str, Any],
    start_step: int,
    project: str = "stageline",
    name: str | None = None,
    mode: str = "cloud",
) -> Service:
    """SwanLab; `swanlab login` first, or --tracker.mode local.

    Args:
        project: project at the service.
        name: name of the run; default: its folder's.
        mode: cloud, local or offline (files in the run folder, for `swanlab sync`).
    """
    service = _package("swanlab")
    service.init(
        project=project,
        experiment_name=name or folder.name,
        config=dict(config),
        logdir=str(folder / "swanlab"),
        mode=mode,
    )
    return Service(service.log, service.finish)


@tracker_register("mlflow")
def mlflow(
    *,
    folder: Path,
    config: Mapping[str, Any],
    start_step: int,
    experiment: str = "stageline",
    name: str | None = None,
    uri: str | None = None,
) -> Service:
    """MLflow, at MLFLOW_TRACKING_URI or in the run folder.

    Args:
        experiment: that the run belongs to.
        name: name of the run; default: its folder's.
        uri: of the tracking server; default: MLFLOW_TRACKING_URI, else mlflow.db in the run folder.
    """
    service = _package("mlflow")
    if uri or "MLFLOW_TRACKING_URI" not in os.environ:
        service.set_tracking_uri(uri or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
    service.set_experiment(experiment)
    service.start_run(run_name=name or folder.name)
    # its values have at most 6,000 characters, one call at most 100 of them
    told = [(key, str(value)[:500]) for key, value in config.items() if value is not None]
    for start in range(0, len(told), 100):
        service.log_params(dict(told[start : start + 100]))
    return Service(service.log_metrics, service.end_run)


def _package(name: str) -> Any:
    other = "leave --tracker out: the log and TensorBoard events are in the run folder all the same"
    return package(name, f"--tracker {name}", instead=other)
