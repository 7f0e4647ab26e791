"""Folders with few-bit weights, written by the formats' definitions from a tiny whole model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
BLOCK = 8


def rewrite(folder: Path, settings: dict[str, object], change) -> None:
    """Replace the weights of decoder layers, two files each, and describe them in config.json.

    Args:
        change: (name, weight) of a matrix of a layer -> what is saved for it; None: as it is.
    """
    changed: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(file).items():
            made = change(name, value) if ".layers." in name and value.ndim > 1 else None
            changed |= {name: value} if made is None else made
        file.unlink()
    names, weight_map = sorted(changed), {}
    for index in range(2):
        file = f"model-{index + 1:05}-of-00002.safetensors"
        # what makes one weight is in different files: neighbours in order
        part = {name: changed[name].contiguous() for name in names[index::2]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def write_fp8(folder: Path) -> None:
    """Store linear layers in FP8 with a scale of each block, as DeepSeek-V3 does."""

    def change(name: str, weight: torch.Tensor) -> Tensors | None:
        if not name.endswith("proj.weight"):
            return None
        rows, columns = weight.shape
        tiles = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = tiles.abs().amax((1, 3)) / 448
        stored = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        return {name: stored.reshape(rows, columns), f"{name}_scale_inv": scale}

    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    rewrite(folder, settings | {"activation_scheme": "dynamic"}, change)


def write_mxfp4(folder: Path) -> None:
    """Store the experts of gpt-oss as random 4-bit floats, 32 of which share an exponent."""
    generator = torch.Generator().manual_seed(0)

    def change(name: str, weight: torch.Tensor) -> Tensors | None:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return None
        experts, columns, rows = weight.shape  # gpt-oss multiplies from the right
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, shape, generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewrite(folder, {"quant_method": "mxfp4"}, change)
