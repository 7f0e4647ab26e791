"""Options of a training run that belong to no component, and checks of their combinations.

Options of a component are in its signature.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from options.data import BatchOptions, CorpusRunOptions, ImageOptions
from options.fields import (
    OptionError,
    Options,
    free_option,
    given_options,
    mapping,
    model_option,
    option,
    option_fields,
    refuse,
    refuse_beside,
    replaced,
    spelled,
)
from options.model import TrainedOptions, VisionOptions, check_counts, read_tokens

PROVE_HELP = (
    "split check on a scaled-down copy: auto = unless its result is stored for this model, "
    "these versions and options"
)
_rate = functools.partial(option, ge=0, to="lr_scheduler", resume="steps")
Steps: TypeAlias = Literal["epoch"] | int
_length = functools.partial(option, resume="length")


_stage_option = functools.partial(free_option, to="train_model")
_recompute_option = functools.partial(
    _stage_option, needs=("--gradient-checkpointing",), argument="checkpoint_{name}"
)


class RecomputeSettings(Options):
    """Parallelism: activation checkpointing"""

    every: int = _recompute_option(1, "recompute every n-th layer of the model", ge=1)
    mode: Literal["full", "operators"] = _recompute_option(
        "full", "full = recompute all, operators = keep outputs of matrix products and attention"
    )


class MemoryOptions(Options):
    """Parallelism: memory and attention"""

    gradient_checkpointing: bool = _stage_option(False, "recompute activations in the backward")
    recompute: RecomputeSettings = mapping(RecomputeSettings)
    offload_activations: bool = _stage_option(False, "keep activations in pinned host memory")
    logits_chunk: int = _stage_option(
        256, "tokens in the loss per chunk of logits (0 = logits of all tokens)", ge=0
    )
    compile_layers: bool = _stage_option(
        False, "compile each layer with torch.compile", excludes=("--recompute.mode operators",)
    )
    attention: Literal["auto", "eager", "sdpa", "flex", "flash"] = option(
        "auto",
        "attention kernel: auto = the model's, flex = FlexAttention (CUDA or XPU), flash = "
        "flash-attn (CUDA, with --bf16 or --fp16)",
    )


class StreamingSettings(Options):
    """Parallelism: memory of --engine streaming"""

    budget: float | None = free_option(
        None, "GiB of each device for weights and gradients; default: half of the free", ge=0
    )
    stages: int = free_option(0, "stages on a device at a time (0 = as the budget allows)", ge=0)


class StreamingOptions(Options):
    """Parallelism: --engine streaming"""

    streaming: StreamingSettings = mapping(StreamingSettings)
    recompute_grain: Literal["stage", "layer"] = free_option(
        "stage", "unit of recomputation: stage = all stages on a device, layer = a layer at a time"
    )
    stale_step: bool = option(False, "run the optimizer during the next step (one step stale)")
    pin_model: Literal["alloc", "register", "off"] = free_option(
        "alloc", "pinning of host weights: alloc = a pinned copy, register = in place, off = none"
    )


class RolloutOptions(Options):
    """Fine-tuning: GRPO"""

    reward_weights: list[float] | None = option(None, "weight of each reward, 1,0.2; default: 1")
    reward_timeout: float = option(120.0, "timeout of a step's rewards, seconds (0 = none)", ge=0)
    advantage: Literal["group", "group_no_std", "batch", "rloo"] = option(
        "group",
        "normalization of rewards: group = mean and deviation of the group, group_no_std = only "
        "the mean, batch = mean of the group and deviation of the batch, rloo = mean of the others",
    )
    group_size: int = option(8, "answers per prompt (--batch-size counts answers)", ge=2)
    inner_steps: int = option(1, "optimizer steps on the same answers", ge=1)
    kl_beta: float = option(0.0, "weight of the KL divergence (0 = off)", ge=0, to="loss_fn")
    sampling_temperature: float = option(1.0, "temperature, of the loss too", ge=0.01, to="loss_fn")
    max_completion_length: int = option(512, "max answer, in tokens", ge=1, to="loss_fn collate_fn")
    stop_strings: list[str] | None = option(None, "strings that end an answer")
    mask_truncated_completions: bool = option(False, "leave truncated answers out of the loss")
    drop_equal_groups: bool = option(False, "leave groups with equal rewards out of the loss")
    prompts_together: int = option(8, "prompts that are answered together (changes rounding)", ge=1)
    ahead: int = option(0, "steps that answers are sampled ahead (0 or 1)", ge=0, le=1)
    max_turns: int = option(8, "most completions of an answer", ge=1, needs=("--environment KEY",))
    keep_samples: int = free_option(1, "steps between entries in samples.jsonl (0 = none)", ge=0)


class TeacherSettings(Options):
    """Fine-tuning: distillation"""

    path: str | None = model_option(
        None,
        "teacher model, frozen, in as many stages",
        excludes=("--teacher.url", "--teacher.table"),
    )
    url: str | None = option(
        None,
        "teacher behind a completions server with echo and logprobs, http://127.0.0.1:8000/v1",
        needs=("--teacher.top_k 5",),
        excludes=("--teacher.table",),
    )
    model: str = option("teacher", "name of the model there", needs=("--teacher.url URL",))
    table: str | None = option(
        None,
        "safetensors file with the likeliest tokens of each row",
        is_path=True,
        excludes=("--teacher.lmbda", "--teacher.top_k"),
    )
    top_k: int = option(0, "likeliest tokens to keep, the rest lumped into one (0 = all)", ge=0)
    lmbda: float = option(
        0.0, "share of the rows whose answers the trained model draws", ge=0, le=1
    )


class BadStepSettings(Options):
    """Optimization: loss spikes and non-finite gradients"""

    max_skipped: int = free_option(20, "skipped steps in a row that end the run", ge=1)
    spike_sigma: float = option(0.0, "loss spike, in sigmas of the last 64 losses (0 = off)", ge=0)
    spike_action: Literal["warn", "skip"] = option(
        "warn", "action on a loss spike", needs=("--bad-steps.spike_sigma 6",)
    )


class StopSettings(Options):
    """Optimization: early stopping"""

    patience: int = free_option(
        0,
        "evaluations without improvement until the run ends (0 = off)",
        ge=0,
        needs=("--eval-steps 100",),
        excludes=("--eval-samples 0",),
    )
    metric: str = free_option("loss", "held-out metric that must improve, by its name in the log")
    delta: float = free_option(0.0, "smallest change that counts as an improvement", ge=0)


class CheckpointOptions(Options):
    """Checkpoints"""

    hang_timeout: float = free_option(600.0, "watchdog timeout, in seconds (0 = none)", ge=0)
    stop_deadline: float = free_option(120.0, "seconds to end after a signal (0 = no limit)", ge=0)
    log_steps: int = free_option(1, "optimizer steps between lines of log.jsonl", ge=1)
    eval_steps: Steps = free_option(0, "steps between evaluations (0 = only at the end)", ge=0)
    eval_samples: Literal["all"] | int = free_option("all", "held-out samples (0 = none)", ge=0)
    eval_completions: int = free_option(
        0, "held-out rows answered at each evaluation, and scored by --metric", ge=0
    )
    eval_max_new_tokens: int = free_option(64, "max length of these answers, in tokens", ge=1)
    timeline_step: int = free_option(3, "optimizer step that timeline.png shows (0 = none)", ge=0)
    save_steps: Steps = free_option(0, "steps between checkpoints (0 = only at the end)", ge=0)
    save_best: str = free_option(
        "none", "metric of checkpoints/best, such as loss", excludes=("--eval-samples 0",)
    )
    keep_last: int = free_option(0, "newest checkpoints to keep, and the best (0 = all)", ge=0)
    sync_save: bool = free_option(False, "write checkpoints synchronously, with no copy in memory")
    resume: str | None = free_option(None, "checkpoint; auto = the newest", is_saved=False)
    allow_changes: bool = free_option(False, "resume despite changed settings", is_saved=False)


# keys that a resumed run may change; options have this in their declaration
KEYS_ON_RESUME = {"import": "free", "tracker": "free", "metric": "free", "optimizer": "steps"}
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
    """Model"""

    device: Literal["auto", "cpu", "cuda", "xpu", "npu", "mps"] = free_option(
        "auto", "device: auto = an accelerator, else the CPU (never mps)", to="train_model builder"
    )
    bf16: bool = option(False, "compute in bfloat16", excludes=("--fp16",), to="loss_fn")
    fp16: bool = option(False, "compute in float16", to="loss_fn")
    dtype: Literal["auto"] | None = option(None, "auto = as config.json; else --bf16 or --fp16")
    trust_remote_code: bool = free_option(False, "run the model's code", to="train_model builder")

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """Return the compute dtype of the options bf16 and fp16."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


class SharedOptions(MachineOptions):
    """Data: seed and loading"""

    model_path: str | None = model_option(
        None, "model folder or hub name; default: random weights", resume="free"
    )
    dataset_path: str | None = model_option(
        None, "file, folder, hub name or prefix of a corpus", is_pattern=True, resume="free"
    )
    output_dir: str = free_option(
        "runs/train", "folder of log, plots and checkpoints", is_output=True, shapes_answers=False
    )
    seed: int = option(0, "seed of start, order, dropout", ge=0, le=10**12, to="train_model model")
    visual_gpu_ratio: float = free_option(
        0.0,
        "share of the first device for the vision tower (1 or more = all of it)",
        ge=0,
        to="train_model builder",
        shapes_answers=False,
    )
    num_workers: int = free_option(0, "data loading processes per rank", ge=0)
    check_only: bool = option(False, "check all options and files, then stop", is_saved=False)


class OptimizerOptions(Options):
    """Optimization"""

    learning_rate: float = _rate(1e-4, "peak learning rate", to="optimizer lr_scheduler")
    min_lr: float = _rate(0.0, "learning rate at the last step")
    warmup_steps: int = _length(0, "warm-up, in optimizer steps", ge=0, to="lr_scheduler")
    warmup_ratio: float | None = _length(None, "warm-up as a share, not --warmup-steps", ge=0, le=1)
    warmup_start_lr: float = _rate(0.0, "learning rate at the first step")
    total_steps: int = _length(100, "length of the run in optimizer steps", ge=1, to="lr_scheduler")
    num_train_epochs: float | None = _length(None, "length in epochs, not --total-steps", ge=0.001)
    weight_decay: float = _rate(0.01, "weight decay, not on norms and biases", to="optimizer")
    max_grad_norm: float = option(1.0, "clipping norm of gradients (0 = off)", ge=0, resume="steps")


class PipelineOptions(Options):
    """Parallelism"""

    schedule: str = free_option(
        "1f1b",
        "pipeline schedule: gpipe, 1f1b, eager_1f1b, looped_bfs, interleaved_1f1b, "
        "interleaved_zero_bubble, zbv, dualpipev, or the path of a .csv file",
    )
    num_stages: int | None = _stage_option(
        None, "pipeline stages; default: as many as the processes and --schedule need", ge=1
    )
    stages_per_rank: int | None = free_option(None, "stages per process; default: 1 or 2", ge=1)
    dp_degree: int | None = free_option(None, "pipeline replicas; default: by the processes", ge=1)
    dp_shard: bool = free_option(False, "shard weights, gradients and optimizer state (FSDP2)")
    partition: Literal["uniform", "parameters", "measured"] | list[int] = _stage_option(
        "uniform",
        "decoder layers of each stage, such as 8,8,7,9; uniform = equal numbers, parameters = "
        "equal bytes, measured = equal times on this device, within its memory",
    )
    prove_split: Literal["auto", "always", "never"] = free_option("auto", PROVE_HELP)
    plan: bool = option(False, "print times and memory of each stage, then stop", is_saved=False)
    device_memory: float | None = free_option(None, "memory limit of each rank, in GiB", ge=0)


_settings_path = functools.partial(model_option, None, resume="free", to="train_model")


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
    """Model: config and tokenizer"""

    config_path: str | None = _settings_path("config.json, folder, hub name; default: --model-path")
    processor_path: str | None = _settings_path("tokenizer or processor; default: --model-path")
    rollouts: RolloutOptions = mapping(RolloutOptions)
    teacher: TeacherSettings = mapping(TeacherSettings)
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
    """Check"""

    steps: int = option(3, "number of batches to compare", ge=1)
    tolerance: float | None = option(
        None, "largest difference; default: 0, or 1e-6 where stages share a weight", ge=0
    )
    layers: int | None = option(None, "first layers to keep, at random; default: all", ge=1)
    reference: Literal["auto", "transformers", "part"] = option(
        "auto", "unsplit model: transformers, part = the component on one stage, auto = either"
    )


class CheckConfig(RunConfig):
    """Check"""

    exported: str | None = option(None, "export to compare with --model-path", is_path=True)
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
    plain = {name: fields[name].default for name in NOT_CHECKED} | {"logits_chunk": 0}
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
    if isinstance(run.partition, list):
        tower = f" with --vision-stages {run.vision_stages}" if run.vision_stages else ""
        check_counts(
            "--partition",
            run.partition,
            "layer",
            other=f"--num-stages is {run.num_stages}{tower}",
            num_stages=(run.num_stages or 0) - run.vision_stages,
        )


def memory_remedies(run: RunConfig, *, has_gpu: bool, streams: bool = False) -> list[str]:
    """Return the remedies for a run out of memory, the cheapest first."""
    candidates = {
        f"a smaller --micro-batch-size (now {run.micro_batch_size})": run.micro_batch_size > 1,
        "--recompute-grain layer": streams and run.recompute_grain != "layer",
        "a smaller --streaming.budget": streams and has_gpu,
        "--gradient-checkpointing": not (run.gradient_checkpointing or streams),
        "--dp-shard": (run.dp_degree or 1) > 1 and not run.dp_shard,
        "--logits-chunk 256": not run.logits_chunk,
        "--offload-activations": has_gpu and not (run.offload_activations or streams),
        f"more --num-stages (now {run.num_stages})": True,
        f"a smaller --max-token-num (now {run.max_token_num})": True,
        "--bf16": not (run.bf16 or run.fp16),
    }
    return [what for what, is_open in candidates.items() if is_open]


# the name of the option -> the name in transformers
KERNELS = {"eager": "eager", "sdpa": "sdpa", "flex": "flex_attention", "flash": "flash_attention_2"}
# devices on which a kernel trains; flash-attn has kernels only for CUDA
WHERE = {"flex": ("auto", "cuda", "xpu"), "flash": ("auto", "cuda")}


def attention_arguments(run: Any) -> dict[str, str]:
    """Return the argument of a train_model component for --attention."""
    return {} if run.attention == "auto" else {"attn_implementation": KERNELS[run.attention]}


def check_attention(run: Any, part: Any = None) -> None:
    """Refuse a kernel that cannot run here with a train_model component."""
    if run.attention == "auto":
        return
    own = None if part is None else part.kwargs.get("attn_implementation")
    if own not in (None, KERNELS[run.attention]):
        raise OptionError(
            f"--attention and --train-model.attn_implementation {own} exclude each other. Drop one."
        )
    check_attention_device(run, run.device)
    if run.attention == "flash" and importlib.util.find_spec("flash_attn") is None:
        raise OptionError(
            "--attention flash requires the package flash_attn. Install it (pip install "
            "flash-attn --no-build-isolation), or use --attention sdpa."
        )


def check_attention_device(run: Any, device: str) -> None:
    """Refuse a kernel that cannot train on a kind of device (auto = unknown) or in the type."""
    if device not in WHERE.get(run.attention, (device,)):
        raise OptionError(
            f"--attention {run.attention} does not train on {device}. Use --attention sdpa, or "
            "--device cuda."
        )
    if run.attention == "flash" and not (run.bf16 or run.fp16 or run.dtype):
        raise OptionError(
            "--attention flash does not compute in float32. Add --bf16 (or --fp16), or use "
            "--attention sdpa."
        )


# options without a meaning in one process, or that change layers, which get new weights for each
# pass (docs/streaming.md)
NOT_STREAMED = (
    *("schedule", "stages_per_rank", "dp_degree", "dp_shard", "partition", "plan"),
    *("offload_activations", "compile_layers"),
)


def check_streaming(run: RunConfig, engine: str, *, world_size: int) -> None:
    """Refuse options that --engine streaming lacks, and its own with another engine."""
    if engine != "streaming":
        for name, value in given_options(run, of=StreamingOptions).items():
            raise OptionError(
                f"{spelled(name)} {value} requires --engine streaming. Add it or drop "
                f"{spelled(name)}."
            )
        return
    if world_size > 1:
        raise OptionError(
            f"--engine streaming takes one process, and {world_size} were started. Start "
            "train_pp.py with python, or torchrun --nproc-per-node 1."
        )
    for name, value in given_options(run).items():
        # dp_degree 1 is allowed, and so is a list: layer counts follow from the stages
        is_allowed = isinstance(value, list) or (name, value) == ("dp_degree", 1)
        if name in NOT_STREAMED and not is_allowed:
            raise OptionError(
                f"{spelled(name)} does not go with --engine streaming. Drop {spelled(name)} or use "
                "--engine pipeline."
            )


def check_completions(run: Any, parts: Any) -> None:
    """Refuse a metric of held-out answers where the run draws none, or cannot."""
    if not run.eval_completions:
        if "metric" in parts:
            raise OptionError(
                f"--metric {parts['metric'].key} scores held-out answers. Add --eval-completions."
            )
        return
    loss = parts["loss_fn"]
    excluded = {
        "--eval-samples 0": run.eval_samples == 0,
        "--engine streaming": parts["engine"].key == "streaming",
        "--vision-stages": run.vision_stages > 0,
        f"--loss-fn {loss.key}": loss.facts.samples_answers or not loss.facts.predicts_tokens,
    }
    refuse_beside(excluded, "--eval-completions")


def check_rollouts(run: Any, parts: Any) -> None:
    """Refuse options that a GRPO run cannot have, and its own in any other run."""
    loss, collate, own = parts["loss_fn"], parts.get("collate_fn"), run.rollouts
    answers = bool(loss.facts.samples_answers)
    check_teacher(run, parts)
    if run.teacher.lmbda:
        return
    if collate is not None and bool(collate.facts.gives_prompts) != answers:
        right = "--collate-fn grpo" if answers else "--loss-fn grpo or --collate-fn sft"
        raise OptionError(
            f"--collate-fn {collate.key} does not go with --loss-fn {loss.key}. Use {right}."
        )
    if not answers:
        given = [f"--rollouts.{name}" for name in given_options(own)]
        given += ["--reference frozen_copy"] if run.reference == "frozen_copy" else []
        if given:
            raise OptionError(f"{given[0]} requires --loss-fn grpo. Add it or drop {given[0]}.")
        return
    size, count = own.group_size, run.batch_size * run.accumulate_steps
    if "environment" not in parts and "environment" in [one.key for one in parts["reward"].part]:
        raise OptionError("--reward environment requires --environment. Add --environment KEY.")
    if own.ahead and "environment" in parts:
        raise OptionError("--environment does not go with --rollouts.ahead. Drop one of them.")
    weights, num_rewards = own.reward_weights, len(parts["reward"].part)
    refuse(
        {
            f"--batch-size x --accumulate-steps, {count}, is not divisible by --rollouts.group_size"
            f" {size}. Make it a multiple: a batch counts answers.": count % size,
            f"--rollouts.reward_weights has {len(weights or ())} numbers, --reward names "
            f"{num_rewards} rewards. Give one for each.": weights and len(weights) != num_rewards,
        }
    )
    names = ["save_steps", "eval_steps"]
    # steps of epochs are computed later, and rounded up
    names += ["total_steps"] if run.num_train_epochs is None else []
    for name in names:
        value = getattr(run, name)
        if own.inner_steps > 1 and (value == "epoch" or value % own.inner_steps):
            raise OptionError(
                f"{spelled(name)} {value} is not a multiple of --rollouts.inner_steps "
                f"{own.inner_steps}. Change one of them: a run is saved where answers are drawn."
            )
    stops_on_loss = run.early_stop.patience > 0 and run.early_stop.metric == "loss"
    # held-out prompts have rewards, but no loss; precomputed columns lack answers of later steps
    excluded = {
        "--engine streaming": parts["engine"].key == "streaming",
        "--vision-stages": run.vision_stages > 0,
        "--neftune-alpha": run.neftune_alpha > 0,
        f"--reference {run.reference}": run.reference in ("precompute", "columns"),
        "--early-stop.metric loss": stops_on_loss,
        "--save-best loss": run.save_best in ("loss", "token_accuracy"),
    }
    refuse_beside(excluded, f"--loss-fn {loss.key}", "Drop it, or name reward.")


# options of drawing answers that distillation takes
OF_OWN_ANSWERS = frozenset(
    "max_completion_length sampling_temperature stop_strings prompts_together".split()
)


def check_teacher(run: Any, parts: Any) -> None:
    """Refuse a loss against a teacher without one, and a teacher without such a loss."""
    loss, collate, own = parts["loss_fn"], parts.get("collate_fn"), run.teacher
    given = [f"--teacher.{name}" for name in given_options(own)]
    if not loss.facts.needs_teacher:
        if given:
            raise OptionError(f"{given[0]} requires --loss-fn distill. Add it or drop {given[0]}.")
        return
    if not (own.path or own.url or own.table):
        raise OptionError(
            f"--loss-fn {loss.key} requires a teacher. Add --teacher.path with a model folder, "
            "--teacher.url or --teacher.table."
        )
    if own.table and run.eval_samples != 0:
        raise OptionError("--teacher.table has only training rows. Add --eval-samples 0.")
    if not own.lmbda:
        return
    others = set(given_options(run.rollouts)) - OF_OWN_ANSWERS
    excluded = {
        "--engine streaming": parts["engine"].key == "streaming",
        "--vision-stages": run.vision_stages > 0,
        "--neftune-alpha": run.neftune_alpha > 0,
        f"--collate-fn {collate and collate.key}": collate is not None
        and (collate.facts.takes_tokens or (collate.facts.gives_prompts and own.lmbda < 1)),
        **{f"--rollouts.{name}": True for name in sorted(others)},
    }
    refuse_beside(excluded, "--teacher.lmbda")
