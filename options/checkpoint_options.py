"""Options about which weights of a training run are kept."""

from dataclasses import dataclass
from typing import Literal

from options.fields import option


@dataclass(kw_only=True)
class BestOptions:
    """Best checkpoint"""

    save_best: Literal["none", "loss", "token_accuracy"] = option(
        "none", "keep the weights with the best held-out figure as checkpoints/best"
    )
