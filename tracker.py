"""The tracker parts: services that show a run beside its own log.

A part is called once, on the rank that logs, as `part(folder=..., config=..., start_step=...,
**options)`, and returns an object with `log(kind, step, figures)` and `close()`; or None. `kind` is
"train" or "eval", figures are numbers by name. A tracker that fails is told of once and then left
alone: it never ends a run. TensorBoard events are always written, without a tracker.
"""

import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from register import tracker_register
from stageline.errors import UserError


class Tracker(Protocol):
    """What a tracker part returns."""

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Takes the figures of one step or evaluation."""

    def close(self) -> None:
        """Ends the run there."""


@tracker_register("none")
def none(*, folder: Path, config: Mapping[str, Any], start_step: int) -> None:
    """The run's own log and TensorBoard events alone."""


@tracker_register("wandb")
class WandB:
    """Weights & Biases; `wandb login` first, or --tracker.mode offline.

    Args:
        project: of the service.
        name: of the run; default: its folder.
        mode: offline keeps everything in the run folder, for `wandb sync`.
    """

    def __init__(
        self,
        *,
        folder: Path,
        config: Mapping[str, Any],
        start_step: int,
        project: str = "stageline",
        name: str | None = None,
        mode: str = "online",
    ) -> None:
        self._run = _package("wandb").init(
            project=project,
            name=name or folder.name,
            id=_run_id(folder),  # a run that is resumed goes on in the same curves
            resume="allow",
            config=dict(config),
            dir=str(folder),
            mode=mode,
        )

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(_prefixed(kind, figures), step=step)

    def close(self) -> None:
        self._run.finish()


@tracker_register("swanlab")
class SwanLab:
    """SwanLab; `swanlab login` first, or --tracker.mode local.

    Args:
        project: of the service.
        name: of the run; default: its folder.
        mode: cloud, local or offline (files in the run folder, for `swanlab sync`).
    """

    def __init__(
        self,
        *,
        folder: Path,
        config: Mapping[str, Any],
        start_step: int,
        project: str = "stageline",
        name: str | None = None,
        mode: str = "cloud",
    ) -> None:
        self._package = _package("swanlab")
        self._package.init(
            project=project,
            experiment_name=name or folder.name,
            config=dict(config),
            logdir=str(folder / "swanlab"),
            mode=mode,
        )

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        self._package.log(_prefixed(kind, figures), step=step)

    def close(self) -> None:
        self._package.finish()


@tracker_register("mlflow")
class MLflow:
    """MLflow, at MLFLOW_TRACKING_URI or in the run folder.

    Args:
        experiment: that the run belongs to.
        name: of the run; default: its folder.
        uri: of the tracking server; default: MLFLOW_TRACKING_URI, else mlflow.db in the run folder.
    """

    def __init__(
        self,
        *,
        folder: Path,
        config: Mapping[str, Any],
        start_step: int,
        experiment: str = "stageline",
        name: str | None = None,
        uri: str | None = None,
    ) -> None:
        self._package = _package("mlflow")
        if uri or "MLFLOW_TRACKING_URI" not in os.environ:
            self._package.set_tracking_uri(uri or f"sqlite:///{folder.absolute() / 'mlflow.db'}")
        self._package.set_experiment(experiment)
        self._package.start_run(run_name=name or folder.name)
        # its values have at most 6,000 characters, one call at most 100 of them
        told = [(key, str(value)[:500]) for key, value in config.items() if value is not None]
        for start in range(0, len(told), 100):
            self._package.log_params(dict(told[start : start + 100]))

    def log(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        self._package.log_metrics(_prefixed(kind, figures), step=step)

    def close(self) -> None:
        self._package.end_run()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"--tracker {name} needs the package {name}, which cannot be imported ({error}). It "
            f"talks to the service: pip install {name}, or leave --tracker out; the log and "
            "TensorBoard events are in the run folder all the same."
        ) from error


def _prefixed(kind: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{kind}/{name}": value for name, value in figures.items()}


def _run_id(folder: Path) -> str:
    """The same for a folder each time, and another for each folder."""
    return hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
