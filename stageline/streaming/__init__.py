"""Host-memory streaming: trains models whose weights do not fit the devices.

Has the names of RoundPipe: `import stageline.streaming as roundpipe`; docs/roundpipe.md.
"""

from stageline.streaming.engine import RoundPipe
from stageline.streaming.plan import Plan
from stageline.streaming.recompute import doing_recompute, get_recompute_data, save_for_recompute
from stageline.streaming.run_config import RoundPipeRunConfig
from stageline.streaming.wrap import AutoRoundPipe, wrap_model_to_roundpipe

__all__ = [
    "AutoRoundPipe",
    "Plan",
    "RoundPipe",
    "RoundPipeRunConfig",
    "doing_recompute",
    "get_recompute_data",
    "save_for_recompute",
    "wrap_model_to_roundpipe",
]
