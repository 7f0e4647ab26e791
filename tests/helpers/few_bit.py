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
        # tensors of one weight are neighbours in order: they come to different files
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


def _pack(integers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Put neighbours along the last axis into one word, the first in the lowest bits."""
    width = 32 // bits
    split = integers.long().reshape(*integers.shape[:-1], -1, width)
    split = split if order is None else split[..., order]
    words = sum(split[..., place] << bits * place for place in range(width))
    return ((words + 2**31) % 2**32 - 2**31).int()


def write_packed(folder: Path, method: str, *, bits: int = 4, group: int = 8) -> Tensors:
    """Store linear layers as GPTQ or AWQ does; return the weights that they stand for."""
    expected: Tensors = {}

    def change(name: str, weight: torch.Tensor) -> Tensors | None:
        if not name.endswith("proj.weight"):
            return None
        columns = weight.shape[1]
        groups = torch.arange(columns) // group
        if method == "gptq":  # act-order: groups are made of inputs that are not neighbours
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(0))]
        by_group = [weight.float()[:, groups == one] for one in range(columns // group)]
        low = torch.stack([one.amin(1).clamp(max=0) for one in by_group], 1)
        high = torch.stack([one.amax(1).clamp(min=0) for one in by_group], 1)
        scales = ((high - low) / (2**bits - 1)).half()  # [O, G]
        zeros = (-low / scales).round().clamp(0, 2**bits - 1)
        full = weight.float() / scales[:, groups] + zeros[:, groups]
        integers = full.round().clamp(0, 2**bits - 1)
        expected[name] = (integers - zeros[:, groups]).half() * scales[:, groups]
        stem = name.removesuffix("weight")
        made = {f"{stem}scales": scales.T}
        if method == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            packed = _pack(integers.T, bits, order), _pack(zeros.T, bits, order)
        else:
            packed = _pack(integers, bits).T, _pack((zeros.T - 1) % 2**bits, bits)
            made[f"{stem}g_idx"] = groups.int()
        return {**made, f"{stem}qweight": packed[0], f"{stem}qzeros": packed[1]}

    told = {"quant_method": method, "bits": bits, "group_size": group, "desc_act": method == "gptq"}
    rewrite(folder, told | ({"version": "gemm"} if method == "awq" else {}), change)
    return expected


def write_compressed(folder: Path, kind: str) -> None:
    """Store linear layers as compressed-tensors does, by its own compressor."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    layout, group, fields = {
        "int4": ("pack-quantized", BLOCK, {"num_bits": 4, "type": "int", "strategy": "group"}),
        "fp8": ("float-quantized", 0, {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "nvfp4": (
            "nvfp4-pack-quantized",
            16,
            {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
        ),
    }[kind]
    fields |= {"group_size": group} if group else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fields))
    compressor = BaseCompressor.get_value_from_registry(layout)

    def change(name: str, weight: torch.Tensor) -> Tensors | None:
        if not name.endswith("proj.weight"):
            return None
        groups = weight.float().unflatten(1, (-1, group or weight.shape[1]))
        state, ends = {"weight": weight}, (groups.amin(2), groups.amax(2))
        if kind == "nvfp4":
            state["weight_global_scale"] = generate_gparam(ends[0].amin(), ends[1].amax())
        scales, zeros = calculate_qparams(
            *ends, scheme.weights, global_scale=state.get("weight_global_scale")
        )
        state |= {"weight_scale": scales, "weight_zero_point": zeros}
        stem = name.removesuffix("weight")
        return {stem + leaf: one.data for leaf, one in compressor.compress(state, scheme).items()}

    group_0 = {"targets": ["Linear"], "weights": fields}
    settings = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    settings |= {"quantization_status": "compressed", "config_groups": {"group_0": group_0}}
    rewrite(folder, settings, change)
