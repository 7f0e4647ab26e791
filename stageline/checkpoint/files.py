"""Find the files of a checkpoint folder that hold its tensors; read and write single files."""

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stageline.errors import CheckpointError, UserError
from stageline.hub import fetch_missing, name_of
from stageline.model_folder import read_json

_UMASK = os.umask(0o077)  # at import: it is the whole process's while it is looked at
os.umask(_UMASK)
FILE_MODE = 0o666 & ~_UMASK  # new files get this mode
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
# torch.save writes such files; they are never opened, as a pickle can run code
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_LFS = b"version https://git-lfs"
_SAMPLED = 1 << 16  # bytes of each end of a file of weights that its fingerprint is made of


def inside(folder: Path, name: object, *, told_by: Path, is_plain: bool = False) -> Path:
    """Return `folder / name`, as the file `told_by` names it; a plain name has no folder in it.

    Raises:
        CheckpointError: the name leads out of the folder.
    """
    text = name if isinstance(name, str) else ""
    path = PurePosixPath(text)
    leads_out = path.is_absolute() or PureWindowsPath(text).drive or ".." in path.parts
    if leads_out or text in ("", ".") or {*"\0\\"} & {*text} or (is_plain and path.name != text):
        what = "a plain file name" if is_plain else "a path below its folder"
        raise CheckpointError(
            f"{told_by} names the file {name!r}, which is not {what}. Do not use a checkpoint from "
            "a source you do not know."
        )
    return folder / text


def weights_fingerprint(folder: Path) -> str:
    """Tell files of weights apart by names, sizes and ends; reads no more of them."""
    if (name := name_of(folder)) is not None:  # a commit on a hub, of which some files are here
        return str(name)
    told = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else [folder]:
        size = path.stat().st_size
        told.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, size // 2, max(size - _SAMPLED, 0)):
                file.seek(start)
                told.update(file.read(_SAMPLED))
    return told.hexdigest()


def find_checkpoint(checkpoint_path: str | Path) -> Path:
    """The checkpoint as a path.

    Raises:
        UserError: nothing is there; weights are never fetched over the network.
        CheckpointError: it is a file, and no safetensors.
    """
    path = Path(checkpoint_path).expanduser()
    if not path.exists():
        raise UserError(
            f"`model_path` {checkpoint_path} does not exist on this machine. Check the path; only "
            "the options of a command fetch a hub's owner/name[@revision]."
        )
    if path.suffix in _PICKLES and not path.is_dir():
        raise CheckpointError(
            f"{path} is a pickle by its name, which can run any program, so it is never opened. "
            "Give the folder of a model with safetensors weights."
        )
    return path


def weight_files(checkpoint: Path, *, fetches: bool = True) -> dict[str, Path]:
    """Name on disk -> file, of a folder (sharded or not) or of one safetensors file.

    Every file is looked at: one that is missing, cut short or is something else is refused here. So
    is a folder of which transformers would read other weights than the index names.

    Args:
        fetches: False: files that are still to be fetched from a hub are looked at when they are
            opened.

    Raises:
        CheckpointError: no weights, a broken index, or a file that is missing or damaged.
    """
    if checkpoint.is_file():
        return dict.fromkeys(tensor_names(checkpoint), checkpoint)
    index, single, config = (checkpoint / n for n in (INDEX_FILE, SINGLE_FILE, "config.json"))
    named = read_json(config).get("transformers_weights") if config.exists() else None
    if named not in (None, SINGLE_FILE, INDEX_FILE):
        raise CheckpointError(
            f"{config} names {named!r} in transformers_weights, a second set of weights. Call that "
            f"file {SINGLE_FILE} (or {INDEX_FILE}) and remove the entry."
        )
    if index.exists():
        return _read_index(index, fetches=fetches)
    fetch_missing(single)
    if single.exists():
        return dict.fromkeys(tensor_names(single), single)
    held = [path.name for path in checkpoint.iterdir()]
    pickles = [name for name in held if Path(name).suffix in _PICKLES]
    cure = "Give the folder of a whole model with safetensors weights"
    if (name := name_of(checkpoint)) is not None:
        cure = (
            f"On the hub {name} has no others (pickles are not fetched). Look for a revision with "
            "safetensors (NAME@refs/pr/1, if somebody has proposed one)"
        )
    elif pickles:
        cure = (
            "A pickle can run any program, so it is never opened. If you trust it, load it once "
            "in transformers, save_pretrained it to a new folder, and copy the tokenizer's files"
        )
    raise CheckpointError(
        f"{checkpoint} holds neither {SINGLE_FILE} nor {INDEX_FILE}, but "
        f"{list_names(pickles or held, 8) or 'nothing'}. {cure}."
    )


def _read_index(index: Path, *, fetches: bool) -> dict[str, Path]:
    """Return the file of each tensor by the index, compared with the headers of the files."""
    folder = index.parent
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} cannot be read (no weight_map, which says which file holds which tensor). "
            "Copy the checkpoint again."
        )
    told: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        told.setdefault(str(file), set()).add(name)
    files = {file: inside(folder, file, told_by=index, is_plain=True) for file in sorted(told)}
    if (folder / SINGLE_FILE).exists() and files.keys() != {SINGLE_FILE}:
        raise CheckpointError(
            f"{folder} holds two sets of weights: {SINGLE_FILE}, and the files that {index.name} "
            "names. Delete the set that is not meant: that file, or the index with its files."
        )
    for file, path in files.items():
        if not (fetches or path.exists() or name_of(path.parent) is None):
            continue
        fetch_missing(path)
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing, and {index.name} says that it holds weights. Copy the "
                "checkpoint again."
            )
        held = set(tensor_names(path))
        if lacking := sorted(told[file] ^ held):
            has, says = ("a", "nothing of it") if lacking[0] in held else ("no", "that it does")
            raise CheckpointError(
                f"{path} has {has} tensor {lacking[0]}, {index.name} says {says}: the files are of "
                "different checkpoints. Copy the checkpoint again, whole."
            )
    return {name: files[str(file)] for name, file in weight_map.items()}


def tensor_names(file: Path) -> list[str]:
    """The names in one safetensors file."""
    with open_tensors(file) as tensors:
        return list(tensors.keys())


def tensor_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of all tensors in some safetensors files, by their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with open_tensors(file) as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return shapes


def open_tensors(file: Path, device: torch.device | str = "cpu") -> safe_open:
    """`safe_open`, which checks the whole header, reading instead of mapping.

    Mapped weights would change or end the process when the file changes, and every page that is
    looked at counts as memory of the process until the file is closed. A file of a hub's cache that
    is not there yet is fetched.

    Raises:
        CheckpointError: the file is damaged, or something else.
        UserError: it is to be fetched and cannot.
    """
    fetch_missing(file)
    try:
        return safe_open(file, framework="pt", device=str(device), backend="pread")
    except (SafetensorError, OSError) as error:
        cure = "Copy the safetensors file again."
        with contextlib.suppress(OSError), file.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                cure = "It is a Git LFS pointer: fetch the file itself with `git lfs pull`."
        raise CheckpointError(f"{file} cannot be read: {error}. {cure}") from error


def read_tensor(tensors: safe_open, name: str, file: Path) -> torch.Tensor:
    """One tensor of an open file, which may have been cut short since it was opened."""
    try:
        return tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}) at the tensor {name}: it was cut short or changed "
            "while it was read, or the disk fails. Copy it again."
        ) from error


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, on the CPU; without a mapping."""
    with open_tensors(file) as tensors:
        return {name: read_tensor(tensors, name, file) for name in list(tensors.keys())}


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor in a file, read when transformers takes `[...]` of it; `taken` gets its name."""

    opened: Callable[[Path], safe_open]
    path: Path
    name: str
    taken: set[str]

    def get_dtype(self) -> str:  # a quantizer of transformers asks for it
        dtype: str = self.opened(self.path).get_slice(self.name).get_dtype()
        return dtype

    def __getitem__(self, index: object) -> torch.Tensor:
        assert index is Ellipsis, "transformers reads whole tensors unless it shards them"
        self.taken.add(self.name)
        return read_tensor(self.opened(self.path), self.name, self.path)


def lazy_state(files: dict[str, Path], taken: set[str]) -> dict[str, LazyTensor]:
    """Name on disk -> tensor that is read when it is wanted; `taken` gets what was read."""
    opened = functools.cache(open_tensors)
    return {name: LazyTensor(opened, file, name, taken) for name, file in files.items()}


def list_names(names: Iterable[str], limit: int = 20) -> str:
    """Names for an error message: the first ones in order, and how many more."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def other_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> str:
    """A name for `misfits`, with the shape in the file and that in the model."""
    return f"{name} (file {list(found)}, model {list(expected)})"


def misfits(
    missing: Collection[str],
    unknown: Collection[str] = (),
    wrong: Collection[str] = (),
    *,
    owner: str = "model",
) -> str:
    """Describe the names of a checkpoint that do not fit `owner`; "" where all fit."""
    kinds = {
        "names are missing": missing,
        f"names belong to no {owner}": unknown,
        "names have another shape": wrong,
    }
    return "; ".join(f"{len(n)} {why}: {list_names({*n})}" for why, n in kinds.items() if n)


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file, with the rights that other new files of this process get."""
    # contiguous one file at a time: views of fused experts are not
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})
    path.chmod(FILE_MODE)  # safetensors makes files that only their owner can read
