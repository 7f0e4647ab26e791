"""The loss_fn parts: (logits, micro-batch) -> one number, already divided for the whole batch.

A loss may also return named figures that are logged. The sim_fn parts say how much alike two
batches of vectors are, for a loss that asks for one.

Shapes: logits [B, T, V], labels [B, T] aligned with the token ids, -100 where unsupervised.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from register import loss_fn_register, sim_fn_register
from stageline.errors import UserError
from stageline.modules.contrastive_loss import (
    count_groups,
    count_marked,
    group_losses,
    next_marks,
    token_losses,
    warm_up,
)
from stageline.modules.reward_loss import count_pairs, pair_rewards
from stageline.modules.similarity import cos_similarity, js_similarity

IGNORE = -100


@loss_fn_register("sft", "pt")
def sft(
    logits_BTV: torch.Tensor, micro_batch: dict[str, torch.Tensor], *, num_targets: torch.Tensor
) -> torch.Tensor:
    """Next-token cross-entropy: the sum over supervised tokens by their number in the whole batch.

    Dividing by the global number, not per micro-batch, is what makes the result independent of
    how samples fall into micro-batches.

    Args:
        num_targets: supervised tokens of all micro-batches of the optimizer step together.
    """
    labels = functional.pad(micro_batch["labels"], (0, 1), value=IGNORE)[:, 1:]
    if logits_BTV.dtype in (torch.bfloat16, torch.float16):
        logits_BTV = logits_BTV.float()
    total = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return total / num_targets


sft.is_token_sum = True  # --logits-chunk may add it up from chunks of tokens


@sim_fn_register("js")
def js(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """1 - Jensen-Shannon divergence / ln 2 of two batches of distributions, in [0, 1]."""
    return js_similarity(a_NV, b_NV)


@sim_fn_register("cos")
def cos(a_NV: torch.Tensor, b_NV: torch.Tensor) -> torch.Tensor:
    """Cosine of the angle between two batches of vectors."""
    return cos_similarity(a_NV, b_NV)


@loss_fn_register("contrastive")
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


contrastive.counts = {"num_marked": count_marked, "num_groups": count_groups}


@loss_fn_register("rm")
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


rm.counts = {"num_pairs": count_pairs}
rm.predicts_tokens = False  # an evaluation has no token accuracy, nor answers to show
