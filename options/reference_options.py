"""Options about the model that a loss over preferences compares with."""

from dataclasses import dataclass
from typing import Literal

from options.fields import option


@dataclass(kw_only=True)
class ReferenceOptions:
    """Reference of preferences"""

    reference: Literal["auto", "adapters_off", "precompute", "columns"] = option(
        "auto",
        "log-probabilities of the start model: adapters_off runs the stages without LoRA before "
        "each step; precompute: once, before the first one; columns: the rows bring them; auto: "
        "columns where they are, adapters_off where adapters alone are trained, else precompute",
    )
