"""The options of a run about lengths: the order of micro-batches, padding, packing."""

from dataclasses import dataclass
from typing import Literal

from options.fields import option


@dataclass(kw_only=True)
class ShapeOptions:
    """Shapes"""

    micro_batch_order: Literal["sorted", "given"] = option(
        "sorted", "sorted: samples of near-equal length travel together; given: as drawn"
    )
    pad_to_multiple_of: int = option(
        1, "round the length of rows up to this, within --max-token-num", at_least=1
    )
    packing: bool = option(
        False, "several samples a row of --max-token-num tokens; none sees another"
    )
