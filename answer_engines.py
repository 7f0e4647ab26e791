"""What answers in evaluate.py and infer.py: a model here, a pipeline of stages, vLLM, an endpoint.

All give the model parts something to ask, and the run a processor; which one it was is in
engine.json beside the predictions, and changes no greedy answer but for rounding.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from decode_run import DTYPES, num_processes, open_decoding
from options.engine_options import ENGINE_KEYS
from options.lora_options import adapter_arguments
from parse_args import Arguments
from placement_run import placement_arguments, show_plan
from stageline.checkpoint.plain_folder import plain_folder
from stageline.distributed.launch import launch_if_needed
from stageline.distributed.meeting import launchers_store
from stageline.errors import UserError
from stageline.evaluation.replicas import Replicas
from stageline.inference.vllm_engine import check_vllm, open_vllm
from stageline.model_folder import load_config

SECONDS_TO_MEET = 600.0
EXPORTED = "~/.cache/stageline/exported"  # what vLLM reads


@dataclass(frozen=True)
class Opened:
    """What answers.

    Attributes:
        model: what a model part gets: a model, an endpoint or an engine.
        facts: for the report: where it runs.
        has_own_batches: it takes many samples at once and batches them itself.
        config: of the model, where there is one.
    """

    model: Any
    processor: Any
    facts: dict[str, Any] = field(default_factory=dict)
    has_own_batches: bool = False
    config: Any = None


def find_place(arguments: Arguments) -> Replicas:
    """Starts the processes of the run, if it needs several; returns in each of them.

    Raises:
        UserError: processes and replicas do not fit, or there are too few GPUs.
    """
    run = arguments.run
    _check_builder(arguments)
    if run.engine == "pipeline":
        wanted = num_processes(run, run.device)
    else:
        wanted = run.num_replicas = run.num_replicas or 1
    launch_if_needed(wanted)
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != wanted:
        raise UserError(
            f"{world_size} processes were started for --num-replicas {run.num_replicas}. {wanted} "
            "were expected, because each replica has a process of its own: leave torchrun out, or "
            "correct the numbers."
        )
    num_stages = wanted // run.num_replicas
    return Replicas(
        index=rank // num_stages,
        count=run.num_replicas,
        is_first=rank % num_stages == 0,
        store=_store(rank, world_size),
    )


def _check_builder(arguments: Arguments) -> None:
    """Refuses options of a builder part that an engine does not call."""
    engine, builder = arguments.run.engine, arguments.parts["builder"]
    if engine not in ("pipeline", "vllm"):
        return
    defaults = inspect.signature(builder.part).parameters
    given = [
        f"--builder.{name} {value}"
        for name, value in builder.kwargs.items()
        if name in defaults and value != defaults[name].default
    ]
    if builder.key != ENGINE_KEYS[engine]["builder"]:
        given.insert(0, f"--builder {builder.key}")
    if given:
        raise UserError(
            f"{' '.join(given)} came with --engine {engine}. It was expected with --engine "
            "device_map alone, because this engine builds its model by itself: leave it out."
        )


def _num_gpus(device: str) -> int:
    # is_available() would start the driver, which then no longer looks at CUDA_VISIBLE_DEVICES
    return 0 if device == "cpu" else torch.cuda.device_count()


def _store(rank: int, world_size: int) -> Any:
    if world_size == 1:
        return None
    store = launchers_store(rank, world_size, timeout=SECONDS_TO_MEET)
    return store or next(dist.rendezvous("env://", rank, world_size))[0]


@contextmanager
def opened(arguments: Arguments, replicas: Replicas) -> Iterator[Opened | None]:
    """What answers; None in a process that only computes for its replica, once it has done so."""
    engine = arguments.run.engine
    if engine == "pipeline":
        with _pipeline(arguments) as found:
            yield found
    elif engine == "vllm":
        yield _vllm(arguments)
    else:
        _take_own_gpus(arguments.run, replicas)
        yield _whole(arguments)


def _whole(arguments: Arguments) -> Opened:
    """What the builder part makes: a model over some devices, or an endpoint."""
    model, processor, device_map = build_model(arguments)
    facts = {"device_map": {name: str(place) for name, place in device_map.items()}}
    return Opened(model, processor, facts, config=getattr(model, "config", None))


def build_model(arguments: Arguments) -> tuple[Any, Any, dict[str, Any]]:
    """What the builder part makes: model, processor and device_map."""
    builder = arguments.parts["builder"]
    return builder.part(arguments.run.model_path, **_builder_arguments(arguments))


def plan_model(arguments: Arguments) -> int:
    """Prints what would lie on which device; returns the exit code."""
    show_plan(arguments.parts["builder"], arguments.run.model_path, **_builder_arguments(arguments))
    return 0


def _builder_arguments(arguments: Arguments) -> dict[str, Any]:
    run, builder = arguments.run, arguments.parts["builder"]
    return {
        **placement_arguments(run, builder.part),
        "dtype": DTYPES[run.precision],
        "num_devices": run.num_devices,
        "device": run.device,
        **adapter_arguments(run),
        "trust_remote_code": run.trust_remote_code,
        **builder.kwargs,
    }


def _take_own_gpus(run: Any, replicas: Replicas) -> None:
    """Leaves this process the GPUs of its replica; before any of them is touched."""
    num_gpus = _num_gpus(run.device)
    if replicas.count == 1 or num_gpus == 0:
        return
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = shown.split(",") if shown else [str(index) for index in range(num_gpus)]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", replicas.count))  # replicas of this machine
    each = run.num_devices or len(gpus) // here
    if each * here > len(gpus) or each == 0:
        raise UserError(
            f"{here} replicas with {max(each, 1)} devices each, and this machine shows {len(gpus)} "
            "GPUs. As many were expected, because replicas share none: lower --num-replicas or "
            "--num-devices, look at CUDA_VISIBLE_DEVICES, or take --device cpu."
        )
    first = int(os.environ.get("LOCAL_RANK", replicas.index)) * each
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + each])


@contextmanager
def _pipeline(arguments: Arguments) -> Iterator[Opened | None]:
    with open_decoding(arguments.run) as found:
        if found is None:
            yield None
            return
        engine = found.engine
        facts = {
            "num_stages": engine.chain.num_stages,
            "max_running": engine.limits.max_rows,
            "num_groups": engine.limits.num_groups or "measured",
        }
        yield Opened(engine, found.processor, facts, has_own_batches=True, config=found.config)


def _vllm(arguments: Arguments) -> Opened:
    """vLLM on a plain folder, exported first; it answers and scores as a decoding engine does."""
    run = arguments.run
    check_vllm()  # before an export
    folder = plain_folder(
        run.model_path,
        cache=EXPORTED,
        adapter_paths=run.adapter_path or (),
        adapter_weights=run.adapter_weights,
        trust_remote_code=run.trust_remote_code,
    )
    engine = open_vllm(
        folder,
        dtype=DTYPES[run.precision],
        num_devices=run.num_devices,
        seed=run.seed,
        max_length=run.max_length,
        images_per_prompt=run.max_images_per_sample,
        trust_remote_code=run.trust_remote_code,
    )
    config = load_config(folder, trust_remote_code=run.trust_remote_code)
    facts = {"tensor_parallel_size": engine.num_devices, "folder": str(folder)}
    return Opened(engine, engine.processor, facts, has_own_batches=True, config=config)
