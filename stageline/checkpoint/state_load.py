"""Gives an optimizer back what a checkpoint knows of each parameter, however the model is cut now.

Values are found by the parameter's name. Rows of parameters that were shared out are put together,
or cut anew, as this run needs them.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from stageline.checkpoint.files import list_names, open_tensors
from stageline.checkpoint.state_share import WEIGHT, Rows
from stageline.errors import CheckpointError

STATE_FOLDER = "training_state"
STATE_FILE = "state.json"


class SavedState:
    """The training state of a checkpoint; reads a tensor when it is asked for.

    Args:
        folder: of the checkpoint, which is known to be whole.

    Attributes:
        facts: what the run noted besides: steps done, counters, options.

    Raises:
        CheckpointError: it holds weights alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / STATE_FOLDER
        path = self.folder / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds weights alone, {STATE_FOLDER}/{STATE_FILE} was expected beside "
                "them: without the optimizer's state a run does not go on as it would have. "
                "Resume from a folder checkpoints/step-...; to start anew from these weights give "
                "them as --model-path."
            )
        saved = json.loads(path.read_text())
        self.facts: dict[str, Any] = saved["facts"]
        self.index: dict[str, dict[str, Any]] = saved["parameters"]
        self.extras: dict[str, dict[str, Any]] = saved["extras"]
        self.optimizer: str | None = saved["optimizer"]

    def check_names(self, names: Iterable[str]) -> None:
        """Compares with the names that all ranks train now.

        Raises:
            CheckpointError: they are not those of this run.
        """
        names = set(names)
        missing, unknown = names - set(self.index), set(self.index) - names
        problems = []
        if missing:
            problems.append(f"lacks {len(missing)} that train now ({list_names(missing, 5)})")
        if unknown:
            problems.append(f"has {len(unknown)} that do not ({list_names(unknown, 5)})")
        if problems:
            raise CheckpointError(
                f"the state in {self.folder} {' and '.join(problems)}; the same parameters were "
                "expected: a moment without its weight is worth nothing. Resume with the model, "
                "--frozen-* and --*-lora-num of that run."
            )

    @torch.no_grad()
    def restore(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        *,
        rows: Mapping[str, Rows],
    ) -> None:
        """Fills this rank's parameters, if their values are here, and its optimizer's state.

        Raises:
            CheckpointError: another optimizer's state, or another shape.
        """
        if optimizer is None:
            return
        _check_optimizer(self.optimizer, optimizer, self.folder)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        with ExitStack() as stack:
            files = _Files(self.folder, stack)
            for name, parameter in parameters.items():
                group = groups[id(parameter)]
                state = self._values(name, parameter, rows.get(name), files, group)
                value = state.pop(WEIGHT, None)
                if value is not None:
                    parameter.copy_(value)
                if state:
                    optimizer.state[parameter] = state
                group.update(self.extras.get(name, {}))

    def _values(
        self,
        name: str,
        parameter: nn.Parameter,
        rows: Rows | None,
        files: "_Files",
        group: Mapping[str, Any],
    ) -> dict[str, Any]:
        entry = self.index[name]
        shape = rows.shape if rows is not None else tuple(parameter.shape)
        if tuple(entry["shape"]) != shape:
            raise CheckpointError(
                f"{self.folder} knows {name} with shape {entry['shape']}, {list(shape)} was "
                "expected: it is the state of another model. Resume with the model of that run."
            )
        values = {}
        for key, pieces in entry["values"].items():
            value = files.read(f"{key}/{name}", pieces, rows=rows, shape=shape)
            number = pieces[0].get("number")
            if number is not None:
                values[key] = value.item()
                continue
            # as torch: the count of steps stays on the host, unless a fused kernel reads it
            stays = key == "step" and not (group.get("fused") or group.get("capturable"))
            values[key] = value if stays else value.to(parameter.device)
        return values


class _Files:
    """The files of a state, each opened once."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.opened: dict[str, safe_open] = {}

    def read(
        self,
        key: str,
        pieces: list[dict[str, Any]],
        *,
        rows: Rows | None,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """A whole value, or the rows of it that are wanted."""
        if "start" in pieces[0]:
            first, count = (0, shape[0]) if rows is None else (rows.start, rows.count)
            return self._join(key, pieces, first, first + count)
        file = self._open(pieces[0])
        value = file.get_slice(key)
        if rows is not None and tuple(value.get_shape()) == shape:
            return value[rows.start : rows.start + rows.count]
        return file.get_tensor(key)

    def _join(self, key: str, pieces: list[dict[str, Any]], first: int, end: int) -> torch.Tensor:
        parts = []
        for piece in sorted(pieces, key=lambda piece: piece["start"]):
            start = max(first, piece["start"])
            stop = min(end, piece["start"] + piece["rows"])
            if start < stop:
                values = self._open(piece).get_slice(key)
                parts.append(values[start - piece["start"] : stop - piece["start"]])
        if parts:
            return torch.cat(parts)
        return self._open(pieces[0]).get_slice(key)[:0]

    def _open(self, piece: Mapping[str, Any]) -> safe_open:
        name = piece["file"]
        if name not in self.opened:
            self.opened[name] = self.stack.enter_context(open_tensors(self.folder / name))
        return self.opened[name]


def _check_optimizer(saved: str | None, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    here = type(optimizer).__name__
    if saved is not None and saved != here:
        raise CheckpointError(
            f"{folder} holds the state of {saved}, that of {here} was expected: one cannot go on "
            "with the moments of the other. Resume with the --optimizer of that run."
        )
