"""The options of a run that belong to no part: their names, defaults, limits and help texts.

Plain dataclasses and the checks that need nothing but numbers and paths. Reading a command line is
in parse_args.py. Options of one part are not here: they are the signature of that part.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


class OptionError(ValueError):
    """An option, or a combination of options, that cannot be run."""

    exit_code = 2


def option(
    default: Any,
    help_text: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    is_path: bool = False,
    is_output: bool = False,
) -> Any:
    """A field of an options class: default, help text, and the limits that are checked.

    Args:
        is_path: a file or folder that has to exist.
        is_output: a folder that the run makes.
    """
    limits = {"at_least": at_least, "at_most": at_most, "below": below}
    kind = {"is_path": is_path, "is_output": is_output}
    return field(default=default, metadata={"help": help_text, "limits": limits, **kind})


@dataclass(kw_only=True)
class SharedOptions:
    """Files and machine"""

    model_path: str | None = option(
        None, "checkpoint folder with *.safetensors; without it weights start random", is_path=True
    )
    dataset_path: str | None = option(None, "file or folder of the dataset", is_path=True)
    output_dir: str = option(
        "runs/train", "run folder: config, logs, plots, checkpoints", is_output=True
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes GPUs where there are any")
    bf16: bool = option(False, "compute in bfloat16")
    fp16: bool = option(False, "compute in float16")
    seed: int = option(0, "seed of initialisation, order and dropout", at_least=0)
    visual_gpu_ratio: float = option(
        0.0, "share of the first device that the vision tower takes", at_least=0, at_most=1
    )
    trust_remote_code: bool = option(False, "run Python code that lies in the model folder")
    num_workers: int = option(0, "processes that load data, per rank", at_least=0)
    check_only: bool = option(False, "check everything that can be checked, then stop")


@dataclass(kw_only=True)
class TrainPathOptions:
    """Model files"""

    config_path: str | None = option(
        None, "config.json or its folder; default: --model-path", is_path=True
    )
    processor_path: str | None = option(
        None, "tokenizer or processor folder; default: --model-path", is_path=True
    )


@dataclass(kw_only=True)
class BatchOptions:
    """Batches"""

    batch_size: int = option(16, "samples of one schedule step", at_least=1)
    micro_batch_size: int = option(2, "samples that travel together", at_least=1)
    accumulate_steps: int = option(1, "batches of one optimizer step", at_least=1)
    max_token_num: int = option(512, "longest sample, in tokens", at_least=1)


@dataclass(kw_only=True)
class FreezeOptions:
    """What is trained"""

    frozen_vit: bool = option(False, "keep the vision tower as it is")
    frozen_mlp: bool = option(False, "keep the projector as it is")
    frozen_llm: bool = option(False, "keep the language model as it is")
    frozen_lm_head: bool = option(False, "keep the output layer as it is")
    vit_lora_num: int = option(0, "LoRA adapters stacked on the vision tower", at_least=0)
    mlp_lora_num: int = option(0, "LoRA adapters stacked on the projector", at_least=0)
    llm_lora_num: int = option(0, "LoRA adapters stacked on the language model", at_least=0)
    lora_rank: int = option(8, "rank of an adapter", at_least=1)
    lora_alpha: float = option(16.0, "an adapter's output is scaled by alpha / rank", at_least=0)
    lora_dropout: float = option(0.0, "dropout before an adapter", at_least=0, below=1)
    lora_target: list[str] | None = option(
        None, "last names of the wrapped linear layers, q_proj,v_proj; default: all"
    )


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimization"""

    learning_rate: float = option(1e-4, "highest learning rate", at_least=0)
    min_lr: float = option(0.0, "learning rate at the last step", at_least=0)
    warmup_steps: int = option(0, "optimizer steps of warm-up", at_least=0)
    warmup_start_lr: float = option(0.0, "learning rate at the first step", at_least=0)
    total_steps: int = option(100, "optimizer steps of the run", at_least=1)
    weight_decay: float = option(0.01, "decay of matrices, not of norms and biases", at_least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: never", at_least=0)


@dataclass(kw_only=True)
class PipelineOptions:
    """Pipeline"""

    schedule: Literal["gpipe", "1f1b"] = option("1f1b", "order of forward and backward passes")
    num_stages: int | None = option(
        None, "parts that the model is cut into; default: one per process", at_least=1
    )
    partition: Literal["uniform"] | list[int] = option(
        "uniform", "layers of each stage, 8,8,7,9; uniform: equal numbers"
    )
    gradient_checkpointing: bool = option(False, "recompute activations in the backward pass")


@dataclass(kw_only=True)
class ProgressOptions:
    """Progress"""

    log_steps: int = option(1, "optimizer steps between log lines", at_least=1)
    eval_steps: int = option(0, "optimizer steps between evaluations; 0: at the end", at_least=0)
    eval_samples: int = option(64, "held-out samples of an evaluation", at_least=0)
    save_steps: int = option(0, "optimizer steps between checkpoints; 0: at the end", at_least=0)


@dataclass(kw_only=True)
class RunConfig(
    ProgressOptions,
    PipelineOptions,
    OptimizerOptions,
    FreezeOptions,
    BatchOptions,
    TrainPathOptions,
    SharedOptions,
):
    """Every option of a training run that belongs to no part. `num_stages` is never None."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.batch_size * self.accumulate_steps // self.micro_batch_size

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return _precision(self)


@dataclass(kw_only=True)
class EvaluateConfig(SharedOptions):
    """Evaluation"""

    output_dir: str = option(
        "runs/evaluate", "folder of predictions.jsonl, report.json and plots", is_output=True
    )
    adapter_path: str | None = option(None, "LoRA adapter folder in peft's format", is_path=True)
    batch_size: int = option(8, "samples generated together", at_least=1)
    max_new_tokens: int = option(64, "longest answer, in tokens", at_least=1)
    temperature: float = option(0.0, "0 takes the likeliest token, more samples", at_least=0)
    num_devices: int | None = option(
        None, "devices that the model is spread over; default: all", at_least=1
    )
    limit: int | None = option(None, "evaluate only the first samples", at_least=1)

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return _precision(self)


def _precision(config: SharedOptions) -> Literal["fp32", "bf16", "fp16"]:
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"


def option_groups(config_class: type) -> list[tuple[str, list[dataclasses.Field]]]:
    """The fields of an options class, by the class that declares them, in order of the help."""
    seen: set[str] = set()
    groups = []
    by_name = {item.name: item for item in dataclasses.fields(config_class)}
    for declaring in filter(dataclasses.is_dataclass, reversed(config_class.__mro__)):
        own = [item.name for item in dataclasses.fields(declaring) if item.name not in seen]
        seen.update(own)
        if own:
            groups.append(((declaring.__doc__ or "").strip(), [by_name[name] for name in own]))
    return groups


def spelled(name: str) -> str:
    """`batch_size` as it is typed: `--batch-size`."""
    return "--" + name.replace("_", "-")


def expand_paths(config: Any) -> None:
    """Replaces `~`, and takes an empty path (an empty shell variable) for none."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if isinstance(value, str) and (item.metadata["is_path"] or item.metadata["is_output"]):
            expanded = str(Path(value).expanduser()) if value else item.default
            setattr(config, item.name, expanded)


def check_limits(config: Any) -> None:
    """Checks each number against the limits of its field, and that each given path exists.

    Raises:
        OptionError: names the option, its value and the limit.
    """
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value is None:
            continue
        if item.metadata["is_path"] and not Path(value).exists():
            raise OptionError(
                f"{spelled(item.name)} {value}: there is no such file or folder. "
                f"Expected: {item.metadata['help']}. Nothing can be read from it otherwise. Check "
                f"the path; it is relative to the directory you are in ({Path.cwd()})."
            )
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(item, value)


def _check_number(item: dataclasses.Field, value: float) -> None:
    limits: Mapping[str, float | None] = item.metadata["limits"]
    least, most, below = limits["at_least"], limits["at_most"], limits["below"]
    is_right = (
        math.isfinite(value)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if is_right:
        return
    wanted = [f"at least {least:g}"] if least is not None else ["a finite number"]
    wanted += [f"at most {most:g}"] if most is not None else []
    wanted += [f"below {below:g}"] if below is not None else []
    raise OptionError(
        f"{spelled(item.name)} {value:g} is out of range: it must be {' and '.join(wanted)}. It "
        f"means: {item.metadata['help']}. Give a value in that range, or leave the option out for "
        f"the default ({item.default})."
    )


def check_precision(config: SharedOptions) -> None:
    """Refuses two compute types at once."""
    if config.bf16 and config.fp16:
        raise OptionError(
            "--bf16 and --fp16 were both given. At most one is expected, because a run computes "
            "in one type. Keep --bf16 (no loss scaling needed) or, on GPUs without it, --fp16."
        )


def check_batches(run: RunConfig) -> None:
    """Checks that a batch falls into whole micro-batches, and 1F1B gets one for each stage."""
    if run.batch_size % run.micro_batch_size:
        fits = run.batch_size // run.micro_batch_size * run.micro_batch_size
        better = sorted({fits, fits + run.micro_batch_size} - {0})
        raise OptionError(
            f"--batch-size {run.batch_size} is not divisible by --micro-batch-size "
            f"{run.micro_batch_size}. Whole micro-batches were expected, because a batch is cut "
            f"into equal ones. Set --batch-size to {' or '.join(map(str, better))}, or choose a "
            f"--micro-batch-size that divides {run.batch_size}."
        )
    num_stages = run.num_stages or 1
    if run.schedule == "1f1b" and run.num_micro_batches < num_stages:
        needed = -(-num_stages * run.micro_batch_size // run.accumulate_steps)
        needed = -(-needed // run.micro_batch_size) * run.micro_batch_size
        raise OptionError(
            f"{run.num_micro_batches} micro-batches (--batch-size {run.batch_size} x "
            f"--accumulate-steps {run.accumulate_steps} / --micro-batch-size "
            f"{run.micro_batch_size}) can't fill {num_stages} stages. 1F1B expects one a stage at "
            f"least, because each stage works on a different one. Raise --batch-size to {needed}, "
            f"or use fewer stages or --schedule gpipe."
        )


def check_learning_rate(run: RunConfig) -> None:
    """Checks that warm-up ends and the learning rate falls to `min_lr`, not up to it."""
    if run.warmup_steps > run.total_steps:
        raise OptionError(
            f"--warmup-steps {run.warmup_steps} is more than --total-steps {run.total_steps}. "
            f"Warm-up must end within the run, or the learning rate never reaches "
            f"{run.learning_rate:g}. Lower --warmup-steps or raise --total-steps."
        )
    for name in ("min_lr", "warmup_start_lr"):
        value = getattr(run, name)
        if value > run.learning_rate:
            raise OptionError(
                f"{spelled(name)} {value:g} is above --learning-rate {run.learning_rate:g}. It "
                f"must not be, because --learning-rate is the highest one. Lower {spelled(name)} "
                f"or raise --learning-rate."
            )


def resolve_stages(run: RunConfig, *, environment: Mapping[str, str]) -> None:
    """Sets `num_stages` where it was left open, and compares it with the number of processes.

    Args:
        environment: `os.environ`; torchrun sets WORLD_SIZE there.
    """
    counts = run.partition if isinstance(run.partition, list) else None
    shown = ",".join(map(str, counts or []))
    if counts is not None and (not counts or min(counts) < 1):
        raise OptionError(
            f"--partition {shown or '[]'} has a stage without a layer. Each stage needs at least "
            f"one, because a stage passes on what its layers make. Give counts from 1 upwards."
        )
    world_size = environment.get("WORLD_SIZE")
    if run.num_stages is None:
        run.num_stages = len(counts) if counts else int(world_size or 1)
    if counts is not None and len(counts) != run.num_stages:
        raise OptionError(
            f"--partition {shown} names {len(counts)} stages, --num-stages is {run.num_stages}. "
            f"One count a stage was expected, because it says how many layers each stage gets. "
            f"Change one of them; without --num-stages it follows from --partition."
        )
    if world_size is not None and int(world_size) % run.num_stages:
        raise OptionError(
            f"{world_size} processes were started for {run.num_stages} stages. The number of "
            f"processes must be a multiple of the stages, because each stage of each replica has "
            f"its own process. Set --num-stages or torchrun --nproc-per-node accordingly."
        )
