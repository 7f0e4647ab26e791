"""Faults in the files of a model folder, and checks of how they are refused. For fault tests."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from pp_models import CausalLMStage, StageModel, VisionLanguageStage
from stageline.checkpoint.layout import MANIFEST, content_sum
from stageline.checkpoint.load import load_split_model
from stageline.errors import UserError


def refused(call: Callable[[], object], *words: object, code: int = 4) -> str:
    """Return the message of the error of `call`, and check its exit code and words."""
    try:
        call()
    except UserError as error:
        message = str(error)
        assert error.exit_code == code, message
        for word in words:
            assert str(word) in message, f"{word} is not in: {message}"
        return message
    raise AssertionError("nothing was refused")


def load(
    folder: Path,
    path: str | Path | None = None,
    *,
    stage: int = 1,
    num_stages: int = 2,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> StageModel:
    """Return one stage of a model folder, filled from it or from `path`."""
    config = AutoConfig.from_pretrained(folder)
    stage_class = VisionLanguageStage if hasattr(config, "vision_config") else CausalLMStage
    model = stage_class(config, stage=stage, num_stages=num_stages, dtype=dtype, **kwargs)
    load_split_model(model, path or folder, device="cpu", dtype=dtype)
    return model


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and sign it again."""

    def both(manifest: dict[str, Any]) -> None:
        change(manifest)
        manifest["sha256"] = content_sum(manifest)

    edit(folder / MANIFEST, both)


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file; a second call restores it."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def spoil(folder: Path, kind: str) -> None:
    """Apply the fault `kind` to a checkpoint."""
    file = max(folder.glob("*.safetensors"))
    if kind == "cut":
        os.truncate(file, 100)
    elif kind == "flipped":
        flip(file, -1)
    elif kind == "gone":
        file.unlink()
    elif kind == "unfinished":
        (folder / MANIFEST).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir() if kind == "empty" else folder.write_text("")


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the object in a JSON file; where there is none, an empty one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def rewrite(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the tensors in a safetensors file."""
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


class Canary:
    """An object whose pickle makes a folder when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, (str(self.path),))
