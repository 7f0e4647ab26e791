"""The options of a run on several machines."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class MachineOptions:
    """Several machines"""

    lost_after: float = option(
        30.0, "seconds without a sign of life after which a machine is lost; 0: never", at_least=0
    )
