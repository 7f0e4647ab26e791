"""The model that benchmarks/streaming.py trains, its batches and its loss."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.nn import functional

from stageline.streaming.host_weights import host_bytes, make_host_weights

VOCABULARY = 32000
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads
    "dot": (64, 128, 16, 2, 2),  # where the engine itself is what takes time
    "tiny": (256, 688, 6, 4, 2),
    "1b": (2048, 5632, 22, 32, 4),
    "3b": (3200, 8640, 26, 32, 32),
    "4b": (4096, 11008, 20, 32, 32),
    "5b": (4096, 11008, 24, 32, 32),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
    "30b": (6656, 17920, 60, 52, 52),
}
RANK = 16


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all peers share.

    Attributes:
        budget: bytes of the device for weights and gradients (ours).
    """

    size: str
    lora: bool
    rows: int
    sequence: int
    micro_batches: int
    device: str
    budget: int
    steps: int = 4
    trace: str = ""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence

    @property
    def vocabulary(self) -> int:
        return 1024 if self.size in ("dot", "tiny") else VOCABULARY


class LowRank(nn.Module):
    """A frozen linear layer with a trained addition of low rank."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, inner.out_features, bias=False)

    def forward(self, value):
        return self.inner(value) + self.up(self.down(value))


class Block(nn.Module):
    """A decoder layer of Llama's shape."""

    def __init__(self, shape, *, lora: bool) -> None:
        super().__init__()
        hidden, inner, _, self.heads, self.groups = shape
        self.size = hidden // self.heads
        keys = self.groups * self.size
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query, self.key = linear(hidden, hidden, lora), linear(hidden, keys, lora)
        self.value, self.out = linear(hidden, keys, lora), linear(hidden, hidden, lora)
        self.gate, self.up = linear(hidden, inner, lora), linear(hidden, inner, lora)
        self.down = linear(inner, hidden, lora)
        if lora:
            self.norm1.requires_grad_(False)
            self.norm2.requires_grad_(False)

    def forward(self, hidden):
        value = self.norm1(hidden)
        rows, length, _ = value.shape
        query, key, values = (
            layer(value).view(rows, length, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotated(query), rotated(key)
        attended = functional.scaled_dot_product_attention(
            query, key, values, is_causal=True, enable_gqa=self.groups != self.heads
        )
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, length, -1))
        value = self.norm2(hidden)
        return hidden + self.down(functional.silu(self.gate(value)) * self.up(value))


class Head(nn.Module):
    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, hidden):
        return self.out(self.norm(hidden))


def linear(inputs: int, outputs: int, lora: bool) -> nn.Module:
    made = nn.Linear(inputs, outputs, bias=False)
    return LowRank(made) if lora else made


def rotated(value):
    """Positions turned into the pairs of each head."""
    length, size = value.shape[-2:]
    powers = torch.arange(0, size, 2, device=value.device) / size
    angles = torch.arange(length, device=value.device)[:, None] / 10000**powers
    cosine, sine = angles.cos().to(value.dtype), angles.sin().to(value.dtype)
    first, second = value.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def make_model(setup: Setup, device: str) -> nn.Sequential:
    """Random weights, the same for each peer on the same device; `meta` has none."""
    shape = SHAPES[setup.size]
    layers: list[nn.Module] = []
    with torch.device("meta"):
        layers.append(nn.Embedding(setup.vocabulary, shape[0]).to(setup.dtype))
        for _ in range(shape[2]):
            layers.append(Block(shape, lora=setup.lora).to(setup.dtype))
        layers.append(Head(shape[0], setup.vocabulary).to(setup.dtype))
    if setup.lora:
        layers[0].requires_grad_(False)
        layers[-1].requires_grad_(False)
    model = nn.Sequential(*layers)
    if device != "meta":
        _fill(model.to_empty(device=device))
    return model


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Small random numbers; of a large weight a run of them again and again, which is quick."""
    draw = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        run = 0.02 * torch.randn(min(parameter.numel(), 1 << 20), generator=draw)
        run, flat = run.to(parameter), parameter.view(-1)
        whole = len(flat) // len(run) * len(run)
        flat[:whole].view(-1, len(run)).copy_(run)
        flat[whole:].copy_(run[: len(flat) - whole])


def stated_host_bytes(setup: Setup) -> int:
    """What the engine states for the model, and two moments of AdamW in float32."""
    model = make_model(setup, "meta")
    hosted_layers = make_host_weights(model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    return host_bytes(hosted_layers, torch.float32) + 8 * trained


def loss_of(setup: Setup):
    def loss_fn(logits, labels):
        flat = logits.flatten(0, 1).float()
        return functional.cross_entropy(flat, labels.flatten(), reduction="sum") / setup.tokens

    return loss_fn


def batch_of(setup: Setup, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, setup.vocabulary, (setup.rows, setup.sequence), generator=draw)
