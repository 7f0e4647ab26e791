"""Train a model in pipeline stages: parse, check, start the ranks, run.

`python train_pp.py --num-stages 2 ...` starts its own processes; under torchrun it joins them.
`--help` lists the options, `--list` the components. Each rank continues in train_engines.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from commands import importing, start
from commands.stages import family_key, with_family_key
from options.train import RunConfig
from parse_args import TrainArguments, parse_train_args
from register import engine_register, train_model_register
from stageline.pipeline.topology import Topology
from stageline.terminal import terminal

if TYPE_CHECKING:
    from commands.run_plan import RunPlan
    from commands.train_data import Data

SHELF = ("train_model", "prompt", "prompt_fn", "dataset", "loss_fn", "optimizer", "tracker")


def main() -> int:
    arguments = start(parse_train_args, *SHELF, recorded=recorded_options)
    with importing():  # after the options: it imports torch
        from commands.run_plan import make_plan

        plan = make_plan(with_family_key(arguments))
    start_ranks(plan)
    with importing():  # not in the process that starts the others
        from commands.train_engines import run_training

    return run_training(plan)


def start_ranks(plan: "RunPlan") -> None:
    """Start the processes of the run, if it needs several; return in each of them."""
    from stageline.distributed.failure_record import tell_run_folder
    from stageline.distributed.launch import launch_if_needed

    if plan.run.plan or plan.run.check_only:
        return  # one process reads the data and tries the parts
    tell_run_folder(plan.run.output_dir)
    terminal.begin_quietly()
    launch_if_needed(plan.topology.num_processes, rules=plan.watchdog_rules)


def recorded_options(run: RunConfig) -> dict[str, Any]:
    """Return the config of the resumed run: names on a hub have their commits there."""
    if not run.resume:
        return {}
    folder = Path(run.output_dir) if run.resume == "auto" else Path(run.resume).parent.parent
    try:
        told = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # the resume checks come later
    return told if isinstance(told, dict) else {}


@train_model_register("auto")
def auto(*, config_path: str, **kwargs: Any) -> tuple[Any, Any, int]:
    """The part that is made for the architecture in config.json."""
    key = family_key(config_path, trust_remote_code=kwargs.get("trust_remote_code", False))
    return train_model_register[key](config_path=config_path, **kwargs)


@engine_register("pipeline")
def pipeline(plan: "RunPlan", data: "Data") -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    from commands.train_engines import run_pipeline

    return run_pipeline(plan, data)


@engine_register("torch")
def torch(plan: "RunPlan", data: "Data") -> int:
    """The same by torch's own schedule classes: their order and their transfers."""
    from commands.train_engines import run_pipeline
    from stageline.pipeline.runner import TorchPipelineRunner

    return run_pipeline(plan, data, runner_class=TorchPipelineRunner)


def streaming_topology(arguments: TrainArguments) -> Topology:
    """Return one process with all stages, by default a decoder layer each."""
    from commands.train_engines import streaming_topology

    return streaming_topology(arguments)


@engine_register("streaming", topology=streaming_topology)
def streaming(plan: "RunPlan", data: "Data") -> int:
    """Stages in host memory, streamed through the devices of this machine by one process."""
    from commands.train_engines import run_streaming

    return run_streaming(plan, data)
