"""What an optimizer knows of each parameter, as tensors by the parameter's name.

Each rank writes one safetensors file with the names `<what>/<parameter>`, such as
`exp_avg/model.layers.0.mlp.up_proj.weight`; of a parameter that is shared out among replicas it
writes its rows. Nothing depends on which stage or rank a parameter was on. No pickled objects.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stageline.checkpoint.files import write_tensors
from stageline.checkpoint.host_copies import HostCopies
from stageline.errors import UserError

WEIGHT = "weight"  # a parameter's own value, where the files of weights do not hold it to the bit
# numbers that an optimizer keeps beside its tensors
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class Rows:
    """Which rows of a parameter a rank holds: `count` from `start` on, of a whole of `shape`."""

    start: int
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateShare:
    """What one rank saves besides weights.

    Attributes:
        tensors: by name in the file.
        index: parameter -> its whole shape and, for each value, which piece of it this is.
        extras: parameter -> settings that its optimizer group got during training.
    """

    tensors: dict[str, torch.Tensor]
    index: dict[str, dict[str, Any]]
    extras: dict[str, dict[str, Any]]

    def write(self, path: Path) -> dict[str, dict[str, Any]]:
        """Writes the file, if there is anything; returns the index with its name in it."""
        if self.tensors:
            write_tensors(self.tensors, path)
        for entry in self.index.values():
            for piece in entry["values"].values():
                piece["file"] = path.name
        return self.index


def state_share(
    optimizer: torch.optim.Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    *,
    rows: Mapping[str, Rows],
    left_out: Collection[str],
    is_first: bool,
    with_weights: bool,
    copies: HostCopies | None,
) -> StateShare:
    """Collects what this rank saves.

    Args:
        parameters: those that the optimizer updates, by name.
        rows: of parameters of which this rank holds a share.
        left_out: names that another stage saves.
        is_first: of the replicas; others save their rows of shares alone.
        with_weights: the parameters themselves too.
        copies: on the host and apart from training, which may go on; None: the tensors themselves.

    Raises:
        UserError: the optimizer keeps something that is neither tensor nor number.
    """
    share = StateShare({}, {}, {})
    places: set[int] = set()
    extras = {} if optimizer is None else _group_extras(optimizer)
    for name, parameter in parameters.items():
        if name in left_out or not (is_first or name in rows):
            continue
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        values = {key: _as_tensor(key, value, optimizer) for key, value in state.items()}
        if with_weights:
            values[WEIGHT] = (parameter.detach(), None)
        shape = rows[name].shape if name in rows else tuple(parameter.shape)
        entry: dict[str, Any] = {"shape": list(shape), "values": {}}
        for key, (tensor, number) in values.items():
            if tensor is None:
                continue
            piece = _piece(tensor, parameter, rows.get(name), key)
            if not piece and not is_first:
                continue
            entry["values"][key] = {**piece, **({"number": number} if number else {})}
            full_name = f"{key}/{name}"
            if copies is None and tensor.data_ptr() in places:
                tensor = tensor.clone()  # a table that several parameters share: files have it each
            places.add(tensor.data_ptr())
            share.tensors[full_name] = copies.copy(full_name, tensor) if copies else tensor.cpu()
        share.index[name] = entry
        if extras.get(id(parameter)):
            share.extras[name] = extras[id(parameter)]
    return share


def _as_tensor(
    key: str, value: object, optimizer: torch.optim.Optimizer
) -> tuple[torch.Tensor | None, str | None]:
    """A value as a tensor, and the name of its type if it was a number."""
    if value is None:
        return None, None
    if isinstance(value, torch.Tensor):
        return value.detach(), None
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=_NUMBERS[type(value)]), type(value).__name__
    raise UserError(
        f"the optimizer {type(optimizer).__name__} keeps {key} as {type(value).__name__}, tensors "
        "and numbers were expected: others cannot be saved without pickled code. Use another "
        "--optimizer."
    )


def _piece(
    tensor: torch.Tensor, parameter: nn.Parameter, rows: Rows | None, key: str
) -> dict[str, Any]:
    """Where a value belongs: rows of a share, or all of it."""
    if rows is None:
        return {}
    if tensor.shape == parameter.shape:
        return {"start": rows.start, "rows": rows.count}
    if tensor.numel() == 1:
        return {}  # a count, the same for all rows
    raise UserError(
        f"the optimizer keeps {key} of shape {list(tensor.shape)} for a share of shape "
        f"{list(parameter.shape)}, the same shape was expected: otherwise it cannot be shared out "
        "anew. Leave --dp-shard out or use another --optimizer."
    )


def _group_extras(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """id of a parameter -> what its group holds beyond the optimizer's own settings."""
    # lr_scale is a setting of the run: resumed with another one, that one counts
    known = {"params", "lr", "lr_scale", "param_names", *optimizer.defaults}
    extras = {}
    for group in optimizer.param_groups:
        more = {
            key: value
            for key, value in group.items()
            if key not in known and isinstance(value, bool | int | float | str)
        }
        extras |= {id(parameter): more for parameter in group["params"]}
    return extras
