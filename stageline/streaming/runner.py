"""Run the passes of an optimizer step or an evaluation of a streamed model, without optimizer.

It has the interface of `stageline.pipeline.runner.PipelineRunner`, with all stages in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stageline.modules.chunked_loss import ChunkedLogits
from stageline.modules.layer_seeds import LayerSeeds
from stageline.modules.router_records import counting_tokens
from stageline.pipeline.plan import Action, Kind, grad_flow
from stageline.pipeline.recorder import NO_RECORDER, Recorder
from stageline.pipeline.runner import LocalStages
from stageline.pipeline.schedules import Schedule, make_schedule
from stageline.pipeline.stage_passes import MicroBatch, Tensors, model_inputs, trains
from stageline.stage import Stage
from stageline.streaming.engine import PinModel, RoundPipe
from stageline.streaming.lanes import Lane
from stageline.streaming.plan import Plan, choose, costs_of
from stageline.streaming.recompute import doing_recompute
from stageline.streaming.run_config import RoundPipeRunConfig

Output = torch.Tensor | Tensors
Value = tuple[int, Any]  # (micro-batch, what crosses the border of two stages)
LossFn = Callable[[Output, MicroBatch], torch.Tensor]


class StageWeights:
    """The trained parameters of all stages, by name, as the trainer's optimizer sees them.

    The counterpart of MasterWeights: the optimizer's parameters and the sums of gradients are on
    the host, in float32, and a step runs in the engine's thread.

    Attributes:
        parameters: what the optimizer updates; their `.grad` is there from `take` on.
        shares: of parameters that replicas share out: none.
    """

    def __init__(
        self, pipe: RoundPipe, named_parameters: Mapping[str, nn.Parameter], *, stale: bool
    ) -> None:
        self.model_parameters = dict(named_parameters)
        self.shares: set[str] = set()
        self._pipe = pipe
        self._stale = stale
        self._is_given = False  # the sums belong to a step that may still run
        masters = dict(pipe.optim_named_parameters())
        self._homes = pipe._updated()
        master_of = {id(home.parameter): master for home, master in self._homes}
        assert len(masters) == len(self._homes), "each trained parameter once"
        self.parameters: dict[str, nn.Parameter] = {
            name: master_of[id(parameter)] for name, parameter in named_parameters.items()
        }

    def take(self) -> None:
        """Show the sums of gradients, once the step before and all passes are over."""
        self._pipe._worker.wait()
        for home, master in self._homes:
            master.grad = home.total
        self._is_given = False

    def zero_grad(self) -> None:
        """Forget all gradients; those of a step that may still run are its own."""
        if self._is_given:
            return
        self._pipe._worker.wait()
        for home, master in self._homes:
            home.total = master.grad = None

    def update(self, step: Callable[[], object]) -> None:
        """Run an optimizer step on the gradients that are there."""
        for home, master in self._homes:
            home.total = master.grad  # clipped, or those of another run

        def run() -> None:
            step()
            for _, master in self._homes:
                master.grad = None

        self._is_given = True
        self._pipe.step(run, is_async=self._stale)

    def write_back(self) -> None:
        """Round the optimizer's values into the model."""
        self._pipe.step(lambda: None, is_async=False)

    def take_shares(self) -> None:
        """There are none."""

    def settle(self) -> None:
        """Wait until all steps are done, and the model has their values."""
        self._pipe.synchronize()


@dataclass
class StreamedCall:
    """State of one call, which stages read in all its passes.

    The micro-batches themselves, small integers, are read by each stage where it runs; a device
    gets them once.

    Attributes:
        recorder: sees each forward pass, recomputation too.
        on_output: of an evaluation, gets the output of the last stage, which then goes nowhere.
    """

    seeds: LayerSeeds
    batches: Sequence[MicroBatch] = ()
    recorder: Recorder = NO_RECORDER
    on_output: Callable[[Output, MicroBatch], None] | None = None
    _there: dict[tuple[int, torch.device], MicroBatch] = field(default_factory=dict)

    def batch(self, index: int, device: torch.device, *, with_pixels: bool = False) -> MicroBatch:
        """Return a micro-batch on a device; pixels are large, and only for the first stage.

        Only work of the device's compute queue calls this and reads the result.
        """

        def moved(*, pixels: bool) -> MicroBatch:
            return {
                name: value.to(device, non_blocking=True)
                for name, value in self.batches[index].items()
                if name.startswith("pixel_") == pixels
            }

        if (index, device) not in self._there:
            self._there[index, device] = moved(pixels=False)
        there = self._there[index, device]
        return {**there, **moved(pixels=True)} if with_pixels else dict(there)

    def run(self, stage: Stage, index: int, came: Tensors) -> Output | tuple[()]:
        """The forward pass of a stage; `stage` is a shell whose weights are on the device."""
        is_first, is_last = stage.stage == 0, stage.stage == stage.num_stages - 1
        batch = self.batch(index, came[0].device, with_pixels=is_first)
        with self.recorder.span(Action(stage.stage, Kind.FORWARD, index)):
            self.seeds.start(stage, index)
            with counting_tokens(stage, {} if doing_recompute() else batch):
                made: Any = stage(*came, **model_inputs(batch))
        if is_last and (chunk := getattr(stage, "logits_chunk", 0)):
            # the head's weights are on this device as long as the stage is
            first, *extra = made if isinstance(made, tuple) else (made,)
            logits: Any = ChunkedLogits(first, whole=stage.whole, chunk=chunk)
            made = (logits, *extra) if extra else logits
        if is_last and self.on_output is not None:
            self.on_output(made, batch)
            return ()
        return made if is_last or isinstance(made, tuple) else (made,)

    def loss(self, loss_fn: LossFn, value: Value) -> torch.Tensor:
        """The loss of a micro-batch, right behind its pass through the last stage."""
        index, output = value
        device = (output[0] if isinstance(output, tuple) else output).device
        self.seeds.start_loss()
        return loss_fn(output, self.batch(index, device))


class StageLayer(nn.Module):
    """A stage model as a layer: the same stage that a pipeline has on a rank."""

    def __init__(self, stage: Stage, runner: "StreamingRunner") -> None:
        super().__init__()
        self.stage = stage
        self.runner = runner

    def forward(self, value: Value) -> Value:
        index, came = value
        return index, self.runner.call.run(self.stage, index, came)


class StreamingRunner:
    """Runner that streams stages from host memory through the devices of this machine.

    Args:
        plan: which stages are on a device together; None: chosen by size and budget.
        by_layer: recompute stage by stage, and not all that are on a device together at once.
        stale: an optimizer step runs during the passes of the next one, which use the weights
            before it.

    Attributes:
        local, flow, seeds, num_micro_batches: as of a PipelineRunner.
        call: the one that runs.
    """

    sent_bytes = 0  # to other ranks
    pp_rank = last_stage_rank = 0

    def __init__(
        self,
        models: Sequence[Stage],
        *,
        lanes: Sequence[Lane],
        group: dist.ProcessGroup | None = None,
        seed: int | None = None,
        plan: Plan | None = None,
        by_layer: bool = False,
        stale: bool = False,
        pin_model: PinModel = "alloc",
    ) -> None:
        self.local, self.group = LocalStages(models), group
        self.device = torch.device("cpu")  # the trainer adds up on it
        self.schedule = streaming_schedule(len(models))
        self.flow = grad_flow([trains(model) for model in self.local])
        self.seeds = LayerSeeds(self.local, seed=seed, devices=[lane.device for lane in lanes])
        self.passes: dict[int, Any] = {}
        self.stale = stale
        self._lanes = list(lanes)
        self._plan_of_steps = plan
        self.num_micro_batches = 0
        self.call = StreamedCall(self.seeds)
        self.pipe = RoundPipe(
            nn.Sequential(*[StageLayer(model, self) for model in self.local]),
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
    def loss_order(self) -> list[int]:
        """The micro-batches of the last step, in the order in which the last stage meets them."""
        return list(range(self.num_micro_batches))

    def check_plan(self, num_micro_batches: int) -> None:
        """Raise ValueError, with the layer or stage, for a budget that no step can keep."""
        costs, budget = costs_of(self.pipe._hosted_layers), self._lanes[0].pool.budget
        plan = self._plan_of_steps
        if plan is None:
            lanes = len(self._lanes)
            choose(costs, num_lanes=lanes, num_microbatches=num_micro_batches, budget=budget)
            return
        for stages in plan.backward:
            needed = sum(costs[stage].backward_bytes for stage in stages)
            if budget is not None and needed > budget:
                raise ValueError(
                    f"stages {stages.start} to {stages.stop - 1} together need {needed:,} bytes on "
                    f"the device for weights and gradients, {budget:,} are allowed"
                )

    def make_weights(self, named_parameters: dict[str, nn.Parameter]) -> StageWeights:
        """Make the weights that the optimizer of a `TrainStep` updates."""
        self._weights = StageWeights(self.pipe, named_parameters, stale=self.stale)
        return self._weights

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        loss_fn: LossFn,
        recorder: Recorder = NO_RECORDER,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the summed loss, in float32."""
        count = self.num_micro_batches = len(micro_batches)
        self.call = StreamedCall(self.seeds, micro_batches, recorder)
        try:
            loss = self.pipe.forward_backward(
                loss_fn=lambda value, _: self.call.loss(loss_fn, value),
                run_config=RoundPipeRunConfig(num_microbatch=count),
            )
            self._weights.take()  # behind all passes: queues may be late
        finally:
            self.call = StreamedCall(self.seeds)
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
        """Forward only, with the newest weights; no graph and no output is kept."""
        self.pipe.synchronize()
        was_training = self.local.models[0].training
        self.local.train(False)
        self.call = StreamedCall(self.seeds, micro_batches, recorder, on_output)
        settings = RoundPipeRunConfig(num_microbatch=len(micro_batches), requires_grad=False)
        try:
            self.pipe(roundpipe_run_config=settings)
        finally:
            self.call = StreamedCall(self.seeds)
            self.local.train(was_training)

    def _inputs(self, args: tuple, kwargs: dict, count: int) -> tuple[list[tuple], list[dict]]:
        """Return the inputs of the first stage: the micro-batches are split already."""
        values = [
            ((index, (batch["input_ids"],)),) for index, batch in enumerate(self.call.batches)
        ]
        return values, [{}] * count


def streaming_schedule(num_stages: int) -> Schedule:
    """All stages on one rank, for those who ask where a stage is."""
    if num_stages == 1:
        return make_schedule("gpipe", num_ranks=1)
    return make_schedule("looped_bfs", num_ranks=1, stages_per_rank=num_stages)


def even_plan(num_stages: int, size: int) -> Plan:
    """Return a plan of `size` stages at a time, counted from the last one; fewer at the front."""
    ends = range(num_stages, 0, -size)
    backward = tuple(range(max(0, end - size), end) for end in ends)
    return Plan(tuple(reversed(backward[1:])), backward)
