"""Save and restore the state of an optimizer, as tensors by the parameter's name.

Each rank writes one safetensors file with the names `<what>/<parameter>`, such as
`exp_avg/model.layers.0.mlp.up_proj.weight`; of a parameter that is shared out among replicas it
writes its rows. Nothing depends on which stage or rank a parameter was on. No pickled objects.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from stageline.checkpoint.files import inside, list_names, open_tensors, write_tensors
from stageline.checkpoint.shards import HostCopies
from stageline.errors import CheckpointError, UserError
from stageline.model_folder import read_json

WEIGHT = "weight"  # a parameter's own value, where the files of weights do not hold it to the bit
# an optimizer keeps such numbers next to its tensors
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class RowRange:
    """Rows of a parameter that a rank holds: `count` from `start`, of a whole of `shape`."""

    start: int
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StateShare:
    """Optimizer state that one rank saves.

    Attributes:
        tensors: by name in the file.
        index: parameter -> its whole shape and, for each value, which piece of it this is.
        extras: parameter -> settings that its optimizer group got during training.
    """

    tensors: dict[str, torch.Tensor]
    index: dict[str, dict[str, Any]]
    extras: dict[str, dict[str, Any]]

    def write(self, path: Path) -> dict[str, dict[str, Any]]:
        """Write the file, if there is anything; return the index with its name in it."""
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
    begun: Mapping[int, Mapping[str, Any]],
    rows: Mapping[str, RowRange],
    left_out: Collection[str],
    is_first: bool,
    with_weights: bool,
    copies: HostCopies | None,
) -> StateShare:
    """Collect what this rank saves.

    Args:
        parameters: those that the optimizer updates, by name.
        begun: result of `group_values` when the optimizer was made.
        rows: of parameters of which this rank holds a share.
        left_out: names that another stage saves.
        is_first: of the replicas; others save only their rows of shares.
        with_weights: the parameters themselves too.
        copies: host memory for copies, so that training may continue; None: no copies are made.

    Raises:
        UserError: the optimizer keeps something that is neither tensor nor number, or apart from
            its parameters.
    """
    share = StateShare({}, {}, {})
    places: set[int] = set()
    extras = {} if optimizer is None else _group_extras(optimizer, begun)
    known = set(map(id, parameters.values()))
    for key in () if optimizer is None else optimizer.state:
        if id(key) not in known:
            raise _cannot_save(optimizer, f"{key!s:.40}", "something of no parameter")
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
    key: str, value: object, optimizer: torch.optim.Optimizer | None
) -> tuple[torch.Tensor | None, str | None]:
    """A value as a tensor, and the name of its type if it was a number."""
    if value is None or isinstance(value, torch.Tensor):
        return value if value is None else value.detach(), None
    if type(value) in _NUMBERS:
        return torch.tensor(value, dtype=_NUMBERS[type(value)]), type(value).__name__
    raise _cannot_save(optimizer, key, type(value).__name__)


def _cannot_save(optimizer: torch.optim.Optimizer | None, key: str, kind: str) -> UserError:
    return UserError(
        f"the optimizer {type(optimizer).__name__} keeps {key} as {kind}, which cannot be saved "
        "without pickled code. Use another `optimizer`."
    )


def _piece(
    tensor: torch.Tensor, parameter: nn.Parameter, rows: RowRange | None, key: str
) -> dict[str, Any]:
    """Return the rows that a value covers, as the index has them; {}: all of them."""
    if rows is None or (tensor.numel() == 1 and tensor.shape != parameter.shape):
        return {}  # a count is the same for all rows
    if tensor.shape == parameter.shape:
        return {"start": rows.start, "rows": rows.count}
    raise UserError(
        f"the optimizer keeps {key} of shape {list(tensor.shape)} for a share of shape "
        f"{list(parameter.shape)}. Leave `dp_shard` out or use another `optimizer`."
    )


def group_values(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """id of a parameter -> what its group holds besides; the scheduled rate is not looked at."""
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        more = {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
            for key, value in group.items()
            if key not in ("params", "lr", "param_names")
        }
        found |= {id(parameter): more for parameter in group["params"]}
    return found


def _group_extras(
    optimizer: torch.optim.Optimizer, begun: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, Any]]:
    """id of a parameter -> what training changed in its group; else settings of the run count."""
    extras: dict[int, dict[str, Any]] = {}
    for parameter, now in group_values(optimizer).items():
        then = begun.get(parameter, {})
        changed = {}
        for key, value in now.items():
            old = then.get(key)
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor):
                is_same = torch.equal(value, old)
            else:
                is_same = type(value) is type(old) and bool(value == old)
            if key not in then or not is_same:
                changed[key] = value
        for key, value in changed.items():
            if value is not None and not isinstance(value, bool | int | float | str):
                raise _cannot_save(optimizer, key, f"{type(value).__name__} of a group")
        extras[parameter] = changed
    return extras


STATE_FOLDER = "training_state"
STATE_FILE = "state.json"


class SavedState:
    """The training state of a checkpoint, whatever its stages were; reads tensors when asked.

    Args:
        folder: of the checkpoint, which is known to be whole.

    Attributes:
        facts: what the run noted besides: steps done, counters, options.

    Raises:
        CheckpointError: it holds only weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / STATE_FOLDER
        path = self.folder / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{folder} holds only weights, without {STATE_FOLDER}/{STATE_FILE}. Resume from a "
                "folder checkpoints/step-..., or give these weights as `model_path`."
            )
        saved = read_json(path)
        self.facts: dict[str, Any] = saved["facts"]
        self.index: dict[str, dict[str, Any]] = saved["parameters"]
        self.extras: dict[str, dict[str, Any]] = saved["extras"]
        self.optimizer: str | None = saved["optimizer"]

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a state of other names than all ranks train now."""
        names = set(names)
        missing, unknown = names - set(self.index), set(self.index) - names
        problems = []
        if missing:
            problems.append(f"lacks {len(missing)} that train now ({list_names(missing, 5)})")
        if unknown:
            problems.append(f"has {len(unknown)} that do not ({list_names(unknown, 5)})")
        if problems:
            raise CheckpointError(
                f"the state in {self.folder} {' and '.join(problems)}. Resume with the model, the "
                "frozen parts and the LoRA of that run."
            )

    @torch.no_grad()
    def restore(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        *,
        rows: Mapping[str, RowRange],
    ) -> None:
        """Fill this rank's parameters, if their values are here, and its optimizer's state.

        Raises:
            CheckpointError: another optimizer's state, another shape, or groups that were two.
        """
        if optimizer is None:
            return
        here = type(optimizer).__name__
        if self.optimizer not in (None, here):
            raise CheckpointError(
                f"{self.folder} holds the state of {self.optimizer}, not that of {here}. Resume "
                "with the `optimizer` of that run."
            )
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        of_group: dict[int, dict[str, Any]] = {}
        with ExitStack() as stack:

            @functools.cache
            def opened(name: str) -> safe_open:
                path = inside(self.folder, name, told_by=self.folder / STATE_FILE, is_plain=True)
                return stack.enter_context(open_tensors(path))

            for name, parameter in parameters.items():
                group = groups[id(parameter)]
                state = self._values(name, parameter, rows.get(name), opened, group)
                value = state.pop(WEIGHT, None)
                if value is not None:
                    parameter.copy_(value)
                if state:
                    optimizer.state[parameter] = state
                extras = self.extras.get(name, {})
                if of_group.setdefault(id(group), extras) != extras:
                    raise CheckpointError(
                        f"{self.folder} has {extras} for the group of {name}, and other values for "
                        "others of its group now. Resume with the stages of that run."
                    )
                group.update(extras)

    def _values(
        self,
        name: str,
        parameter: nn.Parameter,
        rows: RowRange | None,
        opened: Callable[[str], safe_open],
        group: Mapping[str, Any],
    ) -> dict[str, Any]:
        entry = self.index[name]
        shape = rows.shape if rows is not None else tuple(parameter.shape)
        if tuple(entry["shape"]) != shape:
            raise CheckpointError(
                f"{self.folder} has {name} with shape {entry['shape']}, this model {list(shape)}. "
                "Resume with the model of that run."
            )
        values: dict[str, Any] = {}
        for key, pieces in entry["values"].items():
            value = self._read(f"{key}/{name}", pieces, opened, rows=rows, shape=shape)
            number = pieces[0].get("number")
            if number is not None:
                values[key] = value.item()
                continue
            # torch, too, leaves the count of steps on the host, unless a fused kernel reads it
            stays = key == "step" and not (group.get("fused") or group.get("capturable"))
            values[key] = value if stays else value.to(parameter.device)
        return values

    def _read(
        self,
        key: str,
        pieces: list[dict[str, Any]],
        opened: Callable[[str], safe_open],
        *,
        rows: RowRange | None,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """A whole value, or the rows of it that are wanted."""
        first = opened(pieces[0]["file"])
        if "start" not in pieces[0]:
            value = first.get_slice(key)
            if rows is None or tuple(value.get_shape()) != shape:
                return first.get_tensor(key)
            start = rows.start if rows.count else 0  # none may begin behind the last row
            return value[start : start + rows.count]
        begin, count = (0, shape[0]) if rows is None else (rows.start, rows.count)
        parts = []
        for piece in sorted(pieces, key=lambda piece: piece["start"]):
            start = max(begin, piece["start"])
            stop = min(begin + count, piece["start"] + piece["rows"])
            if start < stop:
                values = opened(piece["file"]).get_slice(key)
                parts.append(values[start - piece["start"] : stop - piece["start"]])
        return torch.cat(parts) if parts else first.get_slice(key)[:0]
