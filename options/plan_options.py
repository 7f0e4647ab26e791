"""The options of the planner that places layers on stages."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class PlanOptions:
    """Planning"""

    plan: bool = option(
        False, "print layers, times and memory of each stage, and advice, then stop; loads nothing"
    )
    device_memory: float | None = option(
        None, "GiB that each rank may fill; default: what its device has", at_least=0
    )
