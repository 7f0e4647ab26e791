"""Options of a training run that belong to no component, and checks of their combinations.

Options of a component are in its signature.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from options.data import BatchOptions, CorpusRunOptions, ImageOptions
from options.fields import (
    OptionError,
    Options,
    free_option,
    mapping,
    option,
    option_fields,
    replaced,
    spelled,
)
from options.memory import MemoryOptions, StreamingOptions
from options.model import TrainedOptions, VisionOptions, check_counts, read_tokens
from options.rollouts import RolloutOptions

PROVE_HELP = (
    "split check on a scaled-down copy: auto = unless its result is stored for this model, "
    "these versions and options"
)
_rate = functools.partial(option, at_least=0, to="lr_scheduler", resume="steps")


class BadStepSettings(Options):
    """Loss spikes and non-finite gradients"""

    max_skipped: int = free_option(20, "skipped steps in a row that end the run", at_least=1)
    spike_sigma: float = option(
        0.0, "loss spike, in standard deviations above the last 64 losses (0 = off)", at_least=0
    )
    spike_action: Literal["warn", "skip"] = option(
        "warn", "action on a loss spike", needs=("--bad-steps.spike_sigma 6",)
    )


class StopSettings(Options):
    """Early stopping"""

    patience: int = free_option(
        0,
        "evaluations in a row without improvement after which the run ends (0 = off)",
        at_least=0,
        needs=("--eval-steps 100",),
        excludes=("--eval-samples 0",),
    )
    metric: str = free_option("loss", "held-out metric that must improve, by its name in the log")
    delta: float = free_option(0.0, "smallest change that counts as an improvement", at_least=0)


class CheckpointOptions(Options):
    """Logging, checkpoints and faults"""

    hang_timeout: float = free_option(
        600.0, "watchdog timeout of a pass, compile or save, in seconds (0 = none)", at_least=0
    )
    stop_deadline: float = free_option(
        120.0, "timeout of the last step and save after a signal, in seconds (0 = none)", at_least=0
    )
    log_steps: int = free_option(
        1, "optimizer steps between lines of log.jsonl (a run prints about 50 lines)", at_least=1
    )
    eval_steps: Literal["epoch"] | int = free_option(
        0, "optimizer steps between evaluations, or epoch (0 = only at the end)", at_least=0
    )
    eval_samples: Literal["all"] | int = free_option(
        "all", "held-out samples per evaluation, spread evenly (0 = none)", at_least=0
    )
    timeline_step: int = free_option(
        3, "optimizer step that timeline.png shows (0 = none)", at_least=0
    )
    save_steps: Literal["epoch"] | int = free_option(
        0, "optimizer steps between checkpoints, or epoch (0 = only at the end)", at_least=0
    )
    save_best: str = free_option(
        "none",
        "held-out metric whose best weights are kept in checkpoints/best: loss, token_accuracy or "
        "another of the log",
        excludes=("--eval-samples 0",),
    )
    keep_last: int = free_option(
        0, "newest checkpoints to keep, and the best (0 = all)", at_least=0
    )
    sync_save: bool = free_option(
        False, "write checkpoints synchronously, without a copy in host memory"
    )
    resume: str | None = free_option(
        None, "checkpoint to resume from, auto = the newest in --output-dir", is_saved=False
    )
    allow_changes: bool = free_option(
        False, "resume with other settings that change the course of training", is_saved=False
    )


# keys that a resumed run may change; options have this in their declaration
KEYS_ON_RESUME = {"import": "free", "tracker": "free", "optimizer": "steps"}
KEYS_ON_RESUME |= {"lr_scheduler": "steps", "loss_fn": "steps"}


def on_resume(name: str, parts: Mapping[str, Any] = {}) -> str:
    """Return `resume` of an option of a config file: `batch-size`, `dataset`, `dataset.cache`.

    The facts of the chosen components name options that change no row.
    """
    name = name.replace("-", "_")
    head, _, tail = name.partition(".")
    if item := option_fields(RunConfig).get(name):
        return item.metadata["resume"]
    if head in parts and tail in parts[head].facts.without_effect:
        return "free"
    return KEYS_ON_RESUME.get(head, "course")


class MachineOptions(Options):
    """Machine"""

    device: Literal["auto", "cpu", "cuda", "xpu", "npu", "mps"] = free_option(
        "auto", "device: auto = an accelerator, else the CPU (never mps)", to="train_model builder"
    )
    bf16: bool = option(False, "compute in bfloat16", excludes=("--fp16",))
    fp16: bool = option(False, "compute in float16")
    dtype: Literal["auto"] | None = option(
        None, "auto = the dtype in config.json, else that of --bf16 or --fp16"
    )
    trust_remote_code: bool = free_option(
        False, "run the Python code of the model folder", to="train_model builder"
    )

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the compute dtype of the options bf16 and fp16."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


class SharedOptions(MachineOptions):
    """Files, seed and loading"""

    model_path: str | None = free_option(
        None,
        "model folder or hub name (owner/name[@revision]); default: random weights",
        is_path=True,
        takes_name=True,
    )
    dataset_path: str | None = free_option(
        None,
        "dataset: file, folder, hub name (owner/name[@revision]) or prefix of a corpus",
        is_path=True,
        is_pattern=True,
        takes_name=True,
    )
    output_dir: str = free_option(
        "runs/train",
        "folder of config, log, plots and checkpoints",
        is_output=True,
        shapes_answers=False,
    )
    seed: int = option(
        0, "seed of start, order and dropout", at_least=0, at_most=10**12, to="train_model model"
    )
    visual_gpu_ratio: float = free_option(
        0.0,
        "share of the first device for the vision tower (1 or more = all of it)",
        at_least=0,
        to="train_model builder",
        shapes_answers=False,
    )
    num_workers: int = free_option(0, "data loading processes per rank", at_least=0)
    check_only: bool = option(False, "check all options and files, then stop", is_saved=False)


class OptimizerOptions(Options):
    """Optimization"""

    learning_rate: float = option(
        1e-4, "peak learning rate", at_least=0, to="optimizer lr_scheduler", resume="steps"
    )
    min_lr: float = _rate(0.0, "learning rate at the last step")
    warmup_steps: int = option(
        0, "warm-up, in optimizer steps", at_least=0, to="lr_scheduler", resume="length"
    )
    warmup_ratio: float | None = option(
        None,
        "warm-up as a share of all steps, in place of --warmup-steps",
        at_least=0,
        at_most=1,
        resume="length",
    )
    warmup_start_lr: float = _rate(0.0, "learning rate at the first step")
    total_steps: int = option(
        100, "length of the run, in optimizer steps", at_least=1, to="lr_scheduler", resume="length"
    )
    num_train_epochs: float | None = option(
        None,
        "length of the run, in epochs, in place of --total-steps",
        at_least=0.001,
        resume="length",
    )
    weight_decay: float = option(
        0.01, "weight decay, not on norms and biases", at_least=0, to="optimizer", resume="steps"
    )
    max_grad_norm: float = option(
        1.0, "clipping norm of gradients (0 = off)", at_least=0, resume="steps"
    )


class PipelineOptions(Options):
    """Pipeline and plan"""

    schedule: str = free_option(
        "1f1b",
        "pipeline schedule: gpipe, 1f1b, eager_1f1b, looped_bfs, interleaved_1f1b, "
        "interleaved_zero_bubble, zbv, dualpipev, or the path of a .csv file",
    )
    num_stages: int | None = free_option(
        None, "number of stages; default: by the number of processes", at_least=1, to="train_model"
    )
    stages_per_rank: int | None = free_option(
        None, "stages per process; default: 1, or 2 if --schedule needs it", at_least=1
    )
    dp_degree: int | None = free_option(
        None, "pipeline replicas; default: by the processes", at_least=1
    )
    dp_shard: bool = free_option(
        False, "shard weights, gradients and optimizer state over replicas (FSDP2)"
    )
    partition: Literal["uniform", "parameters", "measured"] | list[int] = free_option(
        "uniform",
        "decoder layers of each stage, such as 8,8,7,9; uniform = equal numbers, parameters = "
        "equal bytes, measured = equal times on this device, within its memory",
        to="train_model",
    )
    prove_split: Literal["auto", "always", "never"] = free_option("auto", PROVE_HELP)
    plan: bool = option(
        False,
        "print layers, times and memory of each stage and stop, without loading",
        is_saved=False,
    )
    device_memory: float | None = free_option(
        None, "memory limit of each rank, in GiB; default: all of its device", at_least=0
    )


_settings_path = functools.partial(
    free_option, None, is_path=True, takes_name=True, to="train_model"
)


class RunConfig(
    CorpusRunOptions,
    ImageOptions,
    CheckpointOptions,
    MemoryOptions,
    StreamingOptions,
    VisionOptions,
    PipelineOptions,
    OptimizerOptions,
    TrainedOptions,
    BatchOptions,
    SharedOptions,
):
    """Options of a training run that belong to no component."""

    config_path: str | None = _settings_path(
        help_text="config.json, its folder or a hub name; default: --model-path"
    )
    processor_path: str | None = _settings_path(
        help_text="tokenizer or processor: a folder or hub name; default: --model-path"
    )
    rollouts: RolloutOptions = mapping(RolloutOptions)
    early_stop: StopSettings = mapping(StopSettings)
    bad_steps: BadStepSettings = mapping(BadStepSettings)

    @property
    def config_folder(self) -> str:
        """Return the folder of config.json, or that file; empty where neither is given."""
        return self.config_path or self.model_path or ""

    @property
    def num_micro_batches(self) -> int:
        """Return the number of micro-batches per optimizer step."""
        return self.batch_size * self.accumulate_steps // self.micro_batch_size


class CheckSettings(Options):
    """Check of a split"""

    steps: int = option(3, "number of optimizer steps to compare", at_least=1)
    tolerance: float | None = option(
        None,
        "largest difference, absolute and relative; default: 0, or 1e-6 where stages share a "
        "weight, whose gradient is summed in another order",
        at_least=0,
    )
    layers: int | None = option(
        None, "number of first layers to keep, with random weights; default: all", at_least=1
    )
    reference: Literal["auto", "transformers", "part"] = option(
        "auto",
        "unsplit model: transformers = its own class, part = the train_model component on one "
        "stage, auto = transformers if it has a class",
    )


class CheckConfig(RunConfig):
    """Check of an export or a split"""

    exported: str | None = option(
        None, "exported folder that is compared with the checkpoint at --model-path", is_path=True
    )
    adapter_weights: list[float] | None = option(
        None, "weight of each adapter in the export; default: 1", needs=("--exported FOLDER",)
    )
    check: CheckSettings = mapping(CheckSettings)
    output_dir: str | None = option(  # type: ignore[assignment]  # a check may write nothing
        None, "folder of check.json; default: not written", is_output=True
    )


def settled(run: RunConfig) -> Any:
    """Return the options with those that follow from others."""
    changes: dict[str, Any] = {}
    if run.vocab.new_tokens is not None:
        changes["vocab.new_tokens"] = read_tokens(run.vocab.new_tokens)
    if run.vision_partition and not run.vision_stages:
        changes["vision_stages"] = len(run.vision_partition)
    if isinstance(run.partition, list) and run.num_stages is None:
        changes["num_stages"] = changes.get("vision_stages", run.vision_stages) + len(run.partition)
    return replaced(run, changes)


# options that a split check drops, since plain transformers lacks them
NOT_CHECKED = (
    *("accumulate_steps", "packing", "rows.last", "global_batch_distributed", "num_train_epochs"),
    *("warmup_ratio", "bf16", "fp16", "dtype", "fp32.norms", "fp32.logits", "quantization"),
    *("logits_chunk", "compile_layers", "rope_scaling", "lora.dropout"),
    *("vocab.new_tokens", "vocab.resize"),
)


def for_check(run: Any, **changes: Any) -> Any:
    """Return the options for a split check."""
    fields = option_fields(run)
    plain = {name: fields[name].default for name in NOT_CHECKED}
    return dataclasses.replace(replaced(run, plain), **changes)


def check_learning_rate(run: RunConfig) -> None:
    """Refuse a warm-up longer than the run, and a rate above the peak."""
    if run.num_train_epochs is None and run.warmup_ratio is None:  # else steps are computed later
        check_warmup(run)
    for name in ("min_lr", "warmup_start_lr"):
        value = getattr(run, name)
        if value > run.learning_rate:
            raise OptionError(
                f"{spelled(name)} {value:g} is above --learning-rate {run.learning_rate:g}. Lower "
                f"{spelled(name)} or raise --learning-rate."
            )


def check_warmup(run: RunConfig) -> None:
    """Refuse a warm-up longer than the run."""
    if run.warmup_steps > run.total_steps:
        raise OptionError(
            f"--warmup-steps {run.warmup_steps} is more than --total-steps {run.total_steps}. "
            "Lower --warmup-steps or raise --total-steps."
        )


def check_partition(run: RunConfig) -> None:
    """Refuse layer counts that do not fit the number of stages."""
    if not isinstance(run.partition, list):
        return
    counts = run.partition
    check_counts("--partition", counts, "layer")
    if run.vision_stages + len(counts) != run.num_stages:
        tower = f" with --vision-stages {run.vision_stages}" if run.vision_stages else ""
        raise OptionError(
            f"--partition {','.join(map(str, counts))} names {len(counts)} stages, --num-stages is "
            f"{run.num_stages}{tower}. Change one of them, or drop --num-stages."
        )
