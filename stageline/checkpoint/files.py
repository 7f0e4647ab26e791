"""Which files of a checkpoint folder hold which tensors; reads headers, never whole files."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stageline.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def find_checkpoint(checkpoint_path: str | Path) -> Path:
    """The checkpoint as a path.

    Raises:
        UserError: nothing is there; weights are never fetched over the network.
    """
    path = Path(checkpoint_path).expanduser()
    if not path.exists():
        raise UserError(
            f"--model-path {checkpoint_path} does not exist, a folder with {SINGLE_FILE} or "
            f"{INDEX_FILE} was expected: weights are read from this machine only. Download the "
            "model first and give its folder."
        )
    return path


def weight_files(checkpoint: Path) -> dict[str, Path]:
    """Name on disk -> file, of a folder (sharded or not) or of one safetensors file.

    Raises:
        UserError: no weights, a broken index, or a file that is missing or damaged.
    """
    if checkpoint.is_file():
        return dict.fromkeys(tensor_names(checkpoint), checkpoint)
    index = checkpoint / INDEX_FILE
    if index.exists():
        return _read_index(index)
    single = checkpoint / SINGLE_FILE
    if not single.exists():
        raise UserError(
            f"{checkpoint} holds neither {SINGLE_FILE} nor {INDEX_FILE}, one of them was expected: "
            "only safetensors can be read stage by stage. Convert the weights to it first "
            "(`save_pretrained` of transformers does)."
        )
    return dict.fromkeys(tensor_names(single), single)


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{index} cannot be read ({error!r}), a JSON object with weight_map was expected: it "
            "says which file holds which tensor. Copy the checkpoint again."
        ) from error
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise UserError(
                f"{index} names the file {file!r}, a plain file name was expected: a shard lies "
                "beside its index. Do not use a checkpoint from a source you do not know."
            )
        if not (index.parent / file).exists():
            raise UserError(
                f"{index.parent / file} is missing, {index.name} says that it holds weights: the "
                "checkpoint is not whole. Copy it again."
            )
    return {name: index.parent / file for name, file in weight_map.items()}


def tensor_names(file: Path) -> list[str]:
    """The names in one safetensors file."""
    with open_tensors(file) as tensors:
        return list(tensors.keys())


def open_tensors(file: Path, device: torch.device | str = "cpu") -> safe_open:
    """`safe_open` that names the file when it is damaged, and reads instead of mapping.

    Mapped weights would change or end the process when the file changes, and every page that is
    looked at counts as memory of the process until the file is closed.
    """
    try:
        return safe_open(file, framework="pt", device=str(device), backend="pread")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} cannot be read ({error}), a whole safetensors file was expected: it may be "
            "cut short, or be something else by that name. Copy it again."
        ) from error


class LazyTensor:
    """A tensor in a file, read when the library takes `[...]` of it, and only then.

    Args:
        taken: gets the name when the tensor is read.
    """

    def __init__(self, file: safe_open, name: str, taken: set[str]) -> None:
        self.file = file
        self.name = name
        self.taken = taken

    def __getitem__(self, index: object) -> torch.Tensor:
        assert index is Ellipsis, "the library reads whole tensors unless it shards them"
        self.taken.add(self.name)
        return self.file.get_tensor(self.name)


def lazy_state(files: dict[str, Path], taken: set[str]) -> dict[str, LazyTensor]:
    """Name on disk -> tensor that is read when it is wanted; `taken` gets what was read."""
    opened = {file: open_tensors(file) for file in sorted(set(files.values()))}
    return {name: LazyTensor(opened[file], name, taken) for name, file in files.items()}


def list_names(names: list[str] | set[str], limit: int = 20) -> str:
    """Names for an error message: the first ones in order, and how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
