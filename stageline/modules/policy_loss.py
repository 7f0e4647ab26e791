"""Losses over sampled answers: GRPO and related ones, from log-probabilities and advantages.

Formulas, names and defaults are those of trl's GRPOTrainer; docs/grpo.md writes them out. A
value of a token in [B, T] is stored where the token is predicted, one before its own place.

Shapes: A answers, B rows, T tokens, V vocabulary. An answer is a row, or rows are packed: several
answers in one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from stageline.errors import UserError
from stageline.modules.chunked_loss import ChunkedLogits
from stageline.modules.losses import IGNORE, at_least_float32, given, next_labels, token_losses

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo"]
Level = Literal["token", "sequence"]
Correction = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]
MicroBatch = Mapping[str, torch.Tensor]
# A run adds these to a micro-batch. An answer outside of the loss has no weight in any token; one
# that does not count is not even among the answers that a mean is taken of.
ADVANTAGES, IS_LEARNT, IS_COUNTED = "loss_advantages", "loss_is_learnt", "loss_is_counted"  # [A]
PLACES = "loss_places"  # [B, T], of packed rows: the number of the answer that a token is of, or -1
# [B, T], log-probabilities of the tokens: when they were drawn, before the first of several steps
# on the same answers, and under the model that training began with
SAMPLED, OLD, START = "loss_sampled", "loss_old", "loss_start"
ANSWERS = (  # asks for them; see `given`
    "a loss over sampled answers",
    "Train with train_pp.py and `collate_fn` grpo, which has the model answer before each step.",
)


@dataclass(frozen=True)
class PolicyOptions:
    """Settings of a loss over sampled answers; see the loss_fn part `grpo`."""

    loss_type: LossType = "dapo"
    importance_sampling_level: Level = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    kl_beta: float = 0.0
    entropy_coef: float = 0.0
    importance_correction: Correction = "auto"
    importance_cap: float = 3.0
    temperature: float = 1.0
    max_completion_length: int = 512
    is_half: bool = False  # the model computes in a half type, whatever its logits have

    @property
    def high(self) -> float:
        """Largest distance of a ratio above 1; for cispo, the largest ratio."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def level(self) -> Level:
        """Whether each token or each sequence has a ratio of its own."""
        return "sequence" if self.loss_type == "gspo" else self.importance_sampling_level

    def check(self) -> None:
        """Refuse numbers that make no loss."""
        least = (self.epsilon, self.high, self.kl_beta, self.entropy_coef)
        above = (self.temperature, self.importance_cap, self.max_completion_length)
        if min(least) < 0 or min(above) <= 0 or (self.delta is not None and self.delta <= 0):
            raise UserError(
                f"the loss grpo has {self}. Give nothing below 0, and temperature, delta and cap "
                "above 0."
            )


def _by_token(values_A: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the value of an answer at each of its tokens: [B, 1], or [B, T] of packed rows."""
    if PLACES not in batch:
        return values_A[:, None]
    none = values_A.new_zeros(1)  # tokens at place -1 belong to no answer
    return torch.cat([values_A, none])[batch[PLACES].to(values_A.device)]


def _by_answer(values_BT: torch.Tensor, batch: MicroBatch, num_answers: int) -> torch.Tensor:
    """The sum over the tokens of each answer, [A]."""
    if PLACES not in batch:
        return values_BT.sum(-1)
    places_BT = batch[PLACES].to(values_BT.device)
    # not index_add, whose order of sums is another one each time on a GPU
    numbers_A11 = torch.arange(num_answers, device=values_BT.device)[:, None, None]
    return torch.where(places_BT == numbers_A11, values_BT, 0.0).sum((-1, -2))


def learnt_tokens(batch: MicroBatch) -> torch.Tensor:
    """Whether the token that a place predicts is in the loss, [B, T]; the end of an answer is."""
    return (next_labels(batch) != IGNORE) & _by_token(given(batch, IS_LEARNT, ANSWERS), batch)


def with_stand_ins(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The micro-batch with what a run adds, made up: to measure with, not to train on."""
    labels_BT = batch["labels"]
    has_B = (labels_BT != IGNORE).any(dim=1)
    zeros_BT = torch.zeros(labels_BT.shape)
    columns = {ADVANTAGES: torch.ones(len(labels_BT)), IS_LEARNT: has_B, IS_COUNTED: has_B}
    return {**batch, **columns, SAMPLED: zeros_BT, START: zeros_BT}


Logits = torch.Tensor | ChunkedLogits


def token_log_probs(logits_BTV: Logits, batch: MicroBatch, *, temperature: float) -> torch.Tensor:
    """Log-probability of the token that each place predicts, [B, T] in float32 at least, else 0.

    In chunks it is also 0 where the token is not in the loss.

    Args:
        temperature: of sampling: the probabilities are those of the distribution drawn from.
    """
    if isinstance(logits_BTV, ChunkedLogits):
        # drawn a step ahead, answers have no rewards yet: all of their tokens
        is_asked_BT = learnt_tokens(batch) if IS_LEARNT in batch else next_labels(batch) != IGNORE
        options = PolicyOptions(temperature=temperature)
        return _log_probs_and_entropies(logits_BTV, batch, is_asked_BT, options)[0]
    logits_BTV = at_least_float32(logits_BTV)
    if temperature != 1:
        logits_BTV = logits_BTV / temperature
    return -token_losses(logits_BTV, batch)


def entropies(logits_BTV: torch.Tensor, is_learnt_BT: torch.Tensor, *, temperature: float):
    """Entropy of the distribution in each place in the loss, [B, T]; 0 elsewhere."""
    rows = []
    for logits_TV, is_learnt_T in zip(logits_BTV, is_learnt_BT, strict=True):  # for the memory
        log_probs_NV = (at_least_float32(logits_TV[is_learnt_T]) / temperature).log_softmax(-1)
        found_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
        row_T = found_N.new_zeros(len(logits_TV))
        rows.append(row_T.masked_scatter(is_learnt_T, found_N))
    return torch.stack(rows)


def _log_probs_and_entropies(
    logits_BTV: Logits, batch: MicroBatch, is_learnt_BT: torch.Tensor, options: PolicyOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [B, T]; entropies have a gradient where the loss has them."""
    learns = options.entropy_coef > 0
    is_learnt_BT = is_learnt_BT.to(logits_BTV.device)
    if isinstance(logits_BTV, ChunkedLogits):

        def function(logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
            """Log-probability and entropy of each, [C, 2]."""
            log_probs_CV = (at_least_float32(logits_CV) / options.temperature).log_softmax(-1)
            log_probs_C = log_probs_CV.gather(-1, labels_C[:, None])[:, 0]
            own_CV = log_probs_CV if learns else log_probs_CV.detach()
            return torch.stack([log_probs_C, -(own_CV.exp() * own_CV).sum(-1)], dim=-1)

        labels_BT = next_labels(batch).to(logits_BTV.device)
        found_BT2 = logits_BTV.by_token(function, labels_BT, is_learnt_BT)
        log_probs_BT, entropies_BT = found_BT2.unbind(-1)
        return log_probs_BT, entropies_BT
    log_probs_BT = token_log_probs(logits_BTV, batch, temperature=options.temperature)
    with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
        entropies_BT = entropies(logits_BTV, is_learnt_BT, temperature=options.temperature)
    return log_probs_BT, entropies_BT


def policy_loss(
    logits_BTV: Logits,
    batch: MicroBatch,
    *,
    num_tokens: torch.Tensor,
    num_answers: torch.Tensor,
    options: PolicyOptions,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The share of a micro-batch in the loss of the step, and in its figures.

    Args:
        num_tokens, num_answers: of the whole step, by the counts above.
    """
    is_learnt_BT = learnt_tokens(batch).to(logits_BTV.device)
    log_probs_BT, entropy_BT = _log_probs_and_entropies(logits_BTV, batch, is_learnt_BT, options)
    old_BT = batch[OLD].to(log_probs_BT) if OLD in batch else log_probs_BT.detach()
    terms_BT, figures_BT = policy_terms(log_probs_BT, old_BT, is_learnt_BT, batch, options)
    factors_BT = correction(old_BT, is_learnt_BT, batch, options)
    if factors_BT is not None:
        terms_BT = terms_BT * factors_BT
    if options.kl_beta:
        apart_BT = given(batch, START, ANSWERS).to(log_probs_BT) - log_probs_BT
        kl_BT = torch.exp(apart_BT) - apart_BT - 1  # k3: unbiased, never below 0
        terms_BT = terms_BT + options.kl_beta * kl_BT
        figures_BT["kl"] = kl_BT
    tokens, answers = num_tokens.clamp(min=1), num_answers.clamp(min=1)
    learnt_BT = is_learnt_BT.to(log_probs_BT)
    terms_BT = terms_BT * learnt_BT
    if options.loss_type in ("grpo", "gspo"):  # a mean of the means of answers
        sums_A, counts_A = (
            _by_answer(values_BT, batch, len(batch[ADVANTAGES]))
            for values_BT in (terms_BT, learnt_BT)
        )
        loss = (sums_A / counts_A.clamp(min=1)).sum() / answers
    elif options.loss_type == "dr_grpo":
        loss = terms_BT.sum() / (answers * options.max_completion_length)
    else:
        loss = terms_BT.sum() / tokens
    figures_BT["entropy"] = entropy_BT
    if options.entropy_coef:
        loss = loss - options.entropy_coef * entropy_BT.sum() / tokens
    if OLD in batch:
        figures_BT["policy_gap"] = (log_probs_BT.detach() - old_BT).abs()
    largest = {}
    if SAMPLED in batch:
        apart_BT = old_BT - batch[SAMPLED].to(old_BT)
        figures_BT["sampling_gap"] = apart_BT.abs()
        ratios = torch.exp(_log_ratios(apart_BT, is_learnt_BT, batch, options))
        is_cispo = options.loss_type == "cispo"  # its range has only an upper end
        low, high = (0.0, options.high) if is_cispo else (1 - options.epsilon, 1 + options.high)
        figures_BT["sampling_gap_clipped"] = ((ratios < low) | (ratios > high)).expand_as(learnt_BT)
        largest["sampling_gap_max"] = (apart_BT.abs() * learnt_BT).amax()
    figures = {name: (value * learnt_BT).sum() / tokens for name, value in figures_BT.items()}
    return loss, figures | largest


def _log_ratios(
    apart_BT: torch.Tensor, is_learnt_BT: torch.Tensor, batch: MicroBatch, options: PolicyOptions
) -> torch.Tensor:
    """Return differences of log-probabilities by token, or their mean over each answer."""
    if options.level == "token":
        return apart_BT
    learnt_BT = is_learnt_BT.to(apart_BT)
    sums_A, counts_A = (
        _by_answer(values_BT, batch, len(batch[ADVANTAGES]))
        for values_BT in (apart_BT * learnt_BT, learnt_BT)
    )
    return _by_token(sums_A / counts_A.clamp(min=1), batch)


def policy_terms(
    log_probs_BT: torch.Tensor,
    old_BT: torch.Tensor,
    is_learnt_BT: torch.Tensor,
    batch: MicroBatch,
    options: PolicyOptions,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped term of each token, [B, T], and where it is clipped."""
    advantages_A = given(batch, ADVANTAGES, ANSWERS).to(log_probs_BT)
    advantages_BT = _by_token(advantages_A, batch)
    ratios = torch.exp(_log_ratios(log_probs_BT - old_BT, is_learnt_BT, batch, options))
    if options.loss_type == "cispo":
        weights = ratios.clamp(max=options.high).detach()
        is_clipped = (ratios > options.high) & (advantages_BT > 0)
        terms_BT = -weights * advantages_BT * log_probs_BT
        return terms_BT, {"clip_high": is_clipped.expand_as(terms_BT)}
    clipped = ratios.clamp(1 - options.epsilon, 1 + options.high)
    is_low = (ratios < 1 - options.epsilon) & (advantages_BT < 0)
    is_high = (ratios > 1 + options.high) & (advantages_BT > 0)
    if options.delta is not None:
        ratios = ratios.clamp(max=options.delta)
    terms_BT = -torch.minimum(ratios * advantages_BT, clipped * advantages_BT)
    shape = log_probs_BT.shape
    figures = {"clip_low": is_low.expand(shape), "clip_high": is_high.expand(shape)}
    return terms_BT.expand(shape), figures


def correction(
    old_BT: torch.Tensor, is_learnt_BT: torch.Tensor, batch: MicroBatch, options: PolicyOptions
) -> torch.Tensor | None:
    """Factor of the terms, as tokens were drawn with other roundings than they are trained with.

    [B, T] or [B, 1]; None: no factor. The ratio of the two probabilities, cut at a cap, or 0 above.
    "auto" corrects what half types round, as trl does of its engine.
    """
    kind = options.importance_correction
    if kind == "auto":
        kind = "sequence_mask" if options.is_half else "none"
    if kind == "none":
        return None
    apart = (old_BT - given(batch, SAMPLED, ANSWERS).to(old_BT)).detach() * is_learnt_BT
    if kind.startswith("sequence"):
        apart = _by_token(_by_answer(apart, batch, len(batch[ADVANTAGES])), batch)
    ratios = torch.exp(apart)
    if kind.endswith("truncate"):
        return ratios.clamp(max=options.importance_cap)
    return ratios.masked_fill(ratios > options.importance_cap, 0.0)
