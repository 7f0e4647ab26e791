"""The places of a process and of its device, which may lag behind the main thread."""

import torch

from stageline import progress
from stageline.pipeline.plan import parse_action
from stageline.training import step as step_module
from tests.helpers.fresh_progress import forget_progress


class FakeEvent:
    """A stand-in of torch's event: recorded at once, reached when the device is there."""

    def __init__(self):
        self.is_reached = False

    def query(self):
        return self.is_reached


def test_a_gpu_that_is_behind_its_main_thread_tells_what_it_waits_for(monkeypatch):
    """Waits of NCCL return at once; the main thread stops later, at the first number it reads."""
    events = []
    monkeypatch.setattr(
        step_module, "recorded_event", lambda device: events.append(FakeEvent()) or events[-1]
    )
    forget_progress()
    progress.at_step(3)
    told = step_module.StepProgress(device=torch.device("cuda"))
    for word in ("1F0", "1F1"):
        with told.wait(parse_action(word)):
            pass
        with told.span(parse_action(word)):
            pass
    with progress.doing("optimizer"):
        seen = [str(progress.where())]
        for event in events:
            event.is_reached = True
            seen.append(str(progress.where()))
        assert progress.where() == progress.place()
    came, passed = "waiting for activations of micro-batch", "forward of micro-batch"
    assert seen == [
        "optimizer",
        *(f"{came} 0 on stage 1", "optimizer", f"{passed} 0 on stage 1", "optimizer"),
        *(f"{came} 1 on stage 1", "optimizer", f"{passed} 1 on stage 1", "optimizer"),
    ]


def test_a_main_thread_that_stopped_for_a_transfer_waits():
    forget_progress()
    told = step_module.StepProgress(device=torch.device("cuda"))
    before, behind = FakeEvent(), FakeEvent()
    marks = iter((before, behind))
    told.mark = lambda: next(marks)
    with told.wait(parse_action("1B2")):
        pass
    before.is_reached = True  # the device never reaches the second mark
    with progress.doing("optimizer"):
        place = progress.where()
    forget_progress()
    assert place.is_waiting and place.operation == "gradients"
