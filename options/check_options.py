"""The options that check_model.py has besides those of a training run."""

from dataclasses import dataclass
from typing import Literal

from options.fields import option
from options.run_options import RunConfig


@dataclass(kw_only=True)
class CheckOptions:
    """Check of a split"""

    check_steps: int = option(3, "optimizer steps that are compared", at_least=1)
    check_tolerance: float | None = option(
        None,
        "largest difference, absolute and relative; default: 0, or 1e-6 where stages share a "
        "weight, whose gradient is then a sum in another order",
        at_least=0,
    )
    check_layers: int | None = option(
        None, "cut the model to its first layers, with random weights", at_least=1
    )
    check_reference: Literal["auto", "transformers", "part"] = option(
        "auto",
        "what the split is compared with: the library's whole model, or the part on one stage; "
        "auto: the library's where it has one",
    )


@dataclass(kw_only=True)
class CheckConfig(CheckOptions, RunConfig):
    """Every option of a check; those of a training run mean the same."""

    output_dir: str | None = option(None, "folder for check.json; default: none", is_output=True)
