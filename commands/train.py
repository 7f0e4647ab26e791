"""Train a model in pipeline stages: parse, check, start the ranks, run.

`python train_pp.py --num-stages 2 ...` starts its own processes; under torchrun it joins them.
`--help` lists the options, `--list` the components. Each rank continues in train_engines.py.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from commands import start
from commands.stages import family_key, with_family_key
from options.fields import replaced
from options.model import check_vision
from options.train import RunConfig, check_streaming
from parse_args import TrainArguments, parse_train_args
from register import engine_register, train_model_register
from stageline.distributed.terminal import terminal
from stageline.distributed.watchdog import WatchdogRules
from stageline.errors import UserError
from stageline.pipeline.topology import Topology, resolve_topology
from stageline.run_records import read_object

if TYPE_CHECKING:
    from commands.train_data import Data

SHELF = "train_model prompt prompt_fn dataset loss_fn metric optimizer tracker".split()


@dataclass(frozen=True)
class RunPlan(TrainArguments):
    """The settled options of a training run, frozen; only epoch steps and layers come later."""

    topology: Topology  # stages, ranks and replicas


def main() -> int:
    config = start(parse_train_args, *SHELF, recorded=recorded_options)
    config = make_plan(with_family_key(config))
    run = config.run
    if not (run.plan or run.check_only):  # else one process reads the data and tries the parts
        from stageline.distributed.failure_record import tell_run_folder
        from stageline.distributed.launch import launch_if_needed

        tell_run_folder(run.output_dir)
        terminal.begin_quietly()
        rules = WatchdogRules(run.hang_timeout, run.stop_deadline)
        launch_if_needed(config.topology.num_processes, rules=rules)
    from commands.train_engines import run_training  # not in the process that starts the others

    return run_training(config)


def make_plan(config: TrainArguments) -> RunPlan:
    """Settle stages, ranks and replicas; refuse what the schedule or the engine cannot do."""
    run, parts = config.run, config.parts
    world_size = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    check_streaming(run, parts["engine"].key, world_size=world_size or 1)
    changes: dict[str, Any] = {}
    engine = parts["engine"]
    if engine.facts.topology is not None:
        topology = engine.facts.topology(config)
        changes["timeline_step"] = 0  # its backward passes are not those of single stages
    else:
        topology = resolve_topology(
            schedule=run.schedule,
            num_stages=run.num_stages,
            stages_per_rank=run.stages_per_rank,
            dp_degree=run.dp_degree,
            world_size=world_size,
        )
        check_layers(run, topology.num_stages - run.vision_stages)
        topology.schedule.check(
            run.num_micro_batches,
            micro_batch_size=run.micro_batch_size,
            accumulate_steps=run.accumulate_steps,
        )
        if run.compile_layers and topology.schedule.splits_backward:
            raise UserError(
                f"--compile-layers does not go with --schedule {run.schedule}, which computes "
                "gradients of weights late. Use --schedule 1f1b or drop --compile-layers."
            )
        if run.dp_shard and topology.dp_degree == 1:
            raise UserError(
                "--dp-shard needs at least two replicas. Add --dp-degree 2 or drop --dp-shard."
            )
        optimizer = parts["optimizer"]
        if run.dp_shard and optimizer.facts.needs_whole:
            raise UserError(
                f"--optimizer {optimizer.key} needs whole weights. Use --optimizer adamw or drop "
                "--dp-shard."
            )
        if not run.schedule.endswith(".csv"):  # a file may place other numbers on each rank
            changes["stages_per_rank"] = topology.num_stages // topology.num_ranks
    changes |= {"num_stages": topology.num_stages, "dp_degree": topology.dp_degree}
    if run.fp32.logits is None:  # on where the gap between drawing and training counts
        draws = parts["loss_fn"].facts.samples_answers or run.teacher.lmbda > 0
        changes["fp32.logits"] = bool(draws) and run.precision != "fp32"
    run = replaced(run, changes)
    check_vision(run)
    return RunPlan(run, parts, config.imports, topology)


def check_layers(run: RunConfig, num_stages: int) -> None:
    """Refuse more stages than decoder layers in config.json, before a batch is changed for them."""
    # a name on a hub, or a component's own config, has none: it is refused when it is split
    config = read_object(Path(run.config_folder, "config.json"), json.loads)
    text = config.get("text_config", config)
    num_layers = text.get("num_hidden_layers") if isinstance(text, dict) else None
    if run.config_folder and isinstance(num_layers, int) and num_stages > num_layers:
        given, most = num_stages + run.vision_stages, num_layers + run.vision_stages
        raise UserError(
            f"--num-stages {given} is more than the {num_layers} decoder layers of "
            f"{run.config_folder}. Set --num-stages to {most} or less."
        )


def recorded_options(run: RunConfig) -> dict[str, Any]:
    """Return the config of the resumed run: names on a hub have their commits there."""
    if not run.resume:
        return {}
    folder = Path(run.output_dir) if run.resume == "auto" else Path(run.resume).parent.parent
    return read_object(folder / "config.yaml", yaml.safe_load)  # the resume checks come later


@train_model_register("auto")
def auto(*, config_path: str, **kwargs: Any) -> tuple[Any, Any, int]:
    """The part that is made for the architecture in config.json."""
    key = family_key(config_path, trust_remote_code=kwargs.get("trust_remote_code", False))
    return train_model_register[key](config_path=config_path, **kwargs)


@engine_register("pipeline")
def pipeline(config: RunPlan, data: "Data") -> int:
    """Stages on a schedule, forward and backward in turn; one process and device per rank."""
    from commands.train_engines import run_pipeline

    return run_pipeline(config, data)


@engine_register("torch")
def torch(config: RunPlan, data: "Data") -> int:
    """The same by torch's own schedule classes: their order and their transfers."""
    from commands.train_engines import run_pipeline
    from stageline.pipeline.runner import TorchPipelineRunner

    return run_pipeline(config, data, runner_class=TorchPipelineRunner)


def streaming_topology(config: TrainArguments) -> Topology:
    """Return one process with all stages, by default a decoder layer each."""
    from stageline.model_folder import load_config
    from stageline.streaming.runner import streaming_schedule

    run = config.run
    num_stages = run.num_stages
    if num_stages is None:
        path, model_config = run.config_path or run.model_path, None
        if path is not None:
            model_config = load_config(path, trust_remote_code=run.trust_remote_code)
            model_config = model_config.get_text_config(decoder=True)
        num_layers = getattr(model_config, "num_hidden_layers", None)
        if num_layers is None:
            raise UserError(
                f"{path or 'no --model-path'} gives no number of decoder layers for --engine "
                "streaming. Give --num-stages."
            )
        num_stages = num_layers + run.vision_stages
    return Topology(streaming_schedule(num_stages), dp_degree=1)


@engine_register("streaming", topology=streaming_topology)
def streaming(config: RunPlan, data: "Data") -> int:
    """Stages in host memory, streamed through the devices of this machine by one process."""
    from commands.train_engines import run_streaming

    return run_streaming(config, data)
