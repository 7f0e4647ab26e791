"""Notes each pass of a step where failure reports and the watchdog look, and asks for faults there.

It stands before the recorder of the timeline, which sees the same passes: most steps have none.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stageline import chaos, progress
from stageline.pipeline.actions import Action, Kind
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.runner import MicroBatch

_shapes: list[tuple[int, ...]] = []
OPERATIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "backward",
    Kind.WEIGHT_GRAD: "backward",
}


class StepProgress(Recorder):
    """A recorder that tells `stageline.progress` what it sees, then another recorder.

    Args:
        inner: times the passes.
        names: other names for the operations, such as "evaluation" for "forward".
    """

    def __init__(self, inner: Recorder = NO_RECORDER, **names: str) -> None:
        super().__init__(inner.device, rank=inner.rank)
        self.inner = inner
        self.names = {kind: names.get(name, name) for kind, name in OPERATIONS.items()}

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """A pass, with the point of the same name."""
        stage, kind, index = action
        name = self.names[kind]
        with progress.doing(name, stage=stage, micro_batch=index), self.inner.span(action):
            chaos.point(name)
            yield

    @contextmanager
    def wait(self, action: Action) -> Iterator[None]:
        """The time that a pass waits for a tensor of another rank."""
        stage, kind, index = action
        what = "activations" if kind == Kind.FORWARD else "gradients"
        with (
            progress.doing(what, stage=stage, micro_batch=index, is_waiting=True),
            self.inner.wait(action),
        ):
            yield


def begin_step(step: int, micro_batches: Sequence[MicroBatch] = ()) -> None:
    """Notes how many optimizer steps are done when the next one begins, and what it is made of."""
    progress.at_step(step)
    _shapes[:] = [tuple(batch["input_ids"].shape) for batch in micro_batches]
    chaos.point("step")


def current_shapes() -> list[tuple[int, ...]]:
    """[rows, tokens] of each micro-batch of the running step."""
    return list(_shapes)
