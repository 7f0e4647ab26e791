"""The options of a run whose model answers before each step, and is trained on how well it did."""

from typing import Any, Literal

from options.fields import OptionError, Options, free_option, given_options, option, spelled


class RolloutOptions(Options):
    """Answers that are rewarded"""

    reward_weights: list[float] | None = option(
        None, "weight of each reward in the sum, 1,0.2; default: 1 each"
    )
    reward_timeout: float = option(
        120.0,
        "seconds that the rewards of a step may take; a later one has nothing to say; 0: any",
        at_least=0,
    )
    advantage: Literal["group", "group_no_std", "batch", "rloo"] = option(
        "group",
        "what an answer's reward is compared with: group, less the mean of its group by the "
        "deviation there; group_no_std: less the mean; batch: by the deviation of all; rloo: less "
        "the mean of the others",
    )
    group_size: int = option(8, "answers to each prompt; --batch-size counts answers", at_least=2)
    inner_steps: int = option(1, "optimizer steps on the same answers", at_least=1)
    kl_beta: float = option(
        0.0,
        "weight of the divergence from the model that training began with; --reference says how",
        at_least=0,
        to="loss_fn",
    )
    sampling_temperature: float = option(
        1.0, "temperature that answers are drawn at, and scored at", at_least=0.01, to="loss_fn"
    )
    max_completion_length: int = option(
        512, "most tokens of an answer, within --max-token-num", at_least=1, to="loss_fn collate_fn"
    )
    stop_strings: list[str] | None = option(None, "texts that end an answer, besides end tokens")
    mask_truncated_completions: bool = option(
        False, "answers that were cut at --rollouts.max_completion_length are not learnt"
    )
    drop_equal_groups: bool = option(
        False, "groups whose answers all have one reward do not count in the loss's mean"
    )
    prompts_together: int = option(
        8,
        "prompts whose answers are drawn together, whatever the stages: roundings, and so answers, "
        "depend on it",
        at_least=1,
    )
    ahead: int = option(
        0,
        "1: the answers of the next step are drawn before this one, by weights a step older, and "
        "rewards judge them while it trains",
        at_least=0,
        at_most=1,
    )
    keep_samples: int = free_option(
        1, "write the answers of each such step into samples.jsonl; 0: none", at_least=0
    )


def check_rollouts(run: Any, parts: Any) -> None:
    """Refuses what a run whose model answers cannot do, and its options in any other run."""
    loss, collate = parts["loss_fn"], parts.get("collate_fn")
    if not loss.facts.samples_answers:
        if run.reference == "frozen_copy":
            raise OptionError(
                f"--reference frozen_copy came with --loss-fn {loss.key}. Use --reference "
                "precompute: its rows need no copy."
            )
        given = given_options(run.rollouts)
        if given:
            name = f"--rollouts.{next(iter(given))}"
            raise OptionError(
                f"{name} came with --loss-fn {loss.key}. Choose --loss-fn grpo or drop {name}."
            )
        if collate is not None and collate.facts.gives_prompts:
            raise OptionError(
                f"--collate-fn {collate.key} came with --loss-fn {loss.key}. Use "
                "--loss-fn grpo or --collate-fn sft."
            )
        return
    if collate is not None and not collate.facts.gives_prompts:
        raise OptionError(
            f"--loss-fn {loss.key} came with --collate-fn {collate.key}. Use --collate-fn grpo."
        )
    own = run.rollouts
    size = own.group_size
    if run.batch_size * run.accumulate_steps % size:
        raise OptionError(
            f"--batch-size {run.batch_size} x --accumulate-steps {run.accumulate_steps} is not "
            f"divisible by --rollouts.group_size {size}: a batch counts answers. Make it a "
            f"multiple of {size}."
        )
    num_rewards = len(parts["reward"].part)
    if own.reward_weights is not None and len(own.reward_weights) != num_rewards:
        raise OptionError(
            f"--rollouts.reward_weights has {len(own.reward_weights)} numbers, --reward names "
            f"{num_rewards} rewards. Give one for each, in their order."
        )
    for name in ("total_steps", "save_steps", "eval_steps"):
        value = getattr(run, name)
        if name == "total_steps" and run.num_train_epochs is not None:
            continue  # which come later, and are rounded up
        if own.inner_steps > 1 and (value == "epoch" or value % own.inner_steps):
            raise OptionError(
                f"{spelled(name)} {value} is no multiple of --rollouts.inner_steps "
                f"{own.inner_steps}: a run is saved where answers are drawn. Change one of them."
            )
    early = run.early_stop.patience > 0 and run.early_stop.metric == "loss"
    no_loss = "held-out prompts have rewards and no loss (use reward)"
    for name, is_given, why in (
        ("--engine streaming", parts["engine"].key == "streaming", "it decodes no answers"),
        ("--vision-stages", run.vision_stages > 0, "stages of a tower do not answer"),
        ("--neftune-alpha", run.neftune_alpha > 0, "answers come from the model without noise"),
        (
            f"--reference {run.reference}",
            run.reference in ("precompute", "columns"),
            "a table knows no answers that are drawn later",
        ),
        ("--early-stop.metric loss", early, no_loss),
        ("--save-best loss", run.save_best in ("loss", "token_accuracy"), no_loss),
    ):
        if is_given:
            raise OptionError(
                f"{name} came with --loss-fn {loss.key}, whose model answers before each step: "
                f"{why}. Drop {name}."
            )


def check_prompts(run: Any, group_size: int) -> None:
    """Refuses steps that would cut the groups of a dataset, whose answers are judged together.

    Args:
        group_size: rows of a group of the dataset, such as the views of a scene.
    """
    size = run.rollouts.group_size
    num_prompts = run.batch_size * run.accumulate_steps // size
    if num_prompts % group_size:
        raise OptionError(
            f"--batch-size {run.batch_size} x --accumulate-steps {run.accumulate_steps} with "
            f"--rollouts.group_size {size} is {num_prompts} prompts a step, and the dataset has "
            f"groups of {group_size} rows. Make --batch-size a multiple of {group_size * size}."
        )
