"""Options of a run whose model answers before each step and is trained on the rewards (GRPO)."""

from typing import Any, Literal

from options.fields import OptionError, Options, free_option, given_options, option, spelled


class RolloutOptions(Options):
    """Rollouts: answers with rewards"""

    reward_weights: list[float] | None = option(
        None, "weight of each reward in the sum, such as 1,0.2; default: 1 each"
    )
    reward_timeout: float = option(
        120.0, "timeout of all reward calls of a step, in seconds (0 = none)", at_least=0
    )
    advantage: Literal["group", "group_no_std", "batch", "rloo"] = option(
        "group",
        "normalization of rewards: group = mean and deviation of the group, group_no_std = only "
        "the mean, batch = mean of the group and deviation of the batch, rloo = mean of the others",
    )
    group_size: int = option(8, "answers per prompt (--batch-size counts answers)", at_least=2)
    inner_steps: int = option(1, "optimizer steps on the same answers", at_least=1)
    kl_beta: float = option(
        0.0, "weight of the KL divergence from the start model (0 = off)", at_least=0, to="loss_fn"
    )
    sampling_temperature: float = option(
        1.0, "sampling temperature, also of the loss", at_least=0.01, to="loss_fn"
    )
    max_completion_length: int = option(
        512, "max length of an answer, in tokens", at_least=1, to="loss_fn collate_fn"
    )
    stop_strings: list[str] | None = option(None, "strings that end an answer")
    mask_truncated_completions: bool = option(False, "leave truncated answers out of the loss")
    drop_equal_groups: bool = option(
        False, "leave groups with equal rewards out of the mean of the loss"
    )
    prompts_together: int = option(
        8, "prompts that are answered together (changes rounding)", at_least=1
    )
    ahead: int = option(0, "steps that answers are sampled ahead (0 or 1)", at_least=0, at_most=1)
    keep_samples: int = free_option(
        1, "steps between entries in samples.jsonl (0 = none)", at_least=0
    )


def check_rollouts(run: Any, parts: Any) -> None:
    """Refuse options that a GRPO run cannot have, and its own in any other run."""
    loss, collate = parts["loss_fn"], parts.get("collate_fn")
    answers = bool(loss.facts.samples_answers)
    if collate is not None and bool(collate.facts.gives_prompts) != answers:
        right = "--collate-fn grpo" if answers else "--loss-fn grpo or --collate-fn sft"
        raise OptionError(
            f"--collate-fn {collate.key} does not go with --loss-fn {loss.key}. Use {right}."
        )
    if not answers:
        given = [f"--rollouts.{name}" for name in given_options(run.rollouts)]
        given += ["--reference frozen_copy"] if run.reference == "frozen_copy" else []
        if given:
            raise OptionError(f"{given[0]} requires --loss-fn grpo. Add it or drop {given[0]}.")
        return
    own = run.rollouts
    size = own.group_size
    if run.batch_size * run.accumulate_steps % size:
        raise OptionError(
            f"--batch-size {run.batch_size} x --accumulate-steps {run.accumulate_steps} is not "
            f"divisible by --rollouts.group_size {size}. Make it a multiple of {size}: a batch "
            "counts answers."
        )
    num_rewards = len(parts["reward"].part)
    if own.reward_weights is not None and len(own.reward_weights) != num_rewards:
        raise OptionError(
            f"--rollouts.reward_weights has {len(own.reward_weights)} numbers, --reward names "
            f"{num_rewards} rewards. Give one for each, in their order."
        )
    names = ["save_steps", "eval_steps"]
    # steps of epochs are computed later, and rounded up
    names += ["total_steps"] if run.num_train_epochs is None else []
    for name in names:
        value = getattr(run, name)
        if own.inner_steps > 1 and (value == "epoch" or value % own.inner_steps):
            raise OptionError(
                f"{spelled(name)} {value} is not a multiple of --rollouts.inner_steps "
                f"{own.inner_steps}, and a run is saved where answers are drawn. Change one of "
                "them."
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
    for name, is_given in excluded.items():
        if is_given:
            hint = " or give reward" if name.endswith(" loss") else ""
            raise OptionError(f"{name} does not go with --loss-fn {loss.key}. Drop it{hint}.")


def check_prompts(run: Any, group_size: int) -> None:
    """Refuse steps that would cut groups of rows, whose rewards are computed together."""
    size = run.rollouts.group_size
    num_prompts = run.batch_size * run.accumulate_steps // size
    if num_prompts % group_size:
        raise OptionError(
            f"--batch-size {run.batch_size} x --accumulate-steps {run.accumulate_steps} is "
            f"{num_prompts} prompts a step, and the dataset has groups of {group_size} rows. Make "
            f"--batch-size a multiple of {group_size * size}."
        )
