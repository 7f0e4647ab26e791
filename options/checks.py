"""What the options of a run must be together. Needs nothing but numbers and names."""

from collections.abc import Mapping

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
