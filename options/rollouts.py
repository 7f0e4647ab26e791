"""The options of a run whose model answers before each step, and is trained on how well it did."""

from dataclasses import dataclass
from typing import Any, Literal

from options.fields import OptionError, free_option, given_options, option, spelled


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
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
        False, "answers that were cut at --max-completion-length are not learnt"
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
    rollouts_ahead: int = option(
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
    if not loss.facts["samples_answers"]:
        if run.reference == "frozen_copy":
            raise OptionError(
                f"--reference frozen_copy came with --loss-fn {loss.key}. It was expected with "
                "--loss-fn grpo alone, because a table of the rows, made once, needs no copy: use "
                "--reference precompute."
            )
        given = given_options(run, of=RolloutOptions)
        if given:
            name = spelled(next(iter(given)))
            raise OptionError(
                f"{name} came with --loss-fn {loss.key}. It was expected with --loss-fn grpo, "
                f"because no other loss has the model answer: leave {name} out, or choose that."
            )
        if collate is not None and collate.facts["gives_prompts"]:
            raise OptionError(
                f"--collate-fn {collate.key} came with --loss-fn {loss.key}. --loss-fn grpo was "
                "expected, because its rows are prompts without answers: choose it, or "
                "--collate-fn sft."
            )
        return
    if collate is not None and not collate.facts["gives_prompts"]:
        raise OptionError(
            f"--loss-fn {loss.key} came with --collate-fn {collate.key}. --collate-fn grpo was "
            "expected, because the model's own answers are learnt, not those of the rows: use it."
        )
    _check_numbers(run, parts)
    _check_not_built(run, parts)


def _check_numbers(run: Any, parts: Any) -> None:
    size = run.group_size
    if run.batch_size * run.accumulate_steps % size:
        raise OptionError(
            f"--batch-size {run.batch_size} x --accumulate-steps {run.accumulate_steps} is not "
            f"divisible by --group-size {size}. Whole groups were expected, because a batch counts "
            f"answers, and those to one prompt are compared: make it a multiple of {size}."
        )
    num_rewards = len(parts["reward"].part)
    if run.reward_weights is not None and len(run.reward_weights) != num_rewards:
        raise OptionError(
            f"--reward-weights has {len(run.reward_weights)} numbers, --reward names {num_rewards} "
            "rewards. One for each was expected, in their order: correct one of the two."
        )
    for name in ("total_steps", "save_steps", "eval_steps"):
        value = getattr(run, name)
        if run.inner_steps > 1 and (value == "epoch" or value % run.inner_steps):
            raise OptionError(
                f"{spelled(name)} {value} is no multiple of --inner-steps {run.inner_steps}. One "
                "was expected, because the answers that some steps share are not saved: a run is "
                "saved, and ends, where new ones are drawn. Change one of the two."
            )


def check_prompts(run: Any, group_size: int) -> None:
    """Refuses steps that would cut the groups of a dataset, whose answers are judged together.

    Args:
        group_size: rows of a group of the dataset, such as the views of a scene.
    """
    num_prompts = run.batch_size * run.accumulate_steps // run.group_size
    if num_prompts % group_size:
        raise OptionError(
            f"--batch-size {run.batch_size} x --accumulate-steps {run.accumulate_steps} with "
            f"--group-size {run.group_size} is {num_prompts} prompts a step, and the dataset has "
            f"groups of {group_size} rows. Whole groups were expected, because their answers are "
            f"judged together: make --batch-size a multiple of {group_size * run.group_size}."
        )


def _check_not_built(run: Any, parts: Any) -> None:
    loss = parts["loss_fn"].key
    refused = {
        "--engine streaming": parts["engine"].key == "streaming",
        "--vision-stages": run.vision_stages > 0,
        "--neftune-alpha": run.neftune_alpha > 0,
        "--reference precompute": run.reference == "precompute",
        "--reference columns": run.reference == "columns",
        "--early-stop-metric loss": run.early_stop > 0 and run.early_stop_metric == "loss",
        "--save-best loss": run.save_best in ("loss", "token_accuracy"),
    }
    reasons = {
        "--engine streaming": "its stages pass through the device one by one for each token",
        "--reference precompute": "a table knows no answers that are drawn later",
        "--reference columns": "a column knows no answers that are drawn later",
        "--vision-stages": "stages of a tower do not answer",
        "--neftune-alpha": "answers come from the model without noise, and ratios compare with it",
        "--early-stop-metric loss": "held-out prompts have rewards and no loss (use reward)",
        "--save-best loss": "held-out prompts have rewards and no loss (use reward)",
    }
    for name, is_given in refused.items():
        if is_given:
            raise OptionError(
                f"{name} came with --loss-fn {loss}, whose model answers before each step. It was "
                f"expected to be left out, because {reasons[name]}."
            )
