"""Losses and log-probabilities of next tokens, and what a run adds to micro-batches for a loss.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from stageline.contracts import IGNORE
from stageline.errors import UserError
from stageline.modules.chunked_loss import ChunkedLogits

TARGETS = "loss_targets"  # [N], see `target_places`
MicroBatch = Mapping[str, torch.Tensor]


def next_labels(micro_batch: MicroBatch) -> torch.Tensor:
    """The label that the logits of each token predict, [B, T]; -100 where there is none."""
    return functional.pad(micro_batch["labels"], (0, 1), value=IGNORE)[:, 1:]


def target_places(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the places of tokens in the loss among all tokens, [N], for `token_losses`."""
    if "labels" not in micro_batch:
        return {}
    return {TARGETS: (next_labels(micro_batch) != IGNORE).flatten().nonzero().flatten()}


def token_losses(logits_BTV: torch.Tensor | ChunkedLogits, micro_batch: MicroBatch) -> torch.Tensor:
    """Next-token cross-entropy of each token in float32, [B, T]; 0 outside of the loss."""

    def losses_of(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        exact_NV = at_least_float32(logits_NV)
        every = functional.cross_entropy(exact_NV, labels_N, ignore_index=IGNORE, reduction="none")
        return every[:, None]

    labels_BT = next_labels(micro_batch)
    if isinstance(logits_BTV, ChunkedLogits):
        return logits_BTV.by_token(losses_of, labels_BT, places_N=micro_batch.get(TARGETS))[..., 0]
    return losses_of(logits_BTV.flatten(0, 1), labels_BT.flatten()).view(logits_BTV.shape[:2])


def likeliest(logits_BTV: torch.Tensor | ChunkedLogits, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the token with the largest logit, [B, T]; in chunks only for tokens in the loss."""
    if isinstance(logits_BTV, ChunkedLogits):
        return logits_BTV.by_token(
            lambda logits_NV, _: logits_NV.argmax(dim=-1, keepdim=True),
            next_labels(micro_batch),
            places_N=micro_batch.get(TARGETS),
        )[..., 0]
    return logits_BTV.argmax(dim=-1)


# which loss asks for what a run adds, and what to do where it is missing
PREFERENCES = (
    "a loss over preferences",
    "Train with train_pp.py, which adds it before each step: scores of the model that training "
    "began with, or of other answers.",
)


def given(batch: MicroBatch, name: str, asks: tuple[str, str] = PREFERENCES) -> torch.Tensor:
    """Return a tensor that the run adds to a micro-batch before the loss.

    Args:
        asks: name of the loss that needs it, and the cure if it is missing.

    Raises:
        UserError: the run did not add it.
    """
    if name not in batch:
        loss, cure = asks
        raise UserError(f"{loss} got a micro-batch without {name}. {cure}")
    return batch[name]


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half types become float32."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


REFERENCE = "loss_reference"  # [B], log-probabilities of the answers under the start model
KL = "loss_kl"  # a scalar, of the whole step
# logits [N, V] of the teacher at N supervised places, or log-probabilities [N, K] of its likeliest
# tokens with their ids; and the place of each token in it, [B, T]
TEACHER, TEACHER_IDS, TEACHER_PLACES = "loss_teacher", "loss_teacher_ids", "loss_teacher_places"
DISTILLS = (  # asks for them; see `given`
    "a loss against a teacher",
    "Train with train_pp.py and `teacher.path`, `teacher.url` or `teacher.table`.",
)
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
    # a teacher to which all tokens are alike
    taught = {TEACHER: torch.zeros(1, 1), TEACHER_PLACES: torch.zeros_like(batch["labels"])}
    return {**batch, REFERENCE: zeros, KL: torch.zeros(()), **taught}
