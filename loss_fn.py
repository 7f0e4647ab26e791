"""The loss_fn parts: (logits, micro-batch) -> one number, already divided for the whole batch.

A loss may also return named figures that are logged. The sim_fn parts say how much alike two
batches of vectors are, for a loss that asks for one. The reward parts say how good answers are,
for a loss over what the model answers: (prompts, completions, samples) -> a number or None each.

Shapes: logits [B, T, V], labels [B, T] aligned with the token ids, -100 where unsupervised.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Literal

from register import loss_fn_register, reward_register, sim_fn_register
from stageline.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

IGNORE = -100
LossType = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "nca_pair",
    "simpo",
    "orpo",
]
_LOSSES = "stageline.modules.losses"
GROUP_COUNTS = {"num_marked": f"{_LOSSES}:count_marked", "num_groups": f"{_LOSSES}:count_groups"}
PAIR_COUNTS = {"num_pairs": f"{_LOSSES}:count_pairs", "num_chosen": f"{_LOSSES}:count_chosen"}
ANSWER_COUNTS = {
    "num_answers": f"{_LOSSES}:count_answers",
    "num_wanted": f"{_LOSSES}:count_wanted",
    "num_unwanted": f"{_LOSSES}:count_unwanted",
}
_POLICY = "stageline.modules.policy_loss"
POLICY_COUNTS = {
    "num_tokens": f"{_POLICY}:count_learnt_tokens",
    "num_answers": f"{_POLICY}:count_answers",
}
REWARD_COUNTS = {"num_pairs": f"{_LOSSES}:count_reward_pairs"}


@loss_fn_register("sft", "pt", is_token_sum=True, is_cross_entropy=True)
def sft(
    logits_BTV: torch.Tensor, micro_batch: dict[str, torch.Tensor], *, num_targets: torch.Tensor
) -> torch.Tensor:
    """Next-token cross-entropy: the sum over supervised tokens by their number in the whole batch.

    Dividing by the global number, not per micro-batch, is what makes the result independent of
    how samples fall into micro-batches.

    Args:
        num_targets: supervised tokens of all micro-batches of the optimizer step together.
    """
    import torch
    from torch.nn import functional

    labels = functional.pad(micro_batch["labels"], (0, 1), value=IGNORE)[:, 1:]
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    total = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / num_targets


@sim_fn_register("js")
def js(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """1 - Jensen-Shannon divergence / ln 2 of two batches of distributions, in [0, 1]."""
    from stageline.modules.losses import js_similarity

    return js_similarity(a_NV, b_NV)


@sim_fn_register("cos")
def cos(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """Cosine of the angle between two batches of vectors."""
    from stageline.modules.losses import cos_similarity

    return cos_similarity(a_NV, b_NV)


@loss_fn_register("contrastive", counts=GROUP_COUNTS)
def contrastive(
    logits_BTV: torch.Tensor,
    micro_batch: dict[str, torch.Tensor],
    *,
    num_targets: torch.Tensor,
    num_marked: torch.Tensor,
    num_groups: torch.Tensor,
    step: int,
    sim_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    marked_weight: float = 1.0,
    contrastive_weight: float = 1.0,
    temperature: float = 0.1,
    warmup_steps: int = 0,
    start_step: int = 0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Next-token over all and over marked tokens, and positive against negatives of each group.

    A sample stands for the mean, over its marked tokens, of the distributions that predict them;
    over all its supervised tokens where none is marked. The similarities of the anchor to the
    others go, divided by the temperature, through a softmax whose right answer is the positive.
    Each term is divided by its number in the whole batch.

    Args:
        marked_weight: of the next-token loss over marked tokens, beside 1 over all.
        contrastive_weight: of the comparison, once it is warm.
        temperature: lower ones look at the most similar sample alone.
        warmup_steps: optimizer steps in which contrastive_weight rises from 0, in a straight line.
        start_step: optimizer step from which it rises; nothing is compared before.
    """
    import torch

    from stageline.modules.losses import group_losses, next_marks, token_losses, warm_up

    if temperature <= 0 or min(marked_weight, contrastive_weight, warmup_steps, start_step) < 0:
        raise UserError(
            f"the contrastive loss has temperature {temperature:g}, marked_weight "
            f"{marked_weight:g}, contrastive_weight {contrastive_weight:g}, warmup_steps "
            f"{warmup_steps}, start_step {start_step}. A temperature above 0 and nothing below 0 "
            "were expected: correct --loss-fn.temperature or the other options of --loss-fn."
        )
    losses_BT = token_losses(logits_BTV, micro_batch)
    token = losses_BT.sum() / num_targets
    marked = (losses_BT * next_marks(micro_batch)).sum() / num_marked.clamp(min=1)
    weight = contrastive_weight * warm_up(step, start_step=start_step, warmup_steps=warmup_steps)
    with torch.set_grad_enabled(torch.is_grad_enabled() and weight > 0):
        losses_G, is_nearest_G = group_losses(
            logits_BTV, micro_batch, sim_fn=sim_fn, temperature=temperature
        )
    compared = losses_G.sum() / num_groups.clamp(min=1)
    figures = {
        "token_loss": token,
        "marked_loss": marked,
        "contrastive_loss": compared,
        "contrastive_accuracy": is_nearest_G.sum() / num_groups.clamp(min=1),
    }
    loss = token + marked_weight * marked
    return (loss + weight * compared if weight > 0 else loss), figures


def _compares(
    *, loss_type: str = "sigmoid", reference_free: bool = False, **others: object
) -> bool:
    from stageline.modules.losses import WITHOUT_REFERENCE

    return not reference_free and loss_type not in WITHOUT_REFERENCE


@loss_fn_register("dpo", counts=PAIR_COUNTS, needs_reference=_compares)
def dpo(
    logits_BTV: torch.Tensor,
    micro_batch: dict[str, torch.Tensor],
    *,
    num_targets: torch.Tensor,
    num_pairs: torch.Tensor,
    num_chosen: torch.Tensor,
    beta: float = 0.1,
    loss_type: LossType = "sigmoid",
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    sft_weight: float = 0.0,
    reference_free: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Direct preference optimization: chosen answers against rejected ones (--collate-fn dpo).

    The mean over all pairs of the step. Rewards are beta times the log-ratio of model and
    reference.

    Args:
        beta: how dear it is to leave the reference; of ipo, simpo and orpo their own weight.
        loss_type: sigmoid is the one of the paper.
        label_smoothing: share of the pairs that is taken to be the wrong way round (sigmoid,
            robust, simpo).
        margin: by which simpo wants the chosen answer ahead.
        sft_weight: of the next-token loss over the chosen answers, added to the rest.
        reference_free: compare with nothing, as simpo and orpo always do.
    """  # fmt: skip
    if beta <= 0 or not 0 <= label_smoothing < 0.5 or min(sft_weight, margin) < 0:
        raise UserError(
            f"the loss dpo has beta {beta:g}, label_smoothing {label_smoothing:g}, sft_weight "
            f"{sft_weight:g}, margin {margin:g}. A beta above 0, a smoothing from 0 to below 0.5 "
            "and nothing below 0 were expected: correct the options of --loss-fn."
        )
    from stageline.modules.losses import PairOptions, pair_losses, row_log_probs

    log_probs_B = row_log_probs(logits_BTV, micro_batch["labels"])
    losses_P, rewards = pair_losses(
        log_probs_B,
        micro_batch,
        loss_type=loss_type,
        options=PairOptions(beta, label_smoothing, margin),
        has_reference=_compares(loss_type=loss_type, reference_free=reference_free),
    )
    pairs = num_pairs.clamp(min=1)
    loss = losses_P.sum() / pairs
    figures = {name: value.sum() / pairs for name, value in rewards.items()}
    if sft_weight > 0:
        figures["chosen_loss"] = -log_probs_B[::2].sum() / num_chosen.clamp(min=1)
        loss = loss + sft_weight * figures["chosen_loss"]
    return loss, figures


def _estimates(*, use_kl: bool = True, **others: object) -> bool:
    return use_kl


@loss_fn_register("kto", counts=ANSWER_COUNTS, needs_reference=True, needs_kl=_estimates)
def kto(
    logits_BTV: torch.Tensor,
    micro_batch: dict[str, torch.Tensor],
    *,
    num_targets: torch.Tensor,
    num_answers: torch.Tensor,
    num_wanted: torch.Tensor,
    num_unwanted: torch.Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    use_kl: bool = True,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Kahneman-Tversky optimization: single answers that are wanted or not (--collate-fn kto).

    The mean over all answers of the step; the baseline is a mean over the whole step, too.

    Args:
        beta: how dear it is to leave the reference.
        desirable_weight: of wanted answers; with fewer of them, more balances the two.
        undesirable_weight: of the others.
        use_kl: compare with how far the model is from the reference in general; without, that is
            taken as 0 (apo_zero_unpaired of trl), and a step has one pass less.
    """
    if beta <= 0 or min(desirable_weight, undesirable_weight) < 0:
        raise UserError(
            f"the loss kto has beta {beta:g}, desirable_weight {desirable_weight:g}, "
            f"undesirable_weight {undesirable_weight:g}. A beta above 0 and weights of 0 or more "
            "were expected: correct the options of --loss-fn."
        )
    from stageline.modules.losses import KL, answer_losses, given, row_lengths, row_log_probs

    log_probs_B = row_log_probs(logits_BTV, micro_batch["labels"])
    kl = given(micro_batch, KL) if use_kl else None
    losses_B, rewards_B = answer_losses(
        log_probs_B,
        micro_batch,
        beta=beta,
        kl=kl,
        wanted_weight=desirable_weight,
        unwanted_weight=undesirable_weight,
    )
    answers = num_answers.clamp(min=1)
    is_wanted = micro_batch["loss_is_wanted"]
    # of a step with answers of one kind alone the mean over the other is no number, not 0
    chosen = (rewards_B * is_wanted).sum() / num_wanted
    rejected = (rewards_B * ~is_wanted).sum() / num_unwanted
    figures = {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "reward_margin": chosen - rejected,
    }
    if kl is not None:
        figures["kl"] = kl * (row_lengths(micro_batch["labels"]) > 0).sum() / answers
    return losses_B.sum() / answers, figures


@loss_fn_register("rm", counts=REWARD_COUNTS, predicts_tokens=False)
def rm(
    scores_BT1: torch.Tensor,
    micro_batch: dict[str, torch.Tensor],
    *,
    num_targets: torch.Tensor,
    num_pairs: torch.Tensor,
    center_coefficient: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A reward model's loss over pairs: -log sigmoid(chosen reward - rejected reward - margin).

    Of rows as --collate-fn rm makes them, scored by --train-model reward. Divided by the pairs of
    the whole batch.

    Args:
        center_coefficient: of the squared sum of a pair's two rewards, which keeps rewards around
            0; 0.01 is common.
    """
    if scores_BT1.shape[-1] != 1:
        raise UserError(
            f"the rm loss got {scores_BT1.shape[-1]} numbers a token. One was expected, because a "
            "reward is a number: train with --train-model reward."
        )
    if center_coefficient < 0:
        raise UserError(
            f"--loss-fn.center_coefficient is {center_coefficient:g}. 0 or more was expected, "
            "because rewards are to be drawn to 0, not pushed from it: correct it."
        )
    import torch
    from torch.nn import functional

    from stageline.modules.losses import pair_rewards

    chosen_P, rejected_P, counts_P = pair_rewards(scores_BT1, micro_batch)
    margins_P = micro_batch.get("loss_margins", torch.zeros(())).to(chosen_P)
    apart_P = chosen_P - rejected_P
    loss = -(functional.logsigmoid(apart_P - margins_P) * counts_P).sum() / num_pairs
    if center_coefficient:
        loss = loss + center_coefficient * (chosen_P + rejected_P).square().sum() / num_pairs
    figures = {
        "reward_accuracy": ((apart_P > 0) * counts_P).sum() / num_pairs,
        "chosen_reward": chosen_P.sum() / num_pairs,
        "rejected_reward": rejected_P.sum() / num_pairs,
        "reward_margin": apart_P.sum() / num_pairs,
    }
    return loss, figures


@loss_fn_register("grpo", counts=POLICY_COUNTS, samples_answers=True, reads_by_token=True)
def grpo(
    logits_BTV: torch.Tensor,
    micro_batch: dict[str, torch.Tensor],
    *,
    num_targets: torch.Tensor,
    num_tokens: torch.Tensor,
    num_answers: torch.Tensor,
    kl_beta: float,
    sampling_temperature: float,
    max_completion_length: int,
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo"] = "dapo",
    importance_sampling_level: Literal["token", "sequence"] = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    entropy_coef: float = 0.0,
    importance_correction: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "auto",
    importance_cap: float = 3.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Group relative policy optimization: the model answers, rewards judge (--collate-fn grpo).

    Names, formulas and defaults are those of trl's GRPOTrainer.

    Args:
        loss_type: how terms are divided: dapo by all tokens of the step, grpo by the tokens of
            each answer, dr_grpo by --rollouts.max_completion_length; bnpo is dapo, for a step is
            one batch; gspo is grpo with a ratio for each answer; cispo weighs log-probabilities.
        importance_sampling_level: what has a ratio of its own; gspo is sequence.
        epsilon: how far a ratio may go below 1 (and above) and still be followed.
        epsilon_high: how far above 1, default epsilon; of cispo the largest ratio itself (5 is
            usual).
        delta: the largest ratio of a bad answer; default: none.
        entropy_coef: of the mean entropy of the tokens, which is taken from the loss.
        importance_correction: of answers that were drawn with other roundings than are trained:
            the ratio is cut at the cap (truncate) or is 0 above it (mask), of each token or of a
            whole answer; auto: sequence_mask in half types, none in float32.
        importance_cap: the largest such ratio.
    """
    from stageline.modules.policy_loss import PolicyOptions, policy_loss

    options = PolicyOptions(
        loss_type=loss_type,
        importance_sampling_level=importance_sampling_level,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        kl_beta=kl_beta,
        entropy_coef=entropy_coef,
        importance_correction=importance_correction,
        importance_cap=importance_cap,
        temperature=sampling_temperature,
        max_completion_length=max_completion_length,
    )
    options.check()
    return policy_loss(
        logits_BTV, micro_batch, num_tokens=num_tokens, num_answers=num_answers, options=options
    )


@reward_register("exact_answer", takes_lots=True)
def exact_answer(
    prompts: Sequence[str], completions: Sequence[str], samples: Sequence[dict[str, Any]]
) -> list[float | None]:
    """1 for the right answer and nothing else; an <answer> tag and thoughts are looked through."""
    from stageline.tasks.rewards import is_answer

    return [float(is_answer(*one)) for one in zip(completions, samples, strict=True)]


@reward_register("contains", takes_lots=True)
def contains(
    prompts: Sequence[str], completions: Sequence[str], samples: Sequence[dict[str, Any]]
) -> list[float | None]:
    """1 where a right answer stands somewhere in the text, as whole words."""
    from stageline.tasks.answer_text import contains_words, normalize
    from stageline.tasks.rewards import references, said

    return [
        float(any(contains_words(normalize(said(text)), normalize(a)) for a in references(sample)))
        for text, sample in zip(completions, samples, strict=True)
    ]


@reward_register("number", takes_lots=True)
def number(
    prompts: Sequence[str],
    completions: Sequence[str],
    samples: Sequence[dict[str, Any]],
    *,
    tolerance: float = 0.0,
    is_relative: bool = False,
) -> list[float | None]:
    """1 where the last number of the text is that of the answer; 0 without a number.

    Args:
        tolerance: how far it may be away.
        is_relative: the tolerance is a share of the right number.
    """
    from stageline.tasks.rewards import is_near

    near = functools.partial(is_near, tolerance=tolerance, is_relative=is_relative)
    return [float(bool(near(*one))) for one in zip(completions, samples, strict=True)]


@reward_register("choice", takes_lots=True)
def choice(
    prompts: Sequence[str], completions: Sequence[str], samples: Sequence[dict[str, Any]]
) -> list[float | None]:
    """1 where the text names the right one of the sample's `choices`, by letter or text."""
    from stageline.tasks.rewards import is_choice

    return [float(is_choice(*one)) for one in zip(completions, samples, strict=True)]


@reward_register("format", takes_lots=True)
def format_(
    prompts: Sequence[str],
    completions: Sequence[str],
    samples: Sequence[dict[str, Any]],
    *,
    tags: list[str] = ["think", "answer"],
    pattern: str | None = None,
) -> list[float | None]:
    """1 for texts of the wanted form: tags in their order, or a regular expression.

    Args:
        tags: each once, in this order, nothing around them.
        pattern: that the whole text has to be, in the place of tags; one that takes too long says
            nothing of an answer.
    """
    from stageline.tasks.rewards import fits, has_tags

    if pattern is None:
        return [float(has_tags(text, tags)) for text in completions]
    found = [fits(text, pattern) for text in completions]
    return [None if one is None else float(one) for one in found]


@reward_register("length", takes_lots=True)
def length(
    prompts: Sequence[str],
    completions: Sequence[str],
    samples: Sequence[dict[str, Any]],
    *,
    longest: int = 512,
    margin: int = 128,
) -> list[float | None]:
    """0 for answers that are short enough, falling to -1 for the longest (DAPO).

    Args:
        longest: tokens of an answer that gets -1.
        margin: tokens before that from which it falls.
    """
    from stageline.tasks.rewards import length_reward

    return [
        length_reward(int(sample["num_tokens"]), longest=longest, margin=margin)
        for sample in samples
    ]


@reward_register("reward_model", takes_lots=True, is_dear=True)
def reward_model(
    prompts: Sequence[str],
    completions: Sequence[str],
    samples: Sequence[dict[str, Any]],
    *,
    path: str,
    prompt: str = "[IMAGE][QUESTION][ANSWER]",
    batch_size: int = 8,
    device: str = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> list[float | None]:
    """The score of a reward model: a checkpoint of --loss-fn rm, or any classifier with one label.

    It is loaded once, on the first rank, and reads the conversation by its own chat template; an
    answer that is longer than its positions has none.

    Args:
        path: its folder, or that of an adapter with its score.
        prompt: template of a row without messages; what comes before [ANSWER] is the user's turn.
        batch_size: answers that are scored together.
        device: cpu, or cuda, xpu ... for the one of the first rank.
        dtype: of its weights; auto: as they are in the files.
    """
    from stageline.training.reward_model import reward_model

    model = reward_model(path, device=device, dtype=dtype)
    return model(samples, completions, prompt=prompt, batch_size=batch_size)


@reward_register("remote", takes_lots=True, is_dear=True)
def remote(
    prompts: Sequence[str],
    completions: Sequence[str],
    samples: Sequence[dict[str, Any]],
    *,
    url: str = "http://127.0.0.1:8000/v1",
    model: str = "judge",
    key_variable: str = "OPENAI_API_KEY",
    seconds: float = 60.0,
) -> list[float | None]:
    """What another model gives, from 0 to 1: a judge behind an OpenAI-style API, asked at once.

    Args:
        url: up to /v1; nothing but prompt, right answer and answer goes there.
        model: its name there.
        key_variable: environment variable that holds the key, if it needs one.
        seconds: that one judgement may take.
    """
    from stageline.tasks.rewards import judged, side_by_side

    key = os.environ.get(key_variable)

    def ask(prompt: str, completion: str, sample: dict[str, Any]) -> float | None:
        right = str(sample.get("answer", "unknown"))
        return judged(url, model, key, prompt, completion, right, seconds)

    return side_by_side(ask, prompts, completions, samples)
