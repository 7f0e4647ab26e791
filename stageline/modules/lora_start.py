"""How an adapter starts: as `peft` does it, and the same for any number of stages.

Each layer draws from a seed of its own, made of the run's seed and the layer's full name. PiSSA
(arXiv 2404.02948) puts the principal singular values of a weight into A and B and leaves the rest
as the weight, so that outputs are what they were.
"""

import hashlib
import math

import torch
from torch import nn

from stageline.errors import UserError
from stageline.modules.lora_layer import LoRALayer, dense_weight, is_quantised, put_weight

PISSA = "pissa"
Pair = tuple[torch.Tensor, torch.Tensor]


def name_seed(seed: int, name: str) -> int:
    """A seed for one named thing: independent of everything else that is drawn."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def init_lora_layer(
    layer: LoRALayer,
    name: str,
    *,
    seed: int,
    base: nn.Module | None = None,
    taken: Pair | None = None,
) -> None:
    """Starts an adapter by its `start`; nothing on meta.

    Args:
        name: the layer's full name, which with `seed` decides the draw on any device.
        base: the linear layer beside it, which PiSSA changes and whose norms DoRA starts with.
        taken: of PiSSA the (A, B) of an earlier start of this run, which are computed no more.
    """
    if layer.lora_A.weight.is_meta:
        return
    generator = torch.Generator().manual_seed(name_seed(seed, f"{name}.lora_A.weight"))
    with torch.no_grad():
        if layer.start.startswith(PISSA):
            _start_pissa(layer, base, taken, generator)
        elif layer.start == "orthogonal":
            _start_orthogonal(layer, generator)
        else:
            drawn = torch.empty(layer.lora_A.weight.shape, dtype=torch.float32)
            if layer.start == "gaussian":
                nn.init.normal_(drawn, std=1 / layer.rank, generator=generator)
            else:
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            layer.lora_A.weight.copy_(drawn)
            layer.lora_B.weight.zero_()
        if layer.use_dora:
            weight = dense_weight(base)
            exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
            layer.lora_magnitude_vector.copy_(layer.norm(exact))


def _start_orthogonal(layer: LoRALayer, generator: torch.Generator) -> None:
    """A and B from the even and the odd rows of one orthogonal matrix: B A is zero."""
    rank = layer.rank
    if rank % 2:
        raise UserError(
            f"--lora-init orthogonal came with rank {rank}, an even one was expected: A takes half "
            f"of the directions and B the other half. Set --lora-rank {rank + 1}."
        )
    rows = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]
    down = torch.randn(layer.lora_A.in_features, rank // 2, generator=generator) @ rows[0::2]
    up = torch.randn(rank // 2, layer.lora_B.out_features, generator=generator).T @ rows[1::2]
    layer.lora_A.weight.copy_(down.T / 10)
    layer.lora_B.weight.copy_(up / 10)


def _start_pissa(
    layer: LoRALayer, base: nn.Module | None, taken: Pair | None, generator: torch.Generator
) -> None:
    if base is None or is_quantised(base):
        raise UserError(
            f"--lora-init {layer.start} came with a quantised base, plain weights were expected: "
            "what is taken out of a weight must be exact, or the outputs change. Use --lora-init "
            "default."
        )
    weight = dense_weight(base)
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    pair = taken or _principal(exact, layer, generator)
    for linear, value in zip((layer.lora_A, layer.lora_B), pair, strict=True):
        linear.weight.copy_(value)
    # what A and B hold after rounding to their dtype is what is taken out
    put_weight(base, exact - layer.delta(exact.dtype), why=f"--lora-init {layer.start}")
    layer.taken = (
        layer.lora_A.weight.detach().to("cpu", copy=True),
        layer.lora_B.weight.detach().to("cpu", copy=True),
    )


def _principal(weight: torch.Tensor, layer: LoRALayer, generator: torch.Generator) -> Pair:
    rank = layer.rank
    if rank > min(weight.shape):
        raise UserError(
            f"--lora-init {layer.start} came with rank {rank} for a weight "
            f"{list(weight.shape)}, at most {min(weight.shape)} was expected: it has no more "
            f"singular values. Lower --lora-rank."
        )
    rounds = layer.start.removeprefix(PISSA).removeprefix("_niter_")
    if rounds:
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            torch.manual_seed(generator.initial_seed())
            left, values, right = torch.svd_lowrank(weight, rank, niter=int(rounds))
        right = right.T
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
    root = (values / layer.scale).sqrt()
    return root.unsqueeze(1) * right, left * root


def restored_weight(layer: LoRALayer, base: nn.Module) -> torch.Tensor:
    """The weight [out, in] that a layer had before PiSSA took a part of it."""
    weight = dense_weight(base)
    exact = weight.to(torch.promote_types(weight.dtype, torch.float32))
    down, up = (value.to(exact) for value in layer.taken)
    return (exact + layer.scale * (up @ down)).to(weight.dtype)
