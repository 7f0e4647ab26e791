"""Next-token losses over all and over marked tokens, and a comparison of the samples of a group.

Shapes: B samples, T tokens, V vocabulary; G groups of K samples: anchor, positive, negatives.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from stageline.device import sent
from stageline.errors import DataError, UserError

IGNORE = -100
MicroBatch = Mapping[str, torch.Tensor]
Similarity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def next_labels(micro_batch: MicroBatch) -> torch.Tensor:
    """The label that the logits of each token predict, [B, T]; -100 where there is none."""
    return functional.pad(micro_batch["labels"], (0, 1), value=IGNORE)[:, 1:]


def next_marks(micro_batch: MicroBatch) -> torch.Tensor:
    """Whether the logits of each token predict a marked, supervised one, [B, T]."""
    marks_BT = functional.pad(given(micro_batch, "loss_marks", CONTRASTIVE), (0, 1), value=False)[
        :, 1:
    ]
    return marks_BT & (next_labels(micro_batch) != IGNORE)


def count_marked(micro_batch: MicroBatch) -> int:
    """Marked tokens of a micro-batch that are learnt."""
    return int(next_marks(micro_batch).sum())


def count_groups(micro_batch: MicroBatch) -> int:
    """Groups of a micro-batch that are compared: each sample has something to learn."""
    return int(compared_groups(micro_batch).sum())


def compared_groups(micro_batch: MicroBatch) -> torch.Tensor:
    """Which groups are compared, [G]; not those that fill up or have a dropped sample."""
    has_target_B = (next_labels(micro_batch) != IGNORE).any(dim=1)
    groups_B = given(micro_batch, "loss_groups", CONTRASTIVE)
    return has_target_B.view(int(groups_B[-1]) + 1, -1).all(dim=1)


def token_losses(logits_BTV: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Next-token cross-entropy of each token in float32, [B, T]; 0 where none is learnt."""
    losses = functional.cross_entropy(
        at_least_float32(logits_BTV).flatten(0, 1),
        next_labels(micro_batch).flatten(),
        ignore_index=IGNORE,
        reduction="none",
    )
    return losses.view(logits_BTV.shape[:2])


# which loss asks for what a run adds, and why it does
CONTRASTIVE = (
    "the contrastive loss",
    "samples are compared group by group: use `collate_fn` contrastive with a dataset that has "
    "groups (`dataset` groups).",
)
PREFERENCES = (
    "a loss over preferences",
    "the loss compares the model with the one that training began with, or with other answers, "
    "and the run adds that before each step: train with train_pp.py.",
)


def given(batch: MicroBatch, name: str, asks: tuple[str, str] = PREFERENCES) -> torch.Tensor:
    """What the run adds to a micro-batch before the loss.

    Args:
        asks: which loss does, and why, with what to do.

    Raises:
        UserError: the run did not.
    """
    if name not in batch:
        loss, why = asks
        raise UserError(f"{loss} got a micro-batch without {name}. It was expected, because {why}")
    return batch[name]


def representations(logits_BTV: torch.Tensor, on_host: MicroBatch) -> torch.Tensor:
    """What each sample says, [B, V] in float32.

    The mean, over its marked tokens, of the distribution that predicts the token. A sample without
    a marked one takes all its supervised tokens; one without those is 0.
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


def _on_host(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Labels, marks and groups on the host: one copy, for which it waits once."""
    labels_BT = micro_batch["labels"]
    marks_BT, groups_B = (
        given(micro_batch, "loss_marks", CONTRASTIVE),
        given(micro_batch, "loss_groups", CONTRASTIVE),
    )
    of_tokens = (labels_BT, marks_BT.to(labels_BT), groups_B[:, None].expand_as(labels_BT))
    labels, marks, groups = torch.stack(of_tokens).cpu().unbind()
    return {"labels": labels, "loss_marks": marks.bool(), "loss_groups": groups[:, 0]}


def group_losses(
    logits_BTV: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    sim_fn: Similarity,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of each compared group, and whether its positive is nearest, both [G].

    Softmax of the similarities of the anchor to all others, by the temperature; the positive is
    the right answer.
    """
    on_host = _on_host(micro_batch)
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


def warm_up(step: int, *, start_step: int, warmup_steps: int) -> float:
    """0 up to `start_step`, then a straight line that reaches 1 `warmup_steps` later."""
    if step < start_step:
        return 0.0
    return 1.0 if warmup_steps == 0 else min(1.0, (step - start_step) / warmup_steps)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half types become float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


# Similarities of two batches of distributions; the bodies of the sim_fn parts.
# Shapes: N pairs, V entries (the vocabulary).


def js_similarity(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """1 - JSD(a, b) / ln 2 of rows that each sum to 1: 1 for equal ones, 0 for disjoint ones.

    JSD is the Jensen-Shannon divergence. Entries of 0 add nothing, and gradients stay finite.
    Rounding may lead out of [0, 1]: the value is put back, the gradient is kept.
    """
    mean_NV = (a_NV + b_NV) / 2
    divergence_N = (_kl(a_NV, mean_NV) + _kl(b_NV, mean_NV)) / 2
    similarity_N = 1 - divergence_N / math.log(2)
    return similarity_N + (similarity_N.clamp(0, 1) - similarity_N).detach()


def cos_similarity(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """The cosine of two vectors, in [0, 1] for vectors without a negative entry."""
    return functional.cosine_similarity(a_NV, b_NV, dim=-1)


def _kl(p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence in nats; q is not 0 where p is not."""
    least = torch.finfo(p_NV.dtype).tiny  # log 0 would be no number, also in the gradient
    log_ratio_NV = p_NV.clamp(min=least).log() - q_NV.clamp(min=least).log()
    return (p_NV * log_ratio_NV).sum(dim=-1)


# Rewards of pairs, read off the scores of a micro-batch.
# Rows come as chosen, rejected, chosen, rejected ...; a row has one label, where its reward is
# read. Shapes: P = B / 2 pairs.


def pair_rewards(
    scores_BT1: torch.Tensor, batch: MicroBatch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards [P] of chosen and rejected answers, and 1.0 for each pair that counts.

    Scores of half types become float32 first.

    Pairs that only fill a batch up, or were dropped, have no labels; their rewards are 0.
    """
    scores_BT1 = at_least_float32(scores_BT1)
    counts_P = _has_labels(batch).to(scores_BT1)
    is_read_BT = (batch["labels"] != IGNORE).to(scores_BT1.device)
    rewards_B = scores_BT1[..., 0].masked_fill(~is_read_BT, 0.0).sum(dim=1)
    chosen_P, rejected_P = rewards_B[0::2] * counts_P, rewards_B[1::2] * counts_P
    return chosen_P, rejected_P, counts_P


def count_reward_pairs(batch: MicroBatch) -> int:
    """Pairs of a micro-batch that count."""
    return int(_has_labels(batch).sum())


def _has_labels(batch: MicroBatch) -> torch.Tensor:
    has_B = (batch["labels"] != IGNORE).any(dim=1)
    return (has_B[0::2] & has_B[1::2]).float()


# Losses over preferences, from log-probabilities of whole answers.
# Of pairs (DPO and its kin), and of single answers that are wanted or not (KTO). Rows of a pair
# lie next to each other, [c0, r0, c1, r1, ...]. A row without a target was left out, and weighs
# nothing. Shapes: P pairs.

REFERENCE = "loss_reference"  # [B], log-probabilities of the answers under the start model
KL = "loss_kl"  # a scalar, of the whole step
PAIRS, IS_CHOSEN, IS_WANTED = "loss_pairs", "loss_is_chosen", "loss_is_wanted"


def row_log_probs(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """The summed log-probability [B] of each row's supervised tokens, in float32 at least."""
    return -token_losses(logits_BTV, {"labels": labels_BT}).sum(dim=1)


def row_lengths(labels_BT: torch.Tensor) -> torch.Tensor:
    """Supervised tokens [B] of each row that are predicted; the first token never is."""
    return (labels_BT[:, 1:] != IGNORE).sum(dim=1)


def without_reference(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The micro-batch with zeros for what a run adds: to measure with, not to train on."""
    zeros = torch.zeros(len(batch["input_ids"]))
    return {**batch, REFERENCE: zeros, KL: torch.zeros(())}


def count_pairs(batch: MicroBatch) -> int:
    """Pairs with something to learn.

    Raises:
        UserError: the collate part makes no pairs.
        DataError: the rows of a pair do not lie next to each other, or only one has targets.
    """
    if PAIRS not in batch or IS_CHOSEN not in batch:
        raise UserError(
            "the loss dpo got a micro-batch without pairs: rows in the order chosen, rejected, and "
            "their numbers in loss_pairs. Use `collate_fn` dpo."
        )
    pairs, is_chosen = batch[PAIRS], batch[IS_CHOSEN]
    is_there = row_lengths(batch["labels"]) > 0
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


def count_chosen(batch: MicroBatch) -> int:
    """Supervised tokens of the chosen answers."""
    return int(row_lengths(batch["labels"])[::2].sum())


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of pairs, all [P], as the functions below take them.

    Attributes:
        chosen, rejected: of the answers under the model, less those under the reference.
        chosen_mean, rejected_mean: the same by token.
        chosen_plain_mean, rejected_plain_mean: by token, under the model alone.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_mean: torch.Tensor
    rejected_mean: torch.Tensor
    chosen_plain_mean: torch.Tensor
    rejected_plain_mean: torch.Tensor

    @classmethod
    def of(
        cls, log_probs_B: torch.Tensor, reference_B: torch.Tensor | None, labels_BT: torch.Tensor
    ) -> "Pairs":
        """The pairs of a micro-batch; None: there is no reference."""
        ratios = log_probs_B if reference_B is None else log_probs_B - reference_B
        lengths = row_lengths(labels_BT).clamp(min=1)
        means, plain = ratios / lengths, log_probs_B / lengths
        return cls(*(part for one in (ratios, means, plain) for part in (one[::2], one[1::2])))


@dataclass(frozen=True)
class PairOptions:
    """What a loss over pairs can be told; see `dpo` in loss_fn.py."""

    beta: float
    label_smoothing: float
    margin: float


WITHOUT_REFERENCE = ("simpo", "orpo")


def _pair_loss(kind: str, pairs: Pairs, told: PairOptions) -> torch.Tensor:
    chosen, rejected = told.beta * pairs.chosen, told.beta * pairs.rejected
    scores, share = told.beta * (pairs.chosen - pairs.rejected), told.label_smoothing
    log_sigmoid = functional.logsigmoid
    if kind == "sigmoid":  # Rafailov et al. 2023; smoothed as in Mitchell's conservative DPO
        return -(1 - share) * log_sigmoid(scores) - share * log_sigmoid(-scores)
    if kind == "robust":  # Chowdhury et al. 2024: unbiased where that share is the wrong way round
        flipped = share * log_sigmoid(-scores) - (1 - share) * log_sigmoid(scores)
        return flipped / (1 - 2 * share)
    if kind == "hinge":  # Zhao et al. 2023 (SLiC)
        return torch.relu(1 - scores)
    if kind == "ipo":  # Azar et al. 2023, by token, as their authors ran it
        return (pairs.chosen_mean - pairs.rejected_mean - 1 / (2 * told.beta)) ** 2
    if kind == "apo_zero":  # D'Oosterlinck et al. 2024: chosen answers up, rejected ones down
        return 1 - torch.sigmoid(chosen) + torch.sigmoid(rejected)
    if kind == "apo_down":  # the same paper: both down, rejected answers further
        return torch.sigmoid(chosen) + 1 - torch.sigmoid(scores)
    if kind == "sppo_hard":  # Wu et al. 2024, with a chosen answer that always wins
        half = 0.5 / told.beta
        return (pairs.chosen - half) ** 2 + (pairs.rejected + half) ** 2
    if kind == "nca_pair":  # Chen et al. 2024
        return -log_sigmoid(chosen) - 0.5 * (log_sigmoid(-chosen) + log_sigmoid(-rejected))
    chosen, rejected = pairs.chosen_plain_mean, pairs.rejected_plain_mean
    if kind == "simpo":  # Meng et al. 2024: by token, no reference, a margin
        scores = told.beta * (chosen - rejected) - told.margin
        return -(1 - share) * log_sigmoid(scores) - share * log_sigmoid(-scores)
    assert kind == "orpo"  # Hong et al. 2024, their odds-ratio term; `sft_weight` 1 adds the other
    odds = [mean - torch.log1p(-mean.exp()) for mean in (chosen, rejected)]
    return -told.beta * log_sigmoid(odds[0] - odds[1])


def pair_losses(
    log_probs_B: torch.Tensor,
    batch: MicroBatch,
    *,
    loss_type: str,
    options: PairOptions,
    has_reference: bool,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and rewards of each pair, all [P] and 0 for those left out.

    Returns:
        The losses, and by name: rewards_chosen, rewards_rejected, reward_margin, reward_accuracy.
    """
    is_there = row_lengths(batch["labels"]) > 0
    # any number that no loss finds infinite: what was left out has no answer to score
    safe = torch.where(is_there, log_probs_B, -torch.ones_like(log_probs_B))
    reference = given(batch, REFERENCE).to(safe.dtype) if has_reference else None
    pairs = Pairs.of(safe, reference, batch["labels"])
    kept = is_there[::2]
    losses = torch.where(kept, _pair_loss(loss_type, pairs, options), 0)
    by_token = loss_type in WITHOUT_REFERENCE
    chosen = options.beta * (pairs.chosen_plain_mean if by_token else pairs.chosen).detach()
    rejected = options.beta * (pairs.rejected_plain_mean if by_token else pairs.rejected).detach()
    rewards = {
        "rewards_chosen": chosen,
        "rewards_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": (chosen > rejected).to(chosen.dtype),
    }
    return losses, {name: torch.where(kept, value, 0) for name, value in rewards.items()}


def count_answers(batch: MicroBatch) -> int:
    """Rows with something to learn.

    Raises:
        UserError: the collate part does not say which are wanted.
    """
    return int(_is_there(batch).sum())


def count_wanted(batch: MicroBatch) -> int:
    """Of those the wanted ones."""
    return int((_is_there(batch) & batch[IS_WANTED]).sum())


def count_unwanted(batch: MicroBatch) -> int:
    """Of those the unwanted ones."""
    return int((_is_there(batch) & ~batch[IS_WANTED]).sum())


def _is_there(batch: MicroBatch) -> torch.Tensor:
    if IS_WANTED not in batch:
        raise UserError(
            f"the loss kto got a micro-batch without {IS_WANTED}, whether each answer is wanted. "
            "Use `collate_fn` kto."
        )
    return row_lengths(batch["labels"]) > 0


def answer_losses(
    log_probs_B: torch.Tensor,
    batch: MicroBatch,
    *,
    beta: float,
    kl: torch.Tensor | None,
    wanted_weight: float,
    unwanted_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted loss and reward of each row, [B] and 0 for those left out.

    Args:
        kl: how far the model is from the reference in general, a scalar; None: taken as 0.
    """
    is_there, is_wanted = _is_there(batch), batch[IS_WANTED]
    rewards = beta * (log_probs_B - given(batch, REFERENCE).to(log_probs_B.dtype))
    shift = 0.0 if kl is None else beta * kl.to(rewards.dtype)
    sign = 2 * is_wanted.to(rewards.dtype) - 1
    losses = 1 - torch.sigmoid(sign * (rewards - shift))
    number = rewards.new_tensor
    weights = torch.where(is_wanted, number(wanted_weight), number(unwanted_weight))
    return torch.where(is_there, weights * losses, 0), torch.where(is_there, rewards.detach(), 0)
