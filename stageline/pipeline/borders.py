"""What crosses the border between two stages, and whether both sides agree on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from stageline.errors import UserError

PROBE = (2, 8)  # micro-batch size and tokens, for which neighbours compare


@dataclass(frozen=True)
class BorderFacts:
    """One stage's side of its borders.

    Attributes:
        trains: it has a trainable parameter.
        takes, gives: shapes and types of what comes and goes, for the probe.
    """

    stage: int
    trains: bool
    takes: list[str]
    gives: list[str]


def describe_borders(model: nn.Module) -> BorderFacts:
    """The facts of a stage model."""
    return BorderFacts(
        stage=model.stage,
        trains=any(parameter.requires_grad for parameter in model.parameters()),
        takes=_describe(model.get_example_input(*PROBE)),
        gives=_describe(model.get_example_output(*PROBE)),
    )


def batch_input(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a stage receives for one micro-batch, on the meta device."""
    if hasattr(model, "get_batch_input"):
        return model.get_batch_input(batch)
    return model.get_example_input(*batch["input_ids"].shape)


def batch_output(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a stage sends on for one micro-batch."""
    if hasattr(model, "get_batch_output"):
        return model.get_batch_output(batch)
    return model.get_example_output(*batch["input_ids"].shape)


def check_borders(facts: Sequence[BorderFacts]) -> None:
    """Compares neighbours.

    Raises:
        UserError: a stage gives something else than the next one takes.
    """
    for before, behind in zip(facts, facts[1:], strict=False):
        if before.gives != behind.takes:
            raise UserError(
                f"stage {before.stage} sends {before.gives}, stage {behind.stage} expects "
                f"{behind.takes} for a micro-batch of {PROBE}: get_example_input and "
                "get_example_output of the stage model must agree."
            )


def _describe(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
