"""The actions that a schedule consists of, and their spelling in a file. Knows no rank, no torch.

An action is one pass of one stage over one micro-batch, spelled as torch spells it: `2F0` is the
forward pass of micro-batch 0 through stage 2.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a stage does with a micro-batch.

    FORWARD; BACKWARD in one piece; or in two: INPUT_GRAD, which the stage before waits for, and
    WEIGHT_GRAD, for which nobody waits.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"


class Action(NamedTuple):
    """`kind` of pass of `stage` over `micro_batch`."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def parse_action(text: str) -> Action | None:
    """Reads `2F0`; None for any other text."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        return None
    stage, kind, micro_batch = match.groups()
    return Action(int(stage), Kind(kind), int(micro_batch))
