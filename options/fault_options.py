"""The options of how a run ends when it hangs or is asked to stop."""

from dataclasses import dataclass

from options.fields import option


@dataclass(kw_only=True)
class FaultOptions:
    """Faults"""

    hang_timeout: float = option(
        600.0,
        "seconds that one operation of a step may take before the run ends as hung; it must exceed "
        "the longest single pass, compile or save; 0: never",
        at_least=0,
    )
    stop_deadline: float = option(
        120.0,
        "seconds between a signal to stop and the end of the step and its save; 0: any number",
        at_least=0,
    )
