"""Stage models as the layers of a stream: the same stages that a pipeline has on its ranks.

Between two layers travel the number of the micro-batch and what crosses the border of two stages.
The micro-batch itself, small integers, is read by each stage where it runs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from stageline.modules.layer_seeds import LayerSeeds
from stageline.pipeline.actions import Action, Kind
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.stage_passes import MicroBatch, Tensors, model_inputs

Output = torch.Tensor | Tensors
Value = tuple[int, Any]  # (micro-batch, what crosses the border)


class Call:
    """What holds for all passes of one call; stages ask it.

    Args:
        seeds: settles what a forward pass draws at random; recomputation draws the same again.

    Attributes:
        batches: its micro-batches, on the host.
        recorder: sees each forward pass, recomputation too.
        on_output: of an evaluation, gets the output of the last stage, which then goes nowhere.
    """

    def __init__(self, seeds: LayerSeeds) -> None:
        self.seeds = seeds
        self.batches: Sequence[MicroBatch] = ()
        self.recorder: Recorder = NO_RECORDER
        self.on_output: Callable[[Output, MicroBatch], None] | None = None

    def begin(
        self,
        batches: Sequence[MicroBatch],
        recorder: Recorder,
        on_output: Callable[[Output, MicroBatch], None] | None = None,
    ) -> None:
        """A call begins."""
        self.batches, self.recorder, self.on_output = batches, recorder, on_output

    def end(self) -> None:
        """Forgets everything of the call."""
        self.begin((), NO_RECORDER)

    def batch(self, index: int, device: torch.device, *, with_pixels: bool = False) -> MicroBatch:
        """A micro-batch on a device; pixels are large, and for the first stage alone."""
        return {
            name: value.to(device, non_blocking=True)
            for name, value in self.batches[index].items()
            if with_pixels or not name.startswith("pixel_")
        }

    def run(self, stage: nn.Module, index: int, came: Tensors) -> Output | tuple[()]:
        """The forward pass of a stage; `stage` is a shell whose weights are on the device."""
        is_first, is_last = stage.stage == 0, stage.stage == stage.num_stages - 1
        batch = self.batch(index, came[0].device, with_pixels=is_first)
        with self.recorder.span(Action(stage.stage, Kind.FORWARD, index)):
            self.seeds.start(stage, index)
            made = stage(*came, **model_inputs(batch))
        if is_last and self.on_output is not None:
            self.on_output(made, batch)
            return ()
        return made if is_last or isinstance(made, tuple) else (made,)

    def loss(self, loss_fn: Callable[..., torch.Tensor], value: Value) -> torch.Tensor:
        """The loss of a micro-batch, right behind its pass through the last stage."""
        index, output = value
        device = (output[0] if isinstance(output, tuple) else output).device
        self.seeds.start_loss()
        return loss_fn(output, self.batch(index, device))


class StageLayer(nn.Module):
    """A stage model as a layer."""

    def __init__(self, stage: nn.Module, call: Call) -> None:
        super().__init__()
        self.stage = stage
        self.call = call

    def forward(self, value: Value) -> Value:
        index, came = value
        return index, self.call.run(self.stage, index, came)
