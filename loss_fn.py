"""Loss components: (logits, micro-batch) -> one number, already divided for the whole batch.

A loss may also return named figures that are logged. The sim_fn parts say how much alike two
batches of vectors are, for a loss that asks for one. The reward parts say how good answers are,
for a loss over what the model answers: (prompts, completions, samples) -> a number or None each.
The environment parts answer a model's turns.

Shapes: B rows, T tokens, V vocabulary; P = B / 2 pairs; G groups of K rows: anchor, positive,
negatives. Logits are [B, T, V]; labels [B, T], aligned with the token ids, -100 where unsupervised.
"""

import ast
import functools
import json
import math
import operator
import os
import re
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any, Literal

import torch
from torch.nn import functional

from register import environment_register, loss_fn_register, reward_register, sim_fn_register
from stageline.device import sent
from stageline.errors import DataError, UserError
from stageline.evaluation import rewards
from stageline.inference.answer_text import contains_words, normalize, parse_choice
from stageline.modules import policy_loss
from stageline.modules.chunked_loss import ChunkedLogits
from stageline.modules.losses import (
    DISTILLS,
    IGNORE,
    IS_CHOSEN,
    IS_WANTED,
    KL,
    PAIRS,
    REFERENCE,
    TEACHER,
    TEACHER_IDS,
    TEACHER_PLACES,
    MicroBatch,
    at_least_float32,
    given,
    next_labels,
    row_lengths,
    row_log_probs,
    token_losses,
)

Figures = dict[str, torch.Tensor]
Texts = Sequence[str]
Samples = Sequence[dict[str, Any]]
Rewards = list[float | None]


@loss_fn_register("sft", "pt", is_token_sum=True, reads_by_token=True, is_cross_entropy=True)
def sft(
    logits_BTV: torch.Tensor | ChunkedLogits, micro_batch: MicroBatch, *, num_targets: torch.Tensor
) -> torch.Tensor:
    """Next-token cross-entropy: the sum over supervised tokens by their number in the whole batch.

    Dividing by the global number, not per micro-batch, is what makes the result independent of
    how samples fall into micro-batches.

    Args:
        num_targets: supervised tokens of all micro-batches of the optimizer step together.
    """
    if isinstance(logits_BTV, ChunkedLogits):
        return token_losses(logits_BTV, micro_batch).sum() / num_targets
    total = functional.cross_entropy(
        at_least_float32(logits_BTV).flatten(0, 1),
        next_labels(micro_batch).flatten(),
        ignore_index=IGNORE,
        reduction="sum",
    )
    return total / num_targets


@loss_fn_register("distill", is_token_sum=True, needs_teacher=True)
def distill(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    num_targets: torch.Tensor,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Divergence from a teacher at each supervised token, divided by their number in the batch.

    The generalised Jensen-Shannon divergence of Agarwal et al. 2024 (GKD), named as in trl. Where a
    teacher gives only its likeliest tokens, all others are lumped into one.

    Args:
        beta: divergence: 1 = reverse KL, KL(model || teacher), 0 = forward KL, in between = of both
            from their mixture, in which the teacher has this weight.
        temperature: divisor of the logits of both.
    """
    if not 0 <= beta <= 1 or temperature <= 0:
        raise UserError(
            f"the loss distill has beta {beta:g}, temperature {temperature:g}. Give a "
            "--loss-fn.beta from 0 to 1 and a temperature above 0."
        )
    is_target_BT = next_labels(micro_batch) != IGNORE
    places_N = is_target_BT.flatten().nonzero().flatten()
    logits_NV = at_least_float32(logits_BTV.flatten(0, 1).index_select(0, places_N))
    rows_N = given(micro_batch, TEACHER_PLACES, DISTILLS).flatten()[places_N]
    student = (logits_NV / temperature).log_softmax(-1)
    teacher = given(micro_batch, TEACHER, DISTILLS)[rows_N].to(student)
    if TEACHER_IDS not in micro_batch:
        teacher = (teacher.expand_as(student) / temperature).log_softmax(-1)
    elif temperature != 1:
        raise UserError(
            f"--loss-fn.temperature {temperature:g} needs whole distributions of the teacher. Use "
            "--teacher.path without --teacher.top_k, or a temperature of 1."
        )
    else:
        ids_NK = micro_batch[TEACHER_IDS][rows_N]
        rest_N = student.scatter(-1, ids_NK, -math.inf).logsumexp(-1)
        student = torch.cat([student.gather(-1, ids_NK), rest_N[:, None]], dim=-1)
        # rounding may leave nothing for the rest
        known_N = teacher.logsumexp(-1).clamp(max=-1e-7)
        teacher = torch.cat([teacher, (-torch.expm1(known_N)).log()[:, None]], dim=-1)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return functional.kl_div(q, p, reduction="sum", log_target=True)

    if beta in (0, 1):
        loss = kl(student, teacher) if beta else kl(teacher, student)
    else:
        shares = (student + math.log1p(-beta), teacher + math.log(beta))
        mixture = torch.logaddexp(*shares)
        loss = beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
    return loss / num_targets


@sim_fn_register("js")
def js(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """1 - Jensen-Shannon divergence / ln 2 of two batches of distributions, in [0, 1].

    1 for equal ones, 0 for disjoint ones. Entries of 0 add nothing, and gradients stay finite.
    Rounding may lead out of [0, 1]: the value is put back, the gradient is kept.
    """
    mean_NV = (a_NV + b_NV) / 2
    divergence_N = (_kl(a_NV, mean_NV) + _kl(b_NV, mean_NV)) / 2
    similarity_N = 1 - divergence_N / math.log(2)
    return similarity_N + (similarity_N.clamp(0, 1) - similarity_N).detach()


def _kl(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence in nats; q is not 0 where p is not."""
    least = torch.finfo(p_NV.dtype).tiny  # log 0 would give NaN, also in the gradient
    log_ratio_NV = p_NV.clamp(min=least).log() - q_NV.clamp(min=least).log()
    return (p_NV * log_ratio_NV).sum(dim=-1)


@sim_fn_register("cos")
def cos(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """Cosine of the angle between two batches of vectors."""
    return functional.cosine_similarity(a_NV, b_NV, dim=-1)


CONTRASTIVE = (
    "the contrastive loss",
    "Use `collate_fn` contrastive with a dataset that has groups (`dataset` groups).",
)


def next_marks(micro_batch: MicroBatch) -> torch.Tensor:
    """Return whether the logits of each token predict a marked, supervised one, [B, T]."""
    marks_BT = given(micro_batch, "loss_marks", CONTRASTIVE)
    marks_BT = functional.pad(marks_BT, (0, 1), value=False)[:, 1:]
    return marks_BT & (next_labels(micro_batch) != IGNORE)


def compared_groups(micro_batch: MicroBatch) -> torch.Tensor:
    """Return whether each group is compared, [G]: not padding, not one with a dropped sample."""
    has_target_B = (next_labels(micro_batch) != IGNORE).any(dim=1)
    groups_B = given(micro_batch, "loss_groups", CONTRASTIVE)
    return has_target_B.view(int(groups_B[-1]) + 1, -1).all(dim=1)


def representations(logits_BTV: torch.Tensor, on_host: MicroBatch) -> torch.Tensor:
    """Return the mean predicted distribution of each sample, [B, V] in float32.

    It is the mean over the marked tokens of a sample, or over all its supervised tokens where none
    is marked. A sample without supervised tokens gets 0.
    """
    marks_BT = next_marks(on_host)
    is_target_BT = next_labels(on_host) != IGNORE
    chosen_BT = torch.where(marks_BT.any(dim=1, keepdim=True), marks_BT, is_target_BT)
    places_N = sent(chosen_BT.flatten().nonzero().flatten(), logits_BTV.device)
    # row by row: only chosen tokens' distributions exist, and sums come in the same order each time
    rows = []
    for places in places_N.split(chosen_BT.sum(dim=1).tolist()):
        chosen_NV = logits_BTV.flatten(0, 1).index_select(0, places)
        shares_NV = at_least_float32(chosen_NV).softmax(dim=-1)
        rows.append(shares_NV.sum(dim=0) / max(len(shares_NV), 1))
    return torch.stack(rows)


def group_losses(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    sim_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each compared group and whether its positive is nearest, [G]."""
    # labels, marks and groups on the host: one copy, for which it waits once
    labels_BT = micro_batch["labels"]
    marks_BT = given(micro_batch, "loss_marks", CONTRASTIVE).to(labels_BT)
    groups_B = given(micro_batch, "loss_groups", CONTRASTIVE)
    of_tokens = (labels_BT, marks_BT, groups_B[:, None].expand_as(labels_BT))
    labels, marks, groups = torch.stack(of_tokens).cpu().unbind()
    on_host = {"labels": labels, "loss_marks": marks.bool(), "loss_groups": groups[:, 0]}

    is_compared_G = compared_groups(on_host)
    all_BV = representations(logits_BTV, on_host)
    compared_G = sent(is_compared_G.nonzero().flatten(), logits_BTV.device)
    all_GKV = all_BV.view(len(is_compared_G), -1, all_BV.shape[-1]).index_select(0, compared_G)
    others_GKV = all_GKV[:, 1:]
    anchors_GKV = all_GKV[:, :1].expand_as(others_GKV)
    if len(all_GKV) == 0:  # a sim_fn part need not take an empty batch
        return all_GKV.new_zeros(0), all_GKV.new_zeros(0, dtype=torch.bool)
    pairs = sim_fn(anchors_GKV.flatten(0, 1), others_GKV.flatten(0, 1))
    similarities_GK = pairs.view(others_GKV.shape[:2])
    right_G = similarities_GK.new_zeros(len(similarities_GK), dtype=torch.long)
    losses_G = functional.cross_entropy(similarities_GK / temperature, right_G, reduction="none")
    is_nearest_G = (similarities_GK[:, :1] > similarities_GK[:, 1:]).all(dim=1)
    return losses_G, is_nearest_G


@loss_fn_register(
    "contrastive",
    counts={
        "num_marked": lambda batch: int(next_marks(batch).sum()),
        "num_groups": lambda batch: int(compared_groups(batch).sum()),
    },
)
def contrastive(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
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
) -> tuple[torch.Tensor, Figures]:
    """Next-token loss, more weight on marked tokens, and a contrastive loss over each group.

    A sample is represented by the mean predicted distribution over its marked tokens, or over all
    its supervised tokens where none is marked. The contrastive loss is the cross-entropy of the
    anchor's similarities to the others, divided by the temperature; the positive is the target.
    Each term is divided by its count in the whole batch.

    Args:
        marked_weight: weight of the next-token loss over marked tokens, added to 1 over all.
        contrastive_weight: weight of the contrastive loss after its warm-up.
        temperature: temperature of the similarities; low = only the most similar sample counts.
        warmup_steps: optimizer steps in which contrastive_weight rises linearly from 0.
        start_step: optimizer step at which the contrastive loss begins.
    """
    if temperature <= 0 or min(marked_weight, contrastive_weight, warmup_steps, start_step) < 0:
        raise UserError(
            f"the contrastive loss has temperature {temperature:g}, marked_weight "
            f"{marked_weight:g}, contrastive_weight {contrastive_weight:g}, warmup_steps "
            f"{warmup_steps}, start_step {start_step}. Give a --loss-fn.temperature above 0 and "
            "nothing below 0."
        )
    losses_BT = token_losses(logits_BTV, micro_batch)
    token = losses_BT.sum() / num_targets
    marked = (losses_BT * next_marks(micro_batch)).sum() / num_marked.clamp(min=1)
    weight = contrastive_weight if step >= start_step else 0.0
    if warmup_steps:
        weight *= max(0.0, min(1.0, (step - start_step) / warmup_steps))
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


# Preference losses take log-probabilities of whole answers: of pairs (DPO and its variants) or of
# single desirable and undesirable answers (KTO). Rows of a pair are next to each other, [c0, r0,
# c1, r1, ...]. A row without a target was left out, and has no weight.

PairLoss = Literal[
    "sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard", "nca_pair", "simpo",
    "orpo",
]  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "orpo")
# asks for rows in the order chosen, rejected, and their numbers; see `given`
OF_PAIRS = ("the loss dpo", "Use `collate_fn` dpo.")
OF_ANSWERS = ("the loss kto", "Use `collate_fn` kto.")  # asks whether each answer is wanted


def count_pairs(micro_batch: MicroBatch) -> int:
    """Return the number of pairs with targets.

    Raises:
        UserError: the collate part makes no pairs.
        DataError: the rows of a pair are not next to each other, or only one has targets.
    """
    pairs, is_chosen = (given(micro_batch, name, OF_PAIRS) for name in (PAIRS, IS_CHOSEN))
    is_there = row_lengths(micro_batch["labels"]) > 0
    is_whole = len(pairs) == len(is_there) and len(pairs) % 2 == 0
    if is_whole:
        numbers = pairs[::2]
        is_whole = (
            torch.equal(numbers, pairs[1::2])
            and len(numbers.unique()) == len(numbers)
            and bool(is_chosen[::2].all())
            and not bool(is_chosen[1::2].any())
            and torch.equal(is_there[::2], is_there[1::2])
        )
    if not is_whole:
        raise DataError(
            f"a micro-batch has the pairs {pairs.tolist()} (chosen: {is_chosen.int().tolist()}, "
            f"with an answer: {is_there.int().tolist()}). Let each chosen row have its rejected "
            "one right behind it in the collate part, both with an answer or both without."
        )
    return int(is_there[::2].sum())


def _pair_losses(
    kind: str,
    ratios_B: torch.Tensor,
    ratio_means_B: torch.Tensor,
    means_B: torch.Tensor,
    *,
    beta: float,
    share: float,
    margin: float,
) -> torch.Tensor:
    """Return the loss of each pair, [P].

    Args:
        ratios_B: log-probabilities under the model, less those under the reference.
        ratio_means_B: the same by token.
        means_B: log-probabilities by token, only under the model.
        share: share of the pairs assumed to be mislabeled.
    """
    log_sigmoid = functional.logsigmoid
    chosen, rejected = beta * ratios_B[::2], beta * ratios_B[1::2]
    scores = beta * (ratios_B[::2] - ratios_B[1::2])
    if kind == "sigmoid":  # Rafailov et al. 2023; smoothed as in Mitchell's conservative DPO
        return -(1 - share) * log_sigmoid(scores) - share * log_sigmoid(-scores)
    if kind == "robust":  # Chowdhury et al. 2024: unbiased for that share of mislabeled pairs
        flipped = share * log_sigmoid(-scores) - (1 - share) * log_sigmoid(scores)
        return flipped / (1 - 2 * share)
    if kind == "hinge":  # Zhao et al. 2023 (SLiC)
        return torch.relu(1 - scores)
    if kind == "ipo":  # Azar et al. 2023, by token, as their authors ran it
        return (ratio_means_B[::2] - ratio_means_B[1::2] - 1 / (2 * beta)) ** 2
    if kind == "apo_zero":  # D'Oosterlinck et al. 2024: chosen answers up, rejected ones down
        return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)
    if kind == "apo_down":  # the same paper: both down, rejected answers further
        return torch.sigmoid(chosen) + 1 - torch.sigmoid(scores)
    if kind == "sppo_hard":  # Wu et al. 2024, with a chosen answer that always wins
        half = 0.5 / beta
        return (ratios_B[::2] - half) ** 2 + (ratios_B[1::2] + half) ** 2
    if kind == "nca_pair":  # Chen et al. 2024
        return -log_sigmoid(chosen) - 0.5 * (log_sigmoid(-chosen) + log_sigmoid(-rejected))
    if kind == "simpo":  # Meng et al. 2024: by token, no reference, a margin
        scores = beta * (means_B[::2] - means_B[1::2]) - margin
        return -(1 - share) * log_sigmoid(scores) - share * log_sigmoid(-scores)
    assert kind == "orpo"  # Hong et al. 2024, their odds-ratio term; `sft_weight` 1 adds the other
    odds = [mean - torch.log1p(-mean.exp()) for mean in (means_B[::2], means_B[1::2])]
    return -beta * log_sigmoid(odds[0] - odds[1])


def _compares(
    *, loss_type: str = "sigmoid", reference_free: bool = False, **others: object
) -> bool:
    return not reference_free and loss_type not in WITHOUT_REFERENCE


@loss_fn_register(
    "dpo",
    counts={
        "num_pairs": count_pairs,
        "num_chosen": lambda batch: int(row_lengths(batch["labels"])[::2].sum()),
    },
    needs_reference=_compares,
)
def dpo(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    num_targets: torch.Tensor,
    num_pairs: torch.Tensor,
    num_chosen: torch.Tensor,
    beta: float = 0.1,
    loss_type: PairLoss = "sigmoid",
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    sft_weight: float = 0.0,
    reference_free: bool = False,
) -> tuple[torch.Tensor, Figures]:
    """Direct preference optimization: chosen answers against rejected ones (--collate-fn dpo).

    It is the mean over all pairs of the step. Rewards are beta times the log-ratio of model and
    reference.

    Args:
        beta: strength of the pull to the reference; ipo, simpo and orpo have their own meaning.
        loss_type: loss of a pair; sigmoid = that of the DPO paper.
        label_smoothing: share of the pairs assumed to be mislabeled (sigmoid, robust, simpo).
        margin: target reward margin of simpo.
        sft_weight: weight of the next-token loss over the chosen answers.
        reference_free: use no reference model, as simpo and orpo always do.
    """
    if beta <= 0 or not 0 <= label_smoothing < 0.5 or min(sft_weight, margin) < 0:
        raise UserError(
            f"the loss dpo has beta {beta:g}, label_smoothing {label_smoothing:g}, sft_weight "
            f"{sft_weight:g}, margin {margin:g}. Give a --loss-fn.beta above 0, a label_smoothing "
            "from 0 to below 0.5 and nothing below 0."
        )
    labels_BT = micro_batch["labels"]
    log_probs_B, lengths_B = row_log_probs(logits_BTV, labels_BT), row_lengths(labels_BT)
    # any finite number for left-out rows, which have no answer to score
    safe_B = torch.where(lengths_B > 0, log_probs_B, -torch.ones_like(log_probs_B))
    ratios_B = safe_B
    if _compares(loss_type=loss_type, reference_free=reference_free):
        ratios_B = safe_B - given(micro_batch, REFERENCE).to(safe_B.dtype)
    at_least_one_B = lengths_B.clamp(min=1)
    means_B = safe_B / at_least_one_B
    losses_P = _pair_losses(
        loss_type,
        ratios_B,
        ratios_B / at_least_one_B,
        means_B,
        beta=beta,
        share=label_smoothing,
        margin=margin,
    )
    rewards_B = beta * (means_B if loss_type in WITHOUT_REFERENCE else ratios_B).detach()
    chosen_P, rejected_P = rewards_B[::2], rewards_B[1::2]
    by_name = {
        "rewards_chosen": chosen_P,
        "rewards_rejected": rejected_P,
        "reward_margin": chosen_P - rejected_P,
        "reward_accuracy": (chosen_P > rejected_P).to(chosen_P.dtype),
    }
    is_there_P, pairs = lengths_B[::2] > 0, num_pairs.clamp(min=1)
    loss = torch.where(is_there_P, losses_P, 0).sum() / pairs
    figures = {
        name: torch.where(is_there_P, value, 0).sum() / pairs for name, value in by_name.items()
    }
    if sft_weight > 0:
        figures["chosen_loss"] = -log_probs_B[::2].sum() / num_chosen.clamp(min=1)
        loss = loss + sft_weight * figures["chosen_loss"]
    return loss, figures


def _answers(micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each row has an answer, and whether that is a wanted one, [B]."""
    return row_lengths(micro_batch["labels"]) > 0, given(micro_batch, IS_WANTED, OF_ANSWERS)


@loss_fn_register(
    "kto",
    counts={
        "num_answers": lambda batch: int(_answers(batch)[0].sum()),
        "num_wanted": lambda batch: int((_answers(batch)[0] & batch[IS_WANTED]).sum()),
        "num_unwanted": lambda batch: int((_answers(batch)[0] & ~batch[IS_WANTED]).sum()),
    },
    needs_reference=True,
    needs_kl=lambda *, use_kl=True, **others: use_kl,
)
def kto(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    num_targets: torch.Tensor,
    num_answers: torch.Tensor,
    num_wanted: torch.Tensor,
    num_unwanted: torch.Tensor,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    use_kl: bool = True,
) -> tuple[torch.Tensor, Figures]:
    """Kahneman-Tversky optimization: desirable and undesirable answers (--collate-fn kto).

    It is the mean over all answers of the step; the baseline is a mean over the whole step, too.

    Args:
        beta: strength of the pull to the reference.
        desirable_weight: weight of desirable answers; raise it where they are fewer.
        undesirable_weight: weight of undesirable answers.
        use_kl: subtract the KL divergence from the reference as baseline; off = baseline 0
            (trl's apo_zero_unpaired), with one pass less a step.
    """
    if beta <= 0 or min(desirable_weight, undesirable_weight) < 0:
        raise UserError(
            f"the loss kto has beta {beta:g}, desirable_weight {desirable_weight:g}, "
            f"undesirable_weight {undesirable_weight:g}. Give a --loss-fn.beta above 0 and weights "
            "of 0 or more."
        )
    is_there_B, is_wanted_B = _answers(micro_batch)
    log_probs_B = row_log_probs(logits_BTV, micro_batch["labels"])
    kl = given(micro_batch, KL) if use_kl else None
    rewards_B = beta * (log_probs_B - given(micro_batch, REFERENCE).to(log_probs_B.dtype))
    shift = 0.0 if kl is None else beta * kl.to(rewards_B.dtype)
    sign_B = 2 * is_wanted_B.to(rewards_B.dtype) - 1
    losses_B = 1 - torch.sigmoid(sign_B * (rewards_B - shift))
    number = rewards_B.new_tensor
    weights_B = torch.where(is_wanted_B, number(desirable_weight), number(undesirable_weight))
    losses_B = torch.where(is_there_B, weights_B * losses_B, 0)
    rewards_B = torch.where(is_there_B, rewards_B.detach(), 0)
    answers = num_answers.clamp(min=1)
    # with answers of only one kind in a step, the mean over the other kind is NaN, not 0
    chosen = (rewards_B * is_wanted_B).sum() / num_wanted
    rejected = (rewards_B * ~is_wanted_B).sum() / num_unwanted
    figures = {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "reward_margin": chosen - rejected,
    }
    if kl is not None:
        figures["kl"] = kl * is_there_B.sum() / answers
    return losses_B.sum() / answers, figures


def has_reward(micro_batch: MicroBatch) -> torch.Tensor:
    """Return whether each pair is in the loss, [P]: pairs that fill a batch up have no labels."""
    has_B = (micro_batch["labels"] != IGNORE).any(dim=1)
    return has_B[0::2] & has_B[1::2]


@loss_fn_register(
    "rm", counts={"num_pairs": lambda batch: int(has_reward(batch).sum())}, predicts_tokens=False
)
def rm(
    scores_BT1: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    num_targets: torch.Tensor,
    num_pairs: torch.Tensor,
    center_coefficient: float = 0.0,
) -> tuple[torch.Tensor, Figures]:
    """A reward model's loss over pairs: -log sigmoid(chosen reward - rejected reward - margin).

    Of rows as --collate-fn rm makes them, scored by --train-model reward. Divided by the pairs of
    the whole batch.

    Args:
        center_coefficient: of the squared sum of a pair's two rewards, which keeps rewards around
            0; 0.01 is common.
    """
    if scores_BT1.shape[-1] != 1:
        raise UserError(
            f"the rm loss got {scores_BT1.shape[-1]} numbers a token, and a reward is one. Train "
            "with --train-model reward."
        )
    if center_coefficient < 0:
        raise UserError(
            f"--loss-fn.center_coefficient is {center_coefficient:g}. Give 0 or more, which draws "
            "rewards to 0."
        )
    # a row has one label, where its reward is read
    scores_BT = at_least_float32(scores_BT1)[..., 0]
    is_read_BT = (micro_batch["labels"] != IGNORE).to(scores_BT.device)
    counts_P = has_reward(micro_batch).to(scores_BT)
    rewards_B = scores_BT.masked_fill(~is_read_BT, 0.0).sum(dim=1)
    chosen_P, rejected_P = rewards_B[0::2] * counts_P, rewards_B[1::2] * counts_P
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


@loss_fn_register(
    "grpo",
    counts={
        "num_tokens": lambda batch: int(policy_loss.learnt_tokens(batch).sum()),
        "num_answers": lambda batch: int(batch[policy_loss.IS_COUNTED].sum()),
    },
    samples_answers=True,
    reads_by_token=True,
)
def grpo(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    num_targets: torch.Tensor,
    num_tokens: torch.Tensor,
    num_answers: torch.Tensor,
    kl_beta: float,
    sampling_temperature: float,
    max_completion_length: int,
    bf16: bool,
    fp16: bool,
    loss_type: policy_loss.LossType = "dapo",
    importance_sampling_level: policy_loss.Level = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    entropy_coef: float = 0.0,
    importance_correction: policy_loss.Correction = "auto",
    importance_cap: float = 3.0,
) -> tuple[torch.Tensor, Figures]:
    """Group relative policy optimization: rewards score the model's answers (--collate-fn grpo).

    Names, formulas and defaults are those of trl's GRPOTrainer.

    Args:
        loss_type: divisor of the terms: dapo = all tokens of the step, grpo = tokens of each
            answer, dr_grpo = --rollouts.max_completion_length, bnpo = as dapo, since a step is one
            batch, gspo = grpo with a ratio of each answer, cispo = weighted log-probabilities.
        importance_sampling_level: unit with a ratio of its own; gspo always takes sequence.
        epsilon: clip range of a ratio below 1, and above 1 without epsilon_high.
        epsilon_high: clip range of a ratio above 1; default: epsilon. For cispo the largest ratio
            itself (usually 5).
        delta: largest ratio of an answer with a negative advantage; default: none.
        entropy_coef: weight of the mean token entropy, which is subtracted from the loss.
        importance_correction: correction for other rounding in sampling than in training:
            truncate = the ratio is cut at the cap, mask = it is 0 above the cap, per token or per
            sequence; auto = sequence_mask in half types, none in float32.
        importance_cap: largest ratio of that correction.
    """
    options = policy_loss.PolicyOptions(
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
        is_half=bf16 or fp16,
    )
    options.check()
    return policy_loss.policy_loss(
        logits_BTV, micro_batch, num_tokens=num_tokens, num_answers=num_answers, options=options
    )


@reward_register("exact_answer", takes_lots=True)
def exact_answer(prompts: Texts, completions: Texts, samples: Samples) -> Rewards:
    """1 for exactly the right answer, read from an <answer> tag or after the thoughts."""
    return [float(rewards.is_answer(*one)) for one in zip(completions, samples, strict=True)]


@reward_register("environment", takes_lots=True)
def environment(prompts: Texts, completions: Texts, samples: Samples) -> Rewards:
    """The sum of what the environment gave in the turns of an answer (--environment)."""
    return [sample.get("environment_reward") for sample in samples]


LONGEST = 200  # characters of an expression; results have no more digits than that
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub},
    **{ast.Mult: operator.mul, ast.Div: operator.truediv},
}


def calculated(text: str) -> str:
    """Return the value of an expression: whole, or with ten digits.

    Raises:
        DataError: it is too long, no arithmetic, or divides by zero.
    """
    try:
        if len(text) > LONGEST:
            raise ValueError(f"more than {LONGEST} characters")
        value = _value(ast.parse(text.strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.10g}"
    except (ArithmeticError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DataError(
            f"{text[:40]!r} cannot be calculated ({error}). Write numbers with + - * / and ()."
        ) from error


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not a number, nor one of + - * /")


@environment_register("calculator")
class Calculator:
    """A calculator that the model calls as <calc>2*(3+4)</calc>; the next turn begins with 14.

    A completion without a call is the answer: its reward is 1 where its last number is right.

    Args:
        start: text before an expression.
        end: text behind it; the end of the completion does as well.
        role: role of the result, in a chat template.
    """

    def __init__(self, *, start: str = "<calc>", end: str = "</calc>", role: str = "tool") -> None:
        self.start, self.end, self.role = start, end, role

    def reset(self, sample: dict[str, Any]) -> list[dict[str, str]]:
        self.sample = sample
        return []

    def step(self, completion: str) -> tuple[list[dict[str, str]], float, bool]:
        _, is_call, text = completion.rpartition(self.start)
        if not is_call:
            near = rewards.is_near(completion, self.sample, tolerance=0.0, is_relative=False)
            return [], float(bool(near)), True
        try:
            value = calculated(text.partition(self.end)[0])
        except DataError:
            value = "error"
        return [{"role": self.role, "content": value}], 0.0, False


@reward_register("contains", takes_lots=True)
def contains(prompts: Texts, completions: Texts, samples: Samples) -> Rewards:
    """1 where a right answer stands somewhere in the text, as whole words."""
    found: Rewards = []
    for text, sample in zip(completions, samples, strict=True):
        said = normalize(rewards.said(text))
        right = map(normalize, rewards.references(sample))
        found.append(float(any(contains_words(said, one) for one in right)))
    return found


@reward_register("number", takes_lots=True)
def number(
    prompts: Texts,
    completions: Texts,
    samples: Samples,
    *,
    tolerance: float = 0.0,
    is_relative: bool = False,
) -> Rewards:
    """1 where the last number of the text is that of the answer; 0 without a number.

    Args:
        tolerance: largest difference from the right number.
        is_relative: take the tolerance as a share of the right number.
    """
    near = functools.partial(rewards.is_near, tolerance=tolerance, is_relative=is_relative)
    return [float(bool(near(*one))) for one in zip(completions, samples, strict=True)]


@reward_register("choice", takes_lots=True)
def choice(prompts: Texts, completions: Texts, samples: Samples) -> Rewards:
    """1 where the text names the right one of the sample's `choices`, by letter or text."""
    found: Rewards = []
    for text, sample in zip(completions, samples, strict=True):
        right, choices = rewards.right_choice(sample), list(map(str, sample["choices"]))
        found.append(float(parse_choice(rewards.said(text), choices) == right))
    return found


@reward_register("format", takes_lots=True)
def format_(
    prompts: Texts,
    completions: Texts,
    samples: Samples,
    *,
    tags: list[str] = ["think", "answer"],
    pattern: str | None = None,
) -> Rewards:
    """1 for texts of the wanted form: tags in their order, or a regular expression.

    Args:
        tags: names of tags, each once, in this order, without text around them.
        pattern: regular expression of the whole text, in place of tags; no reward where matching
            takes too long.
    """
    marks: list[str] = []
    if pattern is None:
        marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        pattern = r"\s*".join(["(?s)", *(f"<{tag}>.*</{tag}>" for tag in map(re.escape, tags)), ""])
    found: Rewards = []
    for text in completions:
        fits = all(text.count(mark) == 1 for mark in marks) and rewards.fits(text, pattern)
        found.append(None if fits is None else float(fits))
    return found


@reward_register("length", takes_lots=True)
def length(
    prompts: Texts, completions: Texts, samples: Samples, *, longest: int = 512, margin: int = 128
) -> Rewards:
    """0 for answers that are short enough, falling to -1 for the longest (DAPO).

    Args:
        longest: tokens of an answer with reward -1.
        margin: tokens before the longest over which the reward falls from 0.
    """
    over = [int(sample["num_tokens"]) - (longest - margin) for sample in samples]
    return [0.0 if n <= 0 else max(-1.0, -n / margin) if margin else -1.0 for n in over]


@reward_register("reward_model", takes_lots=True, is_dear=True)
def reward_model(
    prompts: Texts,
    completions: Texts,
    samples: Samples,
    *,
    path: str,
    prompt: str = "[IMAGE][QUESTION][ANSWER]",
    batch_size: int = 8,
    device: str = "cpu",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
) -> Rewards:
    """The score of a reward model: a checkpoint of --loss-fn rm, or any classifier with one label.

    It is loaded once, on rank 0, and reads the conversation in its own chat template. An answer
    longer than its positions gets no score.

    Args:
        path: folder of the reward model, or of an adapter with its score head.
        prompt: template of a row without messages; what comes before [ANSWER] is the user's turn.
        batch_size: answers that are scored together.
        device: cpu, or cuda, xpu ... = the device of rank 0.
        dtype: type of its weights; auto = as stored in the files.
    """
    from stageline.training.reward_model import reward_model

    model = reward_model(path, device=device, dtype=dtype)
    return model(samples, completions, prompt=prompt, batch_size=batch_size)


_OUT_OF_TEN = re.compile(r"\s*(?:/|out of)\s*10\b", re.I)


@reward_register("remote", takes_lots=True, is_dear=True)
def remote(
    prompts: Texts,
    completions: Texts,
    samples: Samples,
    *,
    url: str = "http://127.0.0.1:8000/v1",
    model: str = "judge",
    key_variable: str = "OPENAI_API_KEY",
    seconds: float = 60.0,
) -> Rewards:
    """A score from 0 to 1 of a judge model behind an OpenAI-style API; requests run in parallel.

    Args:
        url: address up to /v1; it receives only prompt, right answer and answer.
        model: name of the model there.
        key_variable: environment variable that holds the key, if it needs one.
        seconds: timeout of one judgement, in seconds.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(key_variable):
        headers["Authorization"] = f"Bearer {key}"

    def ask(prompt: str, completion: str, reference: str) -> float | None:
        question = (
            "Rate the answer from 0 (wrong) to 10 (right and complete). Say the number alone.\n\n"
            f"Question:\n{prompt}\n\nRight answer:\n{reference}\n\nAnswer:\n{completion}"
        )
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16}
        address = url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            text = json.load(reply)["choices"][0]["message"]["content"]
        value = rewards.number_in(_OUT_OF_TEN.sub("", str(text)))  # a judge may still write "8/10"
        return None if value is None else min(max(float(value), 0.0), 10.0) / 10

    right = [str(sample.get("answer", "unknown")) for sample in samples]
    pool = ThreadPoolExecutor(16)  # requests at a time
    try:
        return list(pool.map(ask, prompts, completions, right))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
