"""How a checkpoint folder comes to be: written aside, made durable, published by one rename.

A folder with a manifest.json and without `.tmp-` in its name is whole. Knows files and hashes, and
neither models nor ranks.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from stageline import chaos
from stageline.errors import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_CHUNK_BYTES = 1 << 22


def draft_name(folder: Path) -> str:
    """A fresh name beside `folder`, for the folder while it is being written."""
    return f"{folder.name}.tmp-{secrets.token_hex(4)}"


def refuse_existing(folder: Path) -> None:
    """A checkpoint is never written over another.

    Raises:
        UserError: something is there.
    """
    if folder.exists():
        raise UserError(
            f"{folder} exists, a new folder was expected: a checkpoint is never written over "
            "another, a crash in between would lose both. Choose another folder or remove it."
        )


def fsync_path(path: Path) -> None:
    """Makes a file's content, or a folder's entries, survive a power cut."""
    chaos.point("file")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_facts(path: Path) -> dict[str, int | str]:
    """Size in bytes and sha256 of a file, which is made durable first."""
    fsync_path(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def publish(
    draft: Path, folder: Path, *, facts: Mapping[str, object], known: Mapping[str, dict]
) -> None:
    """Writes the manifest, makes all durable and gives the draft its name.

    Args:
        facts: what the manifest says besides the files.
        known: relative path -> size and sha256 of files that others have hashed.
    """
    refuse_existing(folder)
    files = dict(known)
    for path in sorted(draft.rglob("*")):
        name = path.relative_to(draft).as_posix()
        if path.is_file() and name not in files:
            files[name] = file_facts(path)
    manifest = {
        "format_version": FORMAT_VERSION,
        **facts,
        "files": dict(sorted(files.items())),
    }
    chaos.point("file")
    # last: a torn write then leaves no valid manifest
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    fsync_path(draft / MANIFEST)
    for path in [*draft.rglob("*"), draft]:
        if path.is_dir():
            fsync_path(path)
    chaos.point("file")
    os.rename(draft, folder)
    fsync_path(folder.parent)


def read_manifest(folder: Path) -> dict[str, object]:
    """The manifest of a published folder.

    Raises:
        UserError: there is none, it is cut short, or from a newer version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        version = manifest["format_version"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error!r}), the manifest of a whole checkpoint was expected: "
            "it is written last, so the checkpoint is incomplete. Use an older one."
        ) from error
    if version > FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, at most {FORMAT_VERSION} was expected: a newer "
            "Stageline wrote it. Update Stageline."
        )
    return manifest


def verify(folder: Path) -> dict[str, object]:
    """Compares every file with the manifest; returns the manifest.

    Raises:
        UserError: a file is missing, cut short or changed.
    """
    manifest = read_manifest(folder)
    for name, facts in manifest["files"].items():
        path = folder / name
        found = file_facts(path) if path.is_file() else None
        if found != facts:
            state = "is missing" if found is None else f"has {found['size']} bytes or other content"
            raise UserError(
                f"{path} {state}, {facts['size']} bytes with sha256 {facts['sha256'][:12]}... were "
                "expected: it was cut short or changed after it was saved. Use another checkpoint."
            )
    return manifest


def discard(draft: Path) -> None:
    """Removes what was written of a checkpoint that cannot be finished."""
    shutil.rmtree(draft, ignore_errors=True)
