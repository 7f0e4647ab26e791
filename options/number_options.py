"""The options for numbers that go wrong: skipped steps, loss spikes, and a drill against both."""

from dataclasses import dataclass
from typing import Literal

from options.fields import OptionError, option


@dataclass(kw_only=True)
class NumberOptions:
    """Numbers that go wrong"""

    max_skipped_steps: int = option(
        20, "stop after so many skipped steps in a row; 1: at the first", at_least=1
    )
    spike_sigma: float = option(
        0.0,
        "a loss so many standard deviations above the mean of the last 64 is a spike; 0: none is",
        at_least=0,
    )
    spike_action: Literal["warn", "skip"] = option("warn", "what is done about a loss spike")
    replay_steps: int = option(
        0,
        "every so many steps, run one twice and compare it bit by bit (needs kernels that give the "
        "same bits each time); 0: never",
        at_least=0,
    )


def check_numbers(run: NumberOptions, *, shards: bool = False) -> None:
    """Refuses what would do nothing or cannot work.

    Args:
        shards: replicas share their weights out among them.
    """
    if run.spike_action != "warn" and run.spike_sigma == 0:
        raise OptionError(
            f"--spike-action {run.spike_action} came without --spike-sigma. It says what is done "
            "about a spike, and nothing is one without that option. Add --spike-sigma 6, or leave "
            "--spike-action out."
        )
    if run.replay_steps and shards:
        raise OptionError(
            f"--replay-steps {run.replay_steps} and --dp-shard were both given. Whole gradients "
            "were expected, because those of two runs are compared before replicas exchange "
            "them, and shares exist only afterwards. Leave one of the two out."
        )
