"""Runs an optimizer step's passes, or an evaluation, of a model that streams. Knows no optimizer.

It has the interface of `stageline.pipeline.runner.PipelineRunner`, with all stages in one process.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline.modules.layer_seeds import LayerSeeds
from stageline.pipeline.borders import check_borders, describe_borders
from stageline.pipeline.local_stages import LocalStages
from stageline.pipeline.plan import grad_flow
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.schedules import Schedule, make_schedule
from stageline.pipeline.stage_passes import MicroBatch
from stageline.streaming.engine import PinModel, RoundPipe
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import Plan
from stageline.streaming.plan_choice import choose
from stageline.streaming.run_config import RoundPipeRunConfig
from stageline.streaming.shelf_costs import costs_of
from stageline.streaming.stage_weights import StageWeights
from stageline.streaming.staged import Call, Output, StageLayer

LossFn = Callable[[Output, MicroBatch], torch.Tensor]


class StreamingRunner:
    """Streams stages, all of them in host memory, through the devices of this machine.

    Args:
        models: the stage models, on the host, in their order.
        lanes: the devices.
        group: a process group of this process alone.
        seed: of what training steps draw at random; None leaves the generators alone.
        plan: which stages are on a device together; None: chosen by size and budget.
        by_layer: recompute stage by stage, and not all that are on a device together at once.
        stale: an optimizer step runs beside the passes of the next one.
        pin_model: how host memory is made fast for a GPU, see `RoundPipe`.

    Attributes:
        local, flow, seeds, num_micro_batches: as of a PipelineRunner.
        passes: there are none of single stages.
        pipe: the engine.
    """

    sent_bytes = 0  # to other ranks
    pp_rank = 0

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        lanes: Sequence[Lane],
        group: dist.ProcessGroup | None = None,
        seed: int | None = None,
        plan: Plan | None = None,
        by_layer: bool = False,
        stale: bool = False,
        pin_model: PinModel = "alloc",
    ) -> None:
        self.local = LocalStages(models)
        self.device = torch.device("cpu")  # of what the trainer adds up
        self.group = group
        self.schedule = streaming_schedule(len(models))
        facts = [describe_borders(model) for model in self.local]
        check_borders(facts)
        self.flow = grad_flow([fact.trains for fact in facts])
        self.seeds = LayerSeeds(self.local, seed=seed, device=lanes[0].device)
        self.passes: dict[int, Any] = {}
        self.stale = stale
        self._lanes = list(lanes)
        self._plan_of_steps = plan
        self.num_micro_batches = 0
        self._call = Call(self.seeds)
        self.pipe = RoundPipe(
            nn.Sequential(*[StageLayer(model, self._call) for model in self.local]),
            optim_dtype=torch.float32,
            name="the trained model",
            model_run_config=RoundPipeRunConfig(
                preserve_rng_state=False,  # the seeds of layers do it, as in a pipeline
                recompute_grain="layer" if by_layer else "stage",
                split_input=self._inputs,
                split_label=lambda label, count: [None] * count,
                merge_output=lambda outputs: None,
                execute_plan=plan,
            ),
            pin_model=pin_model,
            lanes=lanes,
        )

    @property
    def last_stage_rank(self) -> int:
        """The global rank that holds the last stage."""
        return 0

    @property
    def loss_order(self) -> list[int]:
        """The micro-batches of the last step, in the order in which the last stage meets them."""
        return list(range(self.num_micro_batches))

    def check_plan(self, num_micro_batches: int) -> None:
        """Refuses a budget that no step can keep.

        Raises:
            ValueError: names the layer or stage that does not fit.
        """
        costs, budget = costs_of(self.pipe._shelves), self._lanes[0].pool.budget
        plan = self._plan_of_steps
        if plan is None:
            choose(
                costs,
                num_lanes=len(self._lanes),
                num_microbatches=num_micro_batches,
                budget=budget,
            )
        for stages in plan.backward if plan is not None and budget is not None else ():
            needed = sum(costs[stage].backward_bytes for stage in stages)
            if needed > budget:
                raise ValueError(
                    f"stages {stages.start} to {stages.stop - 1} together need {needed:,} bytes on "
                    f"the device for weights and gradients, {budget:,} are allowed"
                )

    def make_weights(self, named_parameters: dict[str, nn.Parameter]) -> StageWeights:
        """What the optimizer of a `TrainStep` updates."""
        self._weights = StageWeights(self.pipe, named_parameters, stale=self.stale)
        return self._weights

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        loss_fn: LossFn,
        recorder: Recorder = NO_RECORDER,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients add up in the weights.

        Args:
            loss_fn: (output of the last stage, micro-batch) -> its share of the loss.

        Returns:
            The summed loss, a scalar in float32.
        """
        count = self.num_micro_batches = len(micro_batches)
        self._call.begin(micro_batches, recorder)
        try:
            loss = self.pipe.forward_backward(
                loss_fn=lambda value, _: self._call.loss(loss_fn, value),
                run_config=RoundPipeRunConfig(num_microbatch=count),
            )
            self._weights.take()  # behind all passes: queues may be late
        finally:
            self._call.end()
            self.seeds.end()
        return loss.float()

    @torch.no_grad()
    def evaluate(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        on_output: Callable[[Output, MicroBatch], None],
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        """Forward only, with the newest weights; no graph and no output is kept.

        Args:
            on_output: called with the output of the last stage for each micro-batch.
        """
        self.pipe.synchronize()
        was_training = self.local.training
        self.local.train(False)
        self._call.begin(micro_batches, recorder, on_output)
        settings = RoundPipeRunConfig(num_microbatch=len(micro_batches), requires_grad=False)
        try:
            self.pipe(roundpipe_run_config=settings)
        finally:
            self._call.end()
            self.local.train(was_training)

    def _inputs(self, args: tuple, kwargs: dict, count: int) -> tuple[list[tuple], list[dict]]:
        """What the first stage begins with: the micro-batches are cut already."""
        values = [
            ((index, (batch["input_ids"],)),) for index, batch in enumerate(self._call.batches)
        ]
        return values, [{}] * count


def streaming_schedule(num_stages: int) -> Schedule:
    """All stages on one rank, for those who ask where a stage is."""
    if num_stages == 1:
        return make_schedule("gpipe", num_ranks=1)
    return make_schedule("looped_bfs", num_ranks=1, stages_per_rank=num_stages)


def even_plan(num_stages: int, size: int) -> Plan:
    """So many stages at a time on a device, counted from the last one; fewer at the front."""
    ends = range(num_stages, 0, -size)
    backward = tuple(range(max(0, end - size), end) for end in ends)
    return Plan(tuple(reversed(backward[1:])), backward)
