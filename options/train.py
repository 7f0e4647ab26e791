"""The options of a training run that belong to no part, and what they must be together.

Options of one part are not here: they are the signature of that part.
"""

import dataclasses
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
from options.model import (
    TrainedOptions,
    VisionOptions,
    check_counts,
    read_tokens,
)
from options.rollouts import RolloutOptions

DeviceKind = Literal["auto", "cpu", "cuda", "xpu", "npu", "mps"]
DEVICE_HELP = "auto takes the accelerator that torch finds, or the CPU; mps is to be named"


DTYPE_HELP = "auto = the dtype in config.json, or without one what --bf16 and --fp16 say"


def precision_of(config: Any) -> Literal["fp32", "bf16", "fp16"]:
    """The compute type that the options bf16 and fp16 say."""
    return "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"


class FaultOptions(Options):
    """Faults"""

    hang_timeout: float = free_option(
        600.0,
        "seconds that one operation of a step may take before the run ends as hung; it must exceed "
        "the longest single pass, compile or save; 0: never",
        at_least=0,
    )
    stop_deadline: float = free_option(
        120.0,
        "seconds between a signal to stop and the end of the step and its save; 0: any number",
        at_least=0,
    )


class BadStepSettings(Options):
    """Losses and gradients that go wrong"""

    max_skipped: int = free_option(
        20, "stop after so many skipped steps in a row; 1: at the first", at_least=1
    )
    spike_sigma: float = option(
        0.0,
        "a loss so many standard deviations above the mean of the last 64 is a spike; 0: none is",
        at_least=0,
    )
    spike_action: Literal["warn", "skip"] = option(
        "warn", "what is done about a loss spike", needs=("--bad-steps.spike_sigma 6",)
    )


class StopSettings(Options):
    """Early stopping"""

    patience: int = free_option(
        0,
        "evaluations in a row without a better figure that end the run; 0: never",
        at_least=0,
        needs=("--eval-steps 100",),
        excludes=("--eval-samples 0",),
    )
    metric: str = free_option("loss", "held-out figure that has to improve, by its name in the log")
    delta: float = free_option(0.0, "an improvement is more than this", at_least=0)


class CheckpointOptions(Options):
    """Progress and checkpoints"""

    log_steps: int = free_option(1, "optimizer steps between log lines", at_least=1)
    eval_steps: Literal["epoch"] | int = free_option(
        0,
        "optimizer steps between evaluations; epoch: as many as an epoch has; 0: at the end",
        at_least=0,
    )
    eval_samples: Literal["all"] | int = free_option(
        "all", "held-out samples of an evaluation, spread evenly; 0: no evaluation", at_least=0
    )
    timeline_step: int = free_option(
        3, "optimizer step whose passes are timed and drawn (timeline.png); 0: none", at_least=0
    )
    save_steps: Literal["epoch"] | int = free_option(
        0,
        "optimizer steps between checkpoints; epoch: as many as an epoch has; 0: at the end",
        at_least=0,
        is_common=True,
    )
    save_best: str = free_option(
        "none",
        "keep the weights with the best held-out figure as checkpoints/best: loss, token_accuracy, "
        "or another of the log",
        excludes=("--eval-samples 0",),
    )
    keep_last: int = free_option(
        0, "how many checkpoints stay, besides the best; 0: all", at_least=0
    )
    sync_save: bool = free_option(
        False, "write checkpoints before training goes on; needs no copy in host memory"
    )
    resume: str | None = free_option(
        None,
        "auto: go on from the newest whole checkpoint of --output-dir; or the path of one",
        is_common=True,
        is_saved=False,
    )
    allow_changes: bool = free_option(
        False, "resume although settings that decide the course of training differ", is_saved=False
    )


# what a resumed run may change of its keys; options say so themselves
KEYS_ON_RESUME = {"import": "free", "tracker": "free", "optimizer": "steps"}
KEYS_ON_RESUME |= {"lr_scheduler": "steps", "loss_fn": "steps"}


def on_resume(name: str, parts: Mapping[str, Any] = {}) -> str:
    """What holds for an option where a run is resumed: "course" to "free", as `option` has it.

    Args:
        name: as a config file spells it: `batch-size`, `dataset`, `dataset.cache`.
        parts: register -> the chosen part, whose facts name options that change no row.
    """
    name = name.replace("-", "_")
    head, _, tail = name.partition(".")
    if item := option_fields(RunConfig).get(name):
        return item.metadata["resume"]
    if head in parts and tail in parts[head].facts.without_effect:
        return "free"
    return KEYS_ON_RESUME.get(head, "course")


class SharedOptions(Options):
    """Files and machine"""

    model_path: str | None = free_option(
        None,
        "folder with *.safetensors or hub name (owner/name[@revision]); without it weights start "
        "random",
        is_path=True,
        takes_name=True,
        is_common=True,
    )
    dataset_path: str | None = free_option(
        None,
        "file or folder of the dataset, hub name (owner/name[@revision]), or prefix of a corpus",
        is_path=True,
        is_pattern=True,
        takes_name=True,
        is_common=True,
    )
    output_dir: str = free_option(
        "runs/train",
        "run folder: config, logs, plots, checkpoints",
        is_output=True,
        is_common=True,
        shapes_answers=False,
    )
    device: DeviceKind = free_option("auto", DEVICE_HELP, to="train_model builder")
    bf16: bool = option(
        False, "compute in bfloat16", is_common=True, excludes=("--fp16",), in_check=False
    )
    fp16: bool = option(False, "compute in float16", in_check=False)
    dtype: Literal["auto"] | None = option(None, DTYPE_HELP, in_check=False)
    seed: int = option(
        0,
        "seed of initialisation, order and dropout",
        at_least=0,
        at_most=10**12,
        to="train_model model",
    )
    visual_gpu_ratio: float = free_option(
        0.0,
        "share of the first device that the vision tower takes; from 1 on: all of it",
        at_least=0,
        to="train_model builder",
        shapes_answers=False,
    )
    trust_remote_code: bool = free_option(
        False, "run Python code that lies in the model folder", to="train_model builder"
    )
    num_workers: int = free_option(0, "processes that load data, per rank", at_least=0)
    check_only: bool = option(
        False, "check everything that can be checked, then stop", is_saved=False
    )

    precision = property(precision_of)


class OptimizerOptions(Options):
    """Optimization"""

    learning_rate: float = option(
        1e-4,
        "highest learning rate",
        at_least=0,
        is_common=True,
        to="optimizer lr_scheduler",
        resume="steps",
    )
    min_lr: float = option(
        0.0, "learning rate at the last step", at_least=0, to="lr_scheduler", resume="steps"
    )
    warmup_steps: int = option(
        0, "optimizer steps of warm-up", at_least=0, to="lr_scheduler", resume="length"
    )
    warmup_ratio: float | None = option(
        None,
        "share of all steps that is warm-up, instead of --warmup-steps: 0.03",
        at_least=0,
        at_most=1,
        instead_of="warmup_steps",
        resume="length",
        in_check=False,
    )
    warmup_start_lr: float = option(
        0.0, "learning rate at the first step", at_least=0, to="lr_scheduler", resume="steps"
    )
    total_steps: int = option(
        100,
        "optimizer steps of the run",
        at_least=1,
        is_common=True,
        to="lr_scheduler",
        resume="length",
    )
    num_train_epochs: float | None = option(
        None,
        "passes over the training rows, instead of --total-steps: 3 or 0.5",
        at_least=0.001,
        is_common=True,
        instead_of="total_steps",
        resume="length",
        in_check=False,
    )
    weight_decay: float = option(
        0.01,
        "decay of matrices, not of norms and biases",
        at_least=0,
        to="optimizer",
        resume="steps",
    )
    max_grad_norm: float = option(
        1.0, "gradients are clipped to this norm; 0: never", at_least=0, resume="steps"
    )


class PipelineOptions(Options):
    """Pipeline and plan"""

    schedule: str = free_option(
        "1f1b",
        "order of forward and backward passes: gpipe, 1f1b, eager_1f1b, looped_bfs, "
        "interleaved_1f1b, interleaved_zero_bubble, zbv, dualpipev, or the path of a .csv file",
        not_streamed="has an order of its own",
    )
    num_stages: int | None = free_option(
        None,
        "parts that the model is cut into; default: those of the processes",
        at_least=1,
        is_common=True,
        to="train_model",
    )
    stages_per_rank: int | None = free_option(
        None,
        "stages that a process holds; default: 1, or 2 where --schedule needs it",
        at_least=1,
        not_streamed="has all stages in one process",
    )
    dp_degree: int | None = free_option(
        None,
        "replicas of the pipeline; default: as many as the processes make",
        at_least=1,
        not_streamed="has no replicas: more GPUs share the stages",
    )
    dp_shard: bool = free_option(
        False,
        "replicas share weights and optimizer state (FSDP2)",
        not_streamed="has no replicas to share weights",
    )
    partition: Literal["uniform", "parameters", "measured"] | list[int] = free_option(
        "uniform",
        "layers of each stage behind --vision-stages, 8,8,7,9; uniform: equal numbers; "
        "parameters: equal bytes; measured: equal times on this device, within its memory",
        not_streamed="places no stage on a device of its own",
        to="train_model",
    )
    prove_split: Literal["auto", "always", "never"] = free_option(
        "auto",
        "compare the stages with the whole model first, on a cut-down copy; auto: unless that is "
        "recorded of this model, these versions and options",
    )
    plan: bool = option(
        False,
        "print layers, times and memory of each stage, and advice, then stop; loads nothing",
        not_streamed="chooses its plan by what is on the device, not by this table",
        is_saved=False,
    )
    device_memory: float | None = free_option(
        None, "GiB that each rank may fill; default: what its device has", at_least=0
    )


class RunConfig(
    CorpusRunOptions,
    ImageOptions,
    FaultOptions,
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
    """Every option of a training run that belongs to no part."""

    config_path: str | None = free_option(
        None,
        "config.json, its folder or hub name; default: --model-path",
        is_path=True,
        takes_name=True,
        to="train_model",
    )
    processor_path: str | None = free_option(
        None,
        "folder or hub name of tokenizer or processor; default: --model-path",
        is_path=True,
        takes_name=True,
        to="train_model",
    )
    rollouts: RolloutOptions = mapping(RolloutOptions)
    early_stop: StopSettings = mapping(StopSettings)
    bad_steps: BadStepSettings = mapping(BadStepSettings)

    @property
    def config_folder(self) -> str:
        """Where config.json lies, or that file; empty where nothing says so."""
        return self.config_path or self.model_path or ""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.batch_size * self.accumulate_steps // self.micro_batch_size


class CheckSettings(Options):
    """Check of a split"""

    steps: int = option(3, "optimizer steps that are compared", at_least=1)
    tolerance: float | None = option(
        None,
        "largest difference, absolute and relative; default: 0, or 1e-6 where stages share a "
        "weight, whose gradient is then a sum in another order",
        at_least=0,
    )
    layers: int | None = option(
        None, "cut the model to its first layers, with random weights", at_least=1
    )
    reference: Literal["auto", "transformers", "part"] = option(
        "auto",
        "what the split is compared with: the library's whole model, or the part on one stage; "
        "auto: the library's where it has one",
    )


class ExportCheckOptions(Options):
    """Check of an export"""

    exported: str | None = option(
        None,
        "exported folder: compare it with the checkpoint at --model-path, and check no split",
        is_path=True,
    )
    adapter_weights: list[float] | None = option(
        None,
        "how much of each adapter was added to the exported model; default: all of it",
        needs=("--exported FOLDER",),
    )


class CheckConfig(ExportCheckOptions, RunConfig):
    """Every option of a check; those of a training run mean the same."""

    check: CheckSettings = mapping(CheckSettings)
    output_dir: str | None = option(  # type: ignore[assignment]  # a check may write nothing
        None, "folder for check.json; default: none", is_output=True
    )


def settled(run: RunConfig) -> Any:
    """The options with what others say of those that were left open."""
    changes: dict[str, Any] = {}
    if run.vocab.new_tokens is not None:
        changes["vocab.new_tokens"] = read_tokens(run.vocab.new_tokens)
    if run.vision_partition and not run.vision_stages:
        changes["vision_stages"] = len(run.vision_partition)
    if isinstance(run.partition, list) and run.num_stages is None:
        changes["num_stages"] = changes.get("vision_stages", run.vision_stages) + len(run.partition)
    return replaced(run, changes)


def for_check(run: Any, **changes: Any) -> Any:
    """The options of a run as a split is checked: what plain transformers has not is left out."""
    plain = {
        name: item.default
        for name, item in option_fields(run).items()
        if not item.metadata["in_check"]
    }
    return dataclasses.replace(replaced(run, plain), **changes)


def check_learning_rate(run: RunConfig) -> None:
    """Checks that warm-up ends and the learning rate falls to `min_lr`, not up to it."""
    if run.num_train_epochs is None and run.warmup_ratio is None:  # else steps come later
        check_warmup(run)
    for name in ("min_lr", "warmup_start_lr"):
        value = getattr(run, name)
        if value > run.learning_rate:
            raise OptionError(
                f"{spelled(name)} {value:g} is above --learning-rate {run.learning_rate:g}. "
                f"Lower {spelled(name)} "
                f"or raise --learning-rate."
            )


def check_warmup(run: RunConfig) -> None:
    """Checks that warm-up ends within the run."""
    if run.warmup_steps > run.total_steps:
        raise OptionError(
            f"--warmup-steps {run.warmup_steps} is more than --total-steps {run.total_steps}. "
            "Lower --warmup-steps or raise --total-steps."
        )


def check_partition(run: RunConfig) -> None:
    """Checks layer counts against the number of stages."""
    if not isinstance(run.partition, list):
        return
    counts = run.partition
    check_counts("--partition", counts, "layer")
    shown = ",".join(map(str, counts))
    if run.vision_stages + len(counts) != run.num_stages:
        tower = f" with --vision-stages {run.vision_stages}" if run.vision_stages else ""
        raise OptionError(
            f"--partition {shown} names {len(counts)} stages, --num-stages is "
            f"{run.num_stages}{tower}. Change one of them; without --num-stages it follows from "
            "--partition."
        )
