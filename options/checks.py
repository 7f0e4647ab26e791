"""What the options of a run must be together. Needs nothing but numbers and names."""

from options.fields import OptionError, spelled
from options.run_options import RunConfig, SharedOptions


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
