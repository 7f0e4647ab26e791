"""Write a checkpoint folder: under a temporary name, synced to disk, published by one rename.

A folder with a manifest.json and without `.tmp-` in its name is whole. The manifest has size and
sha256 of every file, and its own sha256.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stageline.checkpoint.files import inside
from stageline.errors import CheckpointError, UserError

MANIFEST = "manifest.json"
BASE_FOLDER = "base"  # a run saves its frozen model here when no folder has it
FORMAT_VERSION = 2
# files that loaders look for by name or by what they end with
_LOADED_SUFFIXES = (".safetensors", ".index.json", "adapter_config.json")


def draft_name(folder: Path) -> str:
    """Return a fresh name next to `folder`, for the folder while it is being written."""
    return f"{folder.name}.tmp-{secrets.token_hex(4)}"


def refuse_existing(folder: Path) -> None:
    """Refuse to write a checkpoint over another: a crash in between would lose both."""
    if folder.exists():
        raise UserError(
            f"{folder} exists, and a checkpoint is never written over another. Choose another "
            "folder or remove it."
        )


def fsync_path(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_facts(path: Path) -> dict[str, int | str]:
    """Size in bytes and sha256 of a file, which is made durable first."""
    fsync_path(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish(
    draft: Path, folder: Path, *, facts: Mapping[str, Any], known: Mapping[str, dict]
) -> None:
    """Write the manifest, make all durable and give the draft its name.

    The manifest has `facts` too; `known` has size and sha256 of files that others have hashed.
    """
    refuse_existing(folder)
    files = dict(known)
    for path in sorted(draft.rglob("*")):
        name = path.relative_to(draft).as_posix()
        if path.is_file() and name not in files:
            files[name] = file_facts(path)
    manifest = {"format_version": FORMAT_VERSION, **facts, "files": dict(sorted(files.items()))}
    manifest["sha256"] = content_sum(manifest)
    # last: a torn write then leaves no valid manifest
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    fsync_path(draft / MANIFEST)
    for path in [*draft.rglob("*"), draft]:
        if path.is_dir():
            fsync_path(path)
    os.rename(draft, folder)
    fsync_path(folder.parent)


def content_sum(manifest: Mapping[str, Any]) -> str:
    """Return the sha256 of the content of a manifest, without its own checksum."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    # once through JSON: tuples and numbers as keys are read back as lists and texts
    content = json.loads(json.dumps(content))
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a published folder, in which not one bit has changed.

    Raises:
        CheckpointError: there is none, it is cut short, changed, or of another format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        version, found = manifest["format_version"], content_sum(manifest)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else repr(error)[:100]
        raise CheckpointError(
            f"{path} cannot be read ({why}). It is written last, so the checkpoint is incomplete: "
            "use another one."
        ) from error
    if version != FORMAT_VERSION:
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        cure = f"Update Stageline to one that reads {version}, or use" if is_newer else "Use"
        raise CheckpointError(
            f"{path} has format version {version}; this Stageline reads {FORMAT_VERSION}. {cure} "
            "another checkpoint."
        )
    if manifest.get("sha256") != found:
        raise CheckpointError(
            f"{path} has the sha256 {str(manifest.get('sha256'))[:12]}..., its content "
            f"{found[:12]}...: it was changed after it was saved. Use another checkpoint."
        )
    return manifest


def own_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest as `read_manifest` does; {} where another program wrote the folder."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except OSError:
        return {}
    except (ValueError, RecursionError):
        content = {"format_version": None}  # a broken one
    is_ours = isinstance(content, dict) and "format_version" in content
    return read_manifest(folder) if is_ours else {}


def base_sum(folder: Path) -> str | None:
    """Return the checksum of a frozen model that a run saved next to its adapters, else None."""
    manifest = own_manifest(folder)
    return manifest["sha256"] if manifest.get("kind") == BASE_FOLDER else None


def verify(folder: Path) -> dict[str, Any]:
    """Compare every file with the manifest; return the manifest.

    Raises:
        CheckpointError: a file is missing, cut short, changed, or one that loaders read was added.
    """
    manifest = read_manifest(folder)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.name.endswith(_LOADED_SUFFIXES) and name not in manifest["files"]:
            raise _damaged(path, "is not in the manifest", "only files that were saved with it")
    check_files(folder, manifest)
    return manifest


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare size and sha256 of files with the manifest, sizes first."""
    paths: dict[Path, dict] = {
        inside(folder, name, told_by=folder / MANIFEST): facts
        for name, facts in manifest["files"].items()
    }
    for path, facts in paths.items():
        size = path.stat().st_size if path.is_file() else None
        if size != facts["size"]:
            found = "is missing" if size is None else f"is damaged: found {size} bytes"
            raise _damaged(path, found, f"{facts['size']} bytes")
    for path, facts in paths.items():
        found, wanted = _sha256(path), facts["sha256"]
        if found != wanted:
            raise _damaged(path, f"is damaged: found sha256 {found[:12]}...", f"{wanted[:12]}...")


def _damaged(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {found}, expected {expected} by {MANIFEST}. Use another checkpoint, or copy this "
        "one again."
    )


def discard(draft: Path) -> None:
    """Remove the files of a checkpoint that cannot be finished."""
    shutil.rmtree(draft, ignore_errors=True)
