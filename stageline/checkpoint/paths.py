"""Names that a file of a checkpoint gives for others: they must stay in its folder. Pure paths."""

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from stageline.errors import CheckpointError


def inside(folder: Path, name: object, *, told_by: Path, is_plain: bool = False) -> Path:
    """`folder / name`, if that lies in the folder, also when links are followed.

    Args:
        told_by: the file that names it, for the message.
        is_plain: the name may have no folder in it.

    Raises:
        CheckpointError: it lies elsewhere.
    """
    if not _is_inner_name(name) or (is_plain and Path(name).name != name):
        what = "a plain file name" if is_plain else "a path below its folder"
        raise CheckpointError(
            f"{told_by} names the file {name!r}, {what} was expected: other files of this machine "
            "are not read for it. Do not use a checkpoint from a source you do not know."
        )
    refuse_outer_link(folder / name, folder)
    return folder / name


def refuse_outer_link(path: Path, folder: Path) -> None:
    """Refuses a link that leads out of `folder`; links within a Hugging Face cache are its way.

    Raises:
        CheckpointError: it does.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(home):
        return
    # <cache>/models--org--name/snapshots/<revision>/file -> ../../blobs/<hash>
    if home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs":
        return
    raise CheckpointError(
        f"{path} is a link that leads out of its folder, to {real}; a file was expected: a "
        "checkpoint may not bring in other files of this machine. Copy the file into the folder, "
        "or give the folder that it lies in."
    )


def _is_inner_name(name: object) -> bool:
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    is_absolute = path.is_absolute() or PureWindowsPath(name).drive
    return not is_absolute and ".." not in path.parts and name != "."
