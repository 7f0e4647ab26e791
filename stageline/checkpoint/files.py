"""Which files of a checkpoint folder hold which tensors; reads headers, never whole files."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from stageline.checkpoint.header import read_header
from stageline.checkpoint.paths import inside, refuse_outer_link
from stageline.errors import CheckpointError, UserError
from stageline.model_folder import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
# what torch.save writes, by whatever name; never opened
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


def find_checkpoint(checkpoint_path: str | Path) -> Path:
    """The checkpoint as a path.

    Raises:
        UserError: nothing is there; weights are never fetched over the network.
        CheckpointError: it is a file, and no safetensors.
    """
    path = Path(checkpoint_path).expanduser()
    if not path.exists():
        raise UserError(
            f"--model-path {checkpoint_path} does not exist, a folder with {SINGLE_FILE} or "
            f"{INDEX_FILE} was expected: weights are read from this machine only. Download the "
            "model first and give its folder."
        )
    if path.suffix in _PICKLES and not path.is_dir():
        raise CheckpointError(
            f"{path} is a pickle by its name, safetensors were expected: a pickle can run any "
            "program while it is read, so it is never opened. Give the folder of a model with "
            "safetensors weights."
        )
    return path


def weight_files(checkpoint: Path) -> dict[str, Path]:
    """Name on disk -> file, of a folder (sharded or not) or of one safetensors file.

    Every file is looked at: one that is missing, cut short or is something else is refused here.

    Raises:
        CheckpointError: no weights, a broken index, or a file that is missing or damaged.
    """
    if checkpoint.is_file():
        return dict.fromkeys(read_header(checkpoint), checkpoint)
    index = checkpoint / INDEX_FILE
    if index.exists():
        return _read_index(index)
    single = checkpoint / SINGLE_FILE
    if not single.exists():
        raise _without_weights(checkpoint)
    refuse_outer_link(single, checkpoint)
    return dict.fromkeys(read_header(single), single)


def _without_weights(checkpoint: Path) -> CheckpointError:
    pickles = sorted(path.name for path in checkpoint.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return CheckpointError(
            f"{checkpoint} holds weights as pickle only ({list_names(pickles, 3)}), {SINGLE_FILE} "
            f"or {INDEX_FILE} was expected: a pickle can run any program while it is read, so it "
            "is never opened. If you trust where it came from, convert it once: python -c "
            '"from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{checkpoint}').save_pretrained('NEW_FOLDER')\", and copy the "
            "tokenizer's files."
        )
    held = list_names([path.name for path in checkpoint.iterdir()], 8)
    return CheckpointError(
        f"{checkpoint} holds neither {SINGLE_FILE} nor {INDEX_FILE}, one of them was expected: "
        f"only safetensors can be read stage by stage. It holds: {held or 'nothing'}. Give the "
        "folder of a whole model, or convert the weights (`save_pretrained` of transformers does)."
    )


def _read_index(index: Path) -> dict[str, Path]:
    """What the index says, compared with the headers of the files that it names."""
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} cannot be read (no weight_map), a JSON object with weight_map was expected: "
            "it says which file holds which tensor. Copy the checkpoint again."
        )
    files = {}
    for file in sorted(set(map(str, weight_map.values()))):
        files[file] = inside(folder, file, told_by=index, is_plain=True)
        if not files[file].exists():
            raise CheckpointError(
                f"{files[file]} is missing, {index.name} says that it holds weights: the "
                "checkpoint is not whole. Copy it again."
            )
    held = {file: set(read_header(path)) for file, path in files.items()}
    for name, file in weight_map.items():
        if name not in held[str(file)]:
            raise CheckpointError(
                f"{files[str(file)]} has no tensor {name}, {index.name} says that it does: the "
                "files are of different checkpoints. Copy the checkpoint again, whole."
            )
    return {name: files[str(file)] for name, file in weight_map.items()}


def tensor_names(file: Path) -> list[str]:
    """The names in one safetensors file."""
    return list(read_header(file))


def open_tensors(file: Path, device: torch.device | str = "cpu") -> safe_open:
    """`safe_open` after our own look at the header, which reads instead of mapping.

    Mapped weights would change or end the process when the file changes, and every page that is
    looked at counts as memory of the process until the file is closed.

    Raises:
        CheckpointError: the file is damaged, or something else.
    """
    read_header(file)
    try:
        return safe_open(file, framework="pt", device=str(device), backend="pread")
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, "a whole safetensors file", error) from error


def read_tensor(tensors: safe_open, name: str, file: Path) -> torch.Tensor:
    """One tensor of an open file.

    Raises:
        CheckpointError: the file was cut short since it was opened, or cannot be read.
    """
    try:
        return tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise _unreadable(file, f"the tensor {name}", error) from error


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, on the CPU; without a mapping.

    Raises:
        CheckpointError: the file is damaged, or something else.
    """
    with open_tensors(file) as tensors:
        return {name: read_tensor(tensors, name, file) for name in list(tensors.keys())}


def _unreadable(file: Path, expected: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read ({error}), {expected} was expected: it was cut short or changed "
        "while it was read, or the disk fails. Copy it again."
    )


class LazyTensor:
    """A tensor in a file, read when the library takes `[...]` of it, and only then.

    Args:
        taken: gets the name when the tensor is read.
    """

    def __init__(self, file: safe_open, path: Path, name: str, taken: set[str]) -> None:
        self.file = file
        self.path = path
        self.name = name
        self.taken = taken

    def __getitem__(self, index: object) -> torch.Tensor:
        assert index is Ellipsis, "the library reads whole tensors unless it shards them"
        self.taken.add(self.name)
        return read_tensor(self.file, self.name, self.path)


def lazy_state(files: dict[str, Path], taken: set[str]) -> dict[str, LazyTensor]:
    """Name on disk -> tensor that is read when it is wanted; `taken` gets what was read."""
    opened = {file: open_tensors(file) for file in sorted(set(files.values()))}
    return {name: LazyTensor(opened[file], file, name, taken) for name, file in files.items()}


def list_names(names: list[str] | set[str], limit: int = 20) -> str:
    """Names for an error message: the first ones in order, and how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
