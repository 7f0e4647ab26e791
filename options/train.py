"""The options of a run that belong to no part: their names, defaults, limits and help texts.

Plain dataclasses. What they must be together is in checks.py, reading a command line in
parse_args.py. Options of one part are not here: they are the signature of that part.
"""

from dataclasses import dataclass
from typing import Any, Literal

from options.data import (
    CorpusRunOptions,
    DataOptions,
    FewshotOptions,
    ImageOptions,
    PreviewOptions,
    ReportOptions,
    TokenCacheOptions,
)
from options.engine import AnswerOptions, EngineOptions, PlacementOptions, precision_of
from options.fields import OptionError, option, spelled
from options.memory import AttentionOptions, MemoryOptions, StreamingOptions
from options.model import LoRAOptions, MethodOptions, PartTrainingOptions, VisionOptions

# -- the options of a run on several machines -----------------------------------------------------


@dataclass(kw_only=True)
class MachineOptions:
    """Several machines"""

    lost_after: float = option(
        30.0, "seconds without a sign of life after which a machine is lost; 0: never", at_least=0
    )


# -- the options of the planner that places layers on stages --------------------------------------


@dataclass(kw_only=True)
class PlanOptions:
    """Planning"""

    plan: bool = option(
        False, "print layers, times and memory of each stage, and advice, then stop; loads nothing"
    )
    device_memory: float | None = option(
        None, "GiB that each rank may fill; default: what its device has", at_least=0
    )


# -- the options of a run about lengths: the order of micro-batches, padding, packing -------------


@dataclass(kw_only=True)
class ShapeOptions:
    """Shapes"""

    micro_batch_order: Literal["sorted", "given"] = option(
        "sorted", "sorted: samples of near-equal length travel together; given: as drawn"
    )
    pad_to_multiple_of: int = option(
        1, "round the length of rows up to this, within --max-token-num", at_least=1
    )
    packing: bool = option(
        False, "several samples a row of --max-token-num tokens; none sees another"
    )


# -- the options of how a run ends when it hangs or is asked to stop ------------------------------


@dataclass(kw_only=True)
class FaultOptions:
    """Faults"""

    hang_timeout: float = option(
        600.0,
        "seconds that one operation of a step may take before the run ends as hung; it must exceed "
        "the longest single pass, compile or save; 0: never",
        at_least=0,
    )
    stop_deadline: float = option(
        120.0,
        "seconds between a signal to stop and the end of the step and its save; 0: any number",
        at_least=0,
    )


# -- the options for numbers that go wrong: skipped steps and loss spikes -------------------------


@dataclass(kw_only=True)
class NumberOptions:
    """Numbers that go wrong"""

    max_skipped_steps: int = option(
        20, "stop after so many skipped steps in a row; 1: at the first", at_least=1
    )
    spike_sigma: float = option(
        0.0,
        "a loss so many standard deviations above the mean of the last 64 is a spike; 0: none is",
        at_least=0,
    )
    spike_action: Literal["warn", "skip"] = option("warn", "what is done about a loss spike")


def check_numbers(run: NumberOptions) -> None:
    """Refuses what would do nothing."""
    if run.spike_action != "warn" and run.spike_sigma == 0:
        raise OptionError(
            f"--spike-action {run.spike_action} came without --spike-sigma. It says what is done "
            "about a spike, and nothing is one without that option. Add --spike-sigma 6, or leave "
            "--spike-action out."
        )


# -- options about ending a run before its last step ----------------------------------------------


@dataclass(kw_only=True)
class StopOptions:
    """Early stopping"""

    early_stop: int = option(
        0, "evaluations in a row without a better figure that end the run; 0: never", at_least=0
    )
    early_stop_metric: str = option(
        "loss", "held-out figure that has to improve, by its name in the log"
    )
    early_stop_delta: float = option(0.0, "an improvement is more than this", at_least=0)


def check_stop(run: Any) -> None:
    """Refuses early stopping without evaluations.

    Raises:
        OptionError: names the options.
    """
    if run.early_stop and (run.eval_samples == 0 or run.eval_steps == 0):
        missing = "--eval-samples 0" if run.eval_samples == 0 else "--eval-steps 0"
        raise OptionError(
            f"--early-stop {run.early_stop} came with {missing}. Evaluations during training were "
            "expected, because they decide when it stops: give --eval-steps, or leave --early-stop "
            "out."
        )


# -- options about which weights of a training run are kept, and about going on with a run --------


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints"""

    save_steps: int = option(
        0, "optimizer steps between checkpoints; 0: at the end", at_least=0, is_common=True
    )
    save_best: str = option(
        "none",
        "keep the weights with the best held-out figure as checkpoints/best: loss, token_accuracy, "
        "or another of the log",
    )
    keep_last: int = option(0, "how many checkpoints stay, besides the best; 0: all", at_least=0)
    sync_save: bool = option(
        False, "write checkpoints before training goes on; needs no copy in host memory"
    )
    resume: str | None = option(
        None,
        "auto: go on from the newest whole checkpoint of --output-dir; or the path of one",
        is_common=True,
    )
    allow_changes: bool = option(
        False, "resume although settings that decide the course of training differ"
    )


# options that leave losses and weights as they are, but for the order of sums
FREE_ON_RESUME = frozenset(
    # files: their contents are compared, not where they lie
    "import model_path config_path processor_path dataset_path output_dir trust_remote_code "
    # machine and pipeline
    "device num_workers num_stages stages_per_rank schedule dp_degree dp_shard partition "
    "visual_gpu_ratio vision_stages vision_partition prove_split "
    "device_memory lost_after hang_timeout stop_deadline "
    # the product of these is compared
    "batch_size accumulate_steps "
    # memory
    "gradient_checkpointing checkpoint_every checkpoint_mode offload_activations compile_layers "
    "logits_chunk streaming_budget streaming_stages recompute_grain pin_model "
    # what is kept of images, and what is refused
    "token_cache token_cache_workers dataset.cache "
    "image_cache image_cache_gib max_image_pixels max_images_per_sample "
    # progress and checkpoints
    "log_steps eval_steps eval_samples timeline_step save_steps save_best keep_last sync_save "
    "early_stop early_stop_metric early_stop_delta tracker "
    "resume allow_changes max_skipped_steps preview".split()
)


def leaves_course(name: str) -> bool:
    """Whether an option, as a config file spells it, may differ between a run and its resume."""
    part = name.replace("-", "_").partition(".")[0]
    return part in FREE_ON_RESUME if part == "tracker" else name.replace("-", "_") in FREE_ON_RESUME


# -- options about the model that a loss over preferences compares with ---------------------------


@dataclass(kw_only=True)
class ReferenceOptions:
    """Reference of preferences"""

    reference: Literal["auto", "adapters_off", "precompute", "columns"] = option(
        "auto",
        "log-probabilities of the start model: adapters_off runs the stages without LoRA before "
        "each step; precompute: once, before the first one; columns: the rows bring them; auto: "
        "columns where they are, adapters_off where adapters alone are trained, else precompute",
    )


# -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class SharedOptions:
    """Files and machine"""

    model_path: str | None = option(
        None,
        "checkpoint folder with *.safetensors; without it weights start random",
        is_path=True,
        is_common=True,
    )
    dataset_path: str | None = option(
        None,
        "file or folder of the dataset, or prefix of a corpus",
        is_path=True,
        is_pattern=True,
        is_common=True,
    )
    output_dir: str = option(
        "runs/train", "run folder: config, logs, plots, checkpoints", is_output=True, is_common=True
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto takes GPUs where there are any")
    bf16: bool = option(False, "compute in bfloat16", is_common=True)
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

    batch_size: int = option(
        16, "samples of one schedule step, per replica", at_least=1, is_common=True
    )
    micro_batch_size: int = option(
        2, "rows that travel together; of sorted ones the mean", at_least=1, is_common=True
    )
    accumulate_steps: int = option(1, "batches of one optimizer step", at_least=1)
    max_token_num: int = option(512, "longest sample, in tokens", at_least=1, is_common=True)


@dataclass(kw_only=True)
class FreezeOptions:
    """What is trained"""

    frozen_vit: bool = option(False, "keep the vision tower as it is")
    frozen_mlp: bool = option(False, "keep the projector as it is")
    frozen_llm: bool = option(False, "keep the language model as it is")
    frozen_lm_head: bool = option(False, "keep the output layer as it is")
    vit_lora_num: int = option(0, "LoRA adapters stacked on the vision tower", at_least=0)
    mlp_lora_num: int = option(0, "LoRA adapters stacked on the projector", at_least=0)
    llm_lora_num: int = option(
        0, "LoRA adapters stacked on the language model", at_least=0, is_common=True
    )
    lora_rank: int = option(8, "rank of an adapter", at_least=1)
    lora_alpha: float = option(16.0, "an adapter's output is scaled by alpha / rank", at_least=0)
    lora_dropout: float = option(0.0, "dropout before an adapter", at_least=0, below=1)
    lora_target: list[str] | None = option(
        None, "last names of the wrapped linear layers, q_proj,v_proj; default: all"
    )


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimization"""

    learning_rate: float = option(1e-4, "highest learning rate", at_least=0, is_common=True)
    min_lr: float = option(0.0, "learning rate at the last step", at_least=0)
    warmup_steps: int = option(0, "optimizer steps of warm-up", at_least=0)
    warmup_start_lr: float = option(0.0, "learning rate at the first step", at_least=0)
    total_steps: int = option(100, "optimizer steps of the run", at_least=1, is_common=True)
    weight_decay: float = option(0.01, "decay of matrices, not of norms and biases", at_least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: never", at_least=0)


@dataclass(kw_only=True)
class PipelineOptions:
    """Pipeline"""

    schedule: str = option(
        "1f1b",
        "order of forward and backward passes: gpipe, 1f1b, looped_bfs, interleaved_1f1b, "
        "interleaved_zero_bubble, zbv, dualpipev, or the path of a .csv file",
    )
    num_stages: int | None = option(
        None,
        "parts that the model is cut into; default: those of the processes",
        at_least=1,
        is_common=True,
    )
    stages_per_rank: int | None = option(
        None, "stages that a process holds; default: 1, or 2 where --schedule needs it", at_least=1
    )
    dp_degree: int | None = option(
        None, "replicas of the pipeline; default: as many as the processes make", at_least=1
    )
    dp_shard: bool = option(False, "replicas share weights and optimizer state (FSDP2)")
    partition: Literal["uniform", "parameters", "measured"] | list[int] = option(
        "uniform",
        "layers of each stage behind --vision-stages, 8,8,7,9; uniform: equal numbers; "
        "parameters: equal bytes; measured: equal times on this device, within its memory",
    )
    prove_split: Literal["auto", "always", "never"] = option(
        "auto",
        "compare the stages with the whole model first, on a cut-down copy; auto: unless that is "
        "recorded of this model, these versions and options",
    )


@dataclass(kw_only=True)
class ProgressOptions:
    """Progress"""

    log_steps: int = option(1, "optimizer steps between log lines", at_least=1)
    eval_steps: int = option(0, "optimizer steps between evaluations; 0: at the end", at_least=0)
    eval_samples: Literal["all"] | int = option(
        "all", "held-out samples of an evaluation, spread evenly; 0: no evaluation", at_least=0
    )
    timeline_step: int = option(
        3, "optimizer step whose passes are timed and drawn (timeline.png); 0: none", at_least=0
    )


@dataclass(kw_only=True)
class RunConfig(
    CorpusRunOptions,
    TokenCacheOptions,
    PreviewOptions,
    AttentionOptions,
    DataOptions,
    ImageOptions,
    FaultOptions,
    MachineOptions,
    CheckpointOptions,
    ProgressOptions,
    StopOptions,
    MemoryOptions,
    NumberOptions,
    PlanOptions,
    StreamingOptions,
    VisionOptions,
    PipelineOptions,
    OptimizerOptions,
    MethodOptions,
    PartTrainingOptions,
    ReferenceOptions,
    LoRAOptions,
    FreezeOptions,
    ShapeOptions,
    BatchOptions,
    TrainPathOptions,
    SharedOptions,
):
    """Every option of a training run that belongs to no part."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one optimizer step."""
        return self.batch_size * self.accumulate_steps // self.micro_batch_size

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return precision_of(self)


@dataclass(kw_only=True)
class EvaluateConfig(
    FewshotOptions,
    PlacementOptions,
    ReportOptions,
    EngineOptions,
    AnswerOptions,
    ImageOptions,
    SharedOptions,
):
    """Evaluation"""

    output_dir: str = option(
        "runs/evaluate",
        "folder of predictions.jsonl, report.json and plots",
        is_output=True,
        is_common=True,
    )

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """The compute type by its short name."""
        return precision_of(self)


# -- the options that check_model.py has besides those of a training run --------------------------


@dataclass(kw_only=True)
class CheckOptions:
    """Check of a split"""

    check_steps: int = option(3, "optimizer steps that are compared", at_least=1)
    check_tolerance: float | None = option(
        None,
        "largest difference, absolute and relative; default: 0, or 1e-6 where stages share a "
        "weight, whose gradient is then a sum in another order",
        at_least=0,
    )
    check_layers: int | None = option(
        None, "cut the model to its first layers, with random weights", at_least=1
    )
    check_reference: Literal["auto", "transformers", "part"] = option(
        "auto",
        "what the split is compared with: the library's whole model, or the part on one stage; "
        "auto: the library's where it has one",
    )


@dataclass(kw_only=True)
class CheckConfig(CheckOptions, RunConfig):
    """Every option of a check; those of a training run mean the same."""

    output_dir: str | None = option(  # type: ignore[assignment]  # a check may write nothing
        None, "folder for check.json; default: none", is_output=True
    )


# -- what the options of a run must be together. Needs nothing but numbers and names --------------


def check_precision(config: SharedOptions) -> None:
    """Refuses two compute types at once."""
    if config.bf16 and config.fp16:
        raise OptionError(
            "--bf16 and --fp16 were both given. At most one is expected, because a run computes "
            "in one type. Keep --bf16 (no loss scaling needed) or, on GPUs without it, --fp16."
        )


def check_batches(run: RunConfig) -> None:
    """Checks that a batch falls into whole micro-batches."""
    if run.batch_size % run.micro_batch_size:
        fits = run.batch_size // run.micro_batch_size * run.micro_batch_size
        better = sorted({fits, fits + run.micro_batch_size} - {0})
        raise OptionError(
            f"--batch-size {run.batch_size} is not divisible by --micro-batch-size "
            f"{run.micro_batch_size}. Whole micro-batches were expected, because a batch is cut "
            f"into equal ones. Set --batch-size to {' or '.join(map(str, better))}, or choose a "
            f"--micro-batch-size that divides {run.batch_size}."
        )


def check_best(run: RunConfig) -> None:
    """Checks that there are evaluations to choose the best of."""
    if run.save_best != "none" and run.eval_samples == 0:
        raise OptionError(
            f"--save-best {run.save_best} came with --eval-samples 0. Held-out samples were "
            f"expected, because the best weights are those with the best held-out figure. Leave "
            f"--eval-samples out, or --save-best."
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


def check_partition(run: RunConfig) -> None:
    """Checks layer counts against the number of stages, which they give where it was left open."""
    if not isinstance(run.partition, list):
        return
    counts = run.partition
    shown = ",".join(map(str, counts))
    if not counts or min(counts) < 1:
        raise OptionError(
            f"--partition {shown or '[]'} has a stage without a layer. Each stage needs at least "
            f"one, because a stage passes on what its layers make. Give counts from 1 upwards."
        )
    if run.num_stages is None:
        run.num_stages = run.vision_stages + len(counts)
    if run.vision_stages + len(counts) != run.num_stages:
        tower = f" with --vision-stages {run.vision_stages}" if run.vision_stages else ""
        raise OptionError(
            f"--partition {shown} names {len(counts)} stages, --num-stages is {run.num_stages}"
            f"{tower}. "
            f"One count a stage was expected, because it says how many layers each stage gets. "
            f"Change one of them; without --num-stages it follows from --partition."
        )
