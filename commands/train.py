"""Trains a hand-split model, its stages on several processes; every part is chosen by its key.

`python train_pp.py --num-stages 2 ...` starts its own processes; under torchrun it joins them.
`--help` lists the options, `--list` the parts. What it does then is in train_engines.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from parse_args import TrainArguments, parse_train_args
from register import engine_register, freeze_registers, import_shelf

if TYPE_CHECKING:
    from commands.train_data import Data

SHELF = ("pp_models", "prompt", "prompt_fn", "dataset", "loss_fn", "optimizer", "tracker")


def main() -> int:
    import_shelf(*(() if "--list" in sys.argv else SHELF))  # the list shows everything
    arguments = parse_train_args()
    freeze_registers()
    from commands.train_engines import run_training  # after the options: it imports torch

    return run_training(arguments)


@engine_register("pipeline")
def pipeline(arguments: TrainArguments, data: Data) -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    from commands.train_engines import run_pipeline

    return run_pipeline(arguments, data)


@engine_register("streaming", topology="commands.train_run:streaming_topology")
def streaming(arguments: TrainArguments, data: Data) -> int:
    """Stages in host memory, streamed through the devices of this machine by one process."""
    from commands.train_engines import run_streaming

    return run_streaming(arguments, data)
