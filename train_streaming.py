"""The streaming engine for a training run: its stages in host memory, and what it refuses.

train_pp.py registers it; the loop is that of every engine.
"""

import os

import torch

from options.run_options import RunConfig
from options.streaming_options import check_streaming
from parse_args import TrainArguments
from stageline.distributed.process_group import DistributedContext
from stageline.errors import UserError
from stageline.model_folder import load_config
from stageline.pipeline.topology import Topology
from stageline.streaming.host_memory import check_host_memory, host_bytes
from stageline.streaming.lanes import Lane
from stageline.streaming.runner import StreamingRunner, even_plan, streaming_schedule

GIB = 2**30
SHARE_OF_FREE = 0.5  # of a GPU, for weights and gradients; activations take what they need
SHARE_OF_INPUTS = 0.1  # for layers' inputs that wait for the backward pass


def streaming_topology(arguments: TrainArguments) -> Topology:
    """One process with all stages, a decoder layer each unless the user says otherwise.

    Raises:
        UserError: options that streaming cannot follow.
    """
    run = arguments.run
    check_streaming(run, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    if run.num_stages is None:
        run.num_stages = _count_layers(run) + run.vision_stages
    run.dp_degree = 1
    run.timeline_step = 0  # backward passes are not those of single stages
    return Topology(streaming_schedule(run.num_stages), dp_degree=1)


def make_streaming_runner(
    arguments: TrainArguments, models: list[torch.nn.Module], context: DistributedContext
) -> StreamingRunner:
    """The runner over the stages; says what they take."""
    run = arguments.run
    lanes = make_lanes(run.device, budget=run.streaming_budget)
    plan = None
    if run.streaming_stages:
        plan = even_plan(len(models), min(run.streaming_stages, len(models)))
    runner = StreamingRunner(
        models,
        lanes=lanes,
        group=context.pp_group,
        seed=run.seed,
        plan=plan,
        by_layer=run.recompute_grain == "layer",
        stale=run.stale_step,
        pin_model=run.pin_model,
    )
    _check_budget(runner, run.num_micro_batches)
    try:
        check_host_memory(runner.pipe._shelves, torch.float32)
    except MemoryError as error:
        raise UserError(f"the model does not fit the host's memory: {error}") from None
    host = host_bytes(runner.pipe._shelves, torch.float32) / GIB
    names = ", ".join(str(lane.device) for lane in lanes)
    budget = lanes[0].pool.budget
    limit = "all that is there" if budget is None else f"{budget / GIB:.2f} GiB"
    print(
        f"streaming: {len(models)} stages in host memory through {names}; {limit} for weights and "
        f"gradients of each; {host:.2f} GiB of host memory without the optimizer's state",
        flush=True,
    )
    return runner


def _check_budget(runner: StreamingRunner, num_micro_batches: int) -> None:
    try:
        runner.check_plan(num_micro_batches)
    except ValueError as error:
        raise UserError(
            f"the budget of a device (--streaming-budget) is too small: {error}. Raise it, or "
            "cut the model into more stages (--num-stages), a large tower into some of its own "
            "(--vision-stages)."
        ) from None


def make_lanes(device: str, *, budget: float | None) -> list[Lane]:
    """The devices that stages stream through.

    Args:
        device: auto, cpu or cuda.
        budget: GiB for weights and gradients on each; None: half of what is free on a GPU.

    Raises:
        UserError: there is no GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not count:
        raise UserError(
            "--device cuda came, and this machine has no GPU that torch can use. Use --device cpu "
            "or auto, or a machine with a GPU."
        )
    num_bytes = None if budget is None else int(budget * GIB)
    if device == "cpu" or not count:
        return [Lane.cpu(budget=num_bytes)]
    free = [torch.cuda.mem_get_info(index)[0] for index in range(count)]
    return [
        Lane.cuda(
            index,
            budget=num_bytes or int(free[index] * SHARE_OF_FREE),
            inputs_budget=int(free[index] * SHARE_OF_INPUTS),
        )
        for index in range(count)
    ]


def _count_layers(run: RunConfig) -> int:
    path = run.config_path or run.model_path
    config = None if path is None else load_config(path, trust_remote_code=run.trust_remote_code)
    text = None if config is None else config.get_text_config(decoder=True)
    count = getattr(text, "num_hidden_layers", None)
    if count is None:
        raise UserError(
            f"{path or 'no --model-path and no --config-path'} does not say how many decoder "
            "layers the model has; --engine streaming cuts it into stages of one layer each. Give "
            "--num-stages."
        )
    return count
