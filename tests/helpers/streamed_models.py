"""Small models for tests of the streaming engine, and their results in plain PyTorch."""

from typing import Any

import torch
from torch import nn

from stageline.streaming.engine import RoundPipe
from stageline.streaming.plan import Plan
from stageline.streaming.run_config import RoundPipeRunConfig

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def each_layer(count: int) -> Plan:
    """Return a plan with one layer in each stage."""
    ranges = [range(at, at + 1) for at in range(count)]
    return Plan(tuple(ranges[:-1]), tuple(ranges[::-1]))


def square(output: torch.Tensor, label: Any) -> torch.Tensor:
    """A loss without a label."""
    return output.square().sum()


def loop(model: nn.Module, batch: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Return the sum of losses in plain PyTorch, micro-batch by micro-batch; gradients stay."""
    total = torch.zeros(())
    for part in batch.tensor_split(num_parts):
        loss = square(model(part), None)
        loss.backward()
        total = total + loss.detach()
    return total


def run(
    engine: RoundPipe, batch: torch.Tensor, count: int, num_parts: int = 2, **config: Any
) -> torch.Tensor:
    """Return the same by an engine with `count` layers, one in each stage."""
    settings = RoundPipeRunConfig(
        num_microbatch=num_parts, execute_plan=each_layer(count), **config
    )
    return engine.forward_backward((batch,), loss_fn=square, run_config=settings)


def linears(count: int, seed: int = 3) -> nn.Sequential:
    """Return a row of linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(count)))
