"""Which segments of a corpus a training run has seen, by its options and its checkpoint."""

from pathlib import Path
from typing import Any

import numpy

from options.corpus_args import run_folder
from options.corpus_options import FindTrainedConfig
from stageline.checkpoint.find import step_folders
from stageline.checkpoint.state_load import SavedState
from stageline.corpus.mixture import Mixture
from stageline.corpus.trained import find_trained
from stageline.errors import UserError


def segments_seen(run: FindTrainedConfig, dataset: Any) -> numpy.ndarray:
    """Numbers of the segments, sorted.

    Args:
        dataset: the rows that the run drew from, as its dataset part makes them.

    Raises:
        UserError: neither a checkpoint nor options say how many steps were done, or the run drew
            from no corpus.
    """
    if not hasattr(dataset, "sizes"):
        raise UserError(
            "the run drew from another dataset than a corpus. One with --dataset corpus was "
            "expected, because only its segments can be found and removed: give another --run-path."
        )
    position = position_of(run)
    mixture = Mixture(
        dataset.sizes,
        counts=run.global_batch_distributed,
        weights=run.mixture_weights,
        batch=position["batch_rows"],
        drop_mode=run.drop_mode or 0,
        seed=run.seed,
    )
    first, last = 0, position["epoch"] * len(mixture) + position["batch"]
    if run.epoch is not None:
        first = run.epoch * len(mixture)
        last = min(last, first + len(mixture))
    return find_trained(
        mixture, last, first_batch=first, ranges=dataset.ranges, packed=dataset.packed
    )


def position_of(run: FindTrainedConfig) -> dict[str, int]:
    """Epoch and batch that would come next, and the rows of a batch."""
    if run.run_path is not None and run.steps is None:
        return position_in(Path(run.run_path))
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("steps", "batch_size")
        if getattr(run, name) is None
    ]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} came neither on the command line nor from --run-path. They "
            "were expected, because they say how many rows the run has drawn: give them, or the "
            "run's folder."
        )
    rows = run.batch_size * run.dp_degree
    batch = sum(run.global_batch_distributed or ()) or rows
    drawn = run.steps * run.accumulate_steps * rows
    return {"batch_rows": batch, "epoch": 0, "batch": drawn // batch}


def position_in(path: Path) -> dict[str, int]:
    """The position that the last checkpoint of a run noted, or the one at `path`.

    Raises:
        UserError: there is no checkpoint, or it is of a run on another kind of dataset.
    """
    folders = [path]
    if path.absolute() == run_folder(str(path)):
        folders = [folder for _, folder in step_folders(path / "checkpoints")]
    if not folders:
        raise UserError(
            f"--run-path {path} has no checkpoint. One was expected, because it says how far the "
            "run came: give --steps."
        )
    position = SavedState(folders[0]).facts.get("position")
    if not isinstance(position, dict) or "batch_rows" not in position:
        raise UserError(
            f"{folders[0]} does not say which rows came. A checkpoint of a run with --dataset "
            "corpus was expected, because other datasets are drawn in other ways."
        )
    return position
