"""The losses over preferences against plain formulas; broken pairs; what is left out."""

import math

import pytest
import torch

from stageline.errors import DataError, UserError
from tests.helpers.shelf_losses import shelf_loss

VOCABULARY = 11


def make_batch(num_pairs=3, tokens=7, *, left_out=()):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (2 * num_pairs, tokens), generator=generator)
    labels[:, :2] = -100
    labels[::4, 0] = 3  # the first token of a row, which nothing predicts
    labels[torch.arange(2 * num_pairs) % 3 == 0, -2:] = -100
    for pair in left_out:
        labels[2 * pair : 2 * pair + 2] = -100
    numbers = torch.arange(2 * num_pairs)
    reference = -10 * torch.rand(2 * num_pairs, generator=generator, dtype=torch.float64)
    return {
        "labels": labels,
        "loss_pairs": numbers // 2,
        "loss_is_chosen": numbers % 2 == 0,
        "loss_is_wanted": numbers % 3 == 0,
        "loss_reference": torch.where((labels != -100).any(1), reference, 0),
    }


def make_logits(batch):
    generator = torch.Generator().manual_seed(1)
    shape = (*batch["labels"].shape, VOCABULARY)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def plain_log_probs(logits, labels):
    """Return (sum, tokens) of each row, token by token."""
    found = []
    for row in range(len(labels)):
        places = [t for t in range(1, labels.shape[1]) if labels[row, t] != -100]
        terms = [logits[row, t - 1].log_softmax(-1)[labels[row, t]].item() for t in places]
        found.append((sum(terms), max(len(places), 1)))
    return found


def value_of(part, batch, logits):
    totals = {name: torch.tensor(float(n)) for name, n in part.count([batch]).items()}
    return part(logits, batch, totals=totals, step=0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def smoothed(score, share):
    return -(1 - share) * math.log(sigmoid(score)) - share * math.log(sigmoid(-score))


def odds(mean):
    return mean - math.log(1 - math.exp(mean))


PLAIN = {
    "sigmoid": lambda c, r, cn, rn, cr, rr: smoothed(0.3 * (c - cr - r + rr), 0.1),
    "simpo": lambda c, r, cn, rn, cr, rr: smoothed(0.3 * (c / cn - r / rn) - 0.2, 0.1),
    "orpo": lambda c, r, cn, rn, cr, rr: -0.3 * math.log(sigmoid(odds(c / cn) - odds(r / rn))),
    "free": lambda c, r, cn, rn, cr, rr: smoothed(0.3 * (c - r), 0.1),
}


@pytest.mark.parametrize("kind", sorted(PLAIN))
@pytest.mark.parametrize("left_out", [(), (1,)])
def test_what_trl_does_not_have_is_the_plain_formula(kind, left_out):
    """Conservative DPO, SimPO, ORPO, no reference; and what a left-out pair weighs: nothing."""
    batch = make_batch(left_out=left_out)
    logits = make_logits(batch)
    options = {"beta": 0.3, "label_smoothing": 0.1, "margin": 0.2, "sft_weight": 0.5}
    loss_type = "sigmoid" if kind == "free" else kind
    part = shelf_loss("dpo", **options, loss_type=loss_type, reference_free=kind == "free")
    assert part.needs_reference == (kind == "sigmoid")
    if kind != "sigmoid":
        del batch["loss_reference"]
    loss, figures = value_of(part, batch, logits)
    log_probs = plain_log_probs(logits, batch["labels"])
    reference = batch.get("loss_reference", torch.zeros(6)).tolist()
    pairs = [p for p in range(3) if p not in left_out]
    terms, chosen_loss, chosen_tokens, rewards = [], 0.0, 0, []
    for pair in pairs:
        (c, cn), (r, rn) = log_probs[2 * pair], log_probs[2 * pair + 1]
        terms.append(PLAIN[kind](c, r, cn, rn, *reference[2 * pair : 2 * pair + 2]))
        chosen_loss, chosen_tokens = chosen_loss - c, chosen_tokens + cn
        by_token = kind in ("simpo", "orpo")
        rewards.append(0.3 * (c / cn if by_token else c - reference[2 * pair]))
    wanted = sum(terms) / len(pairs) + 0.5 * chosen_loss / chosen_tokens
    assert loss.item() == pytest.approx(wanted, rel=1e-9)
    assert figures["rewards_chosen"].item() == pytest.approx(sum(rewards) / len(pairs), rel=1e-9)
    assert figures["chosen_loss"].item() == pytest.approx(chosen_loss / chosen_tokens)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    for pair in left_out:
        assert not logits.grad[2 * pair : 2 * pair + 2].any()


@pytest.mark.parametrize("key", ["dpo", "kto"])
def test_sums_of_parts_are_the_whole(key):
    """Held-out figures come from sums over micro-batches, before the totals are known."""
    batch = make_batch() | {"loss_kl": torch.tensor(0.7, dtype=torch.float64)}
    logits, part = make_logits(batch).detach(), shelf_loss(key)
    totals = part.count([batch])
    loss, figures = value_of(part, batch, logits)
    sums = part.sums(logits, batch, step=0)
    for name, value in {"loss": loss, **figures}.items():
        added = sum(sums[name][count].item() / totals[count] for count in totals)
        assert added == pytest.approx(value.item()), name


def test_a_mean_over_none_is_no_number():
    """Return NaN, which was 0: a step with only desirable answers had a margin, too."""
    batch = make_batch() | {"loss_kl": torch.tensor(0.7), "loss_is_wanted": torch.ones(6).bool()}
    loss, figures = value_of(shelf_loss("kto"), batch, make_logits(batch))
    assert loss.isfinite() and figures["rewards_chosen"].isfinite()
    assert figures["rewards_rejected"].isnan() and figures["reward_margin"].isnan()


@pytest.mark.parametrize(
    "change",
    [
        {"loss_pairs": torch.tensor([0, 1, 0, 1, 2, 2])},  # chunks of trl's order
        {"loss_is_chosen": torch.tensor([True, False, False, True, True, False])},
        "half",
    ],
)
def test_a_broken_pair_is_noticed(change):
    batch = make_batch()
    if change == "half":
        batch["labels"][3] = -100
    else:
        batch.update(change)
    with pytest.raises(DataError, match="right behind it"):
        shelf_loss("dpo").count([batch])


def test_what_comes_without_its_collate_part_is_refused():
    plain = {"labels": make_batch()["labels"]}
    with pytest.raises(UserError, match="--collate-fn dpo"):
        shelf_loss("dpo").count([plain])
    with pytest.raises(UserError, match="--collate-fn kto"):
        shelf_loss("kto").count([plain])
    batch = make_batch()
    del batch["loss_reference"]
    with pytest.raises(UserError, match="without loss_reference"):
        value_of(shelf_loss("dpo"), batch, make_logits(batch))
    with pytest.raises(UserError, match="without loss_kl"):
        value_of(shelf_loss("kto"), make_batch(), make_logits(make_batch()))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("dpo", {"beta": 0.0}),
        ("dpo", {"label_smoothing": 0.5}),
        ("kto", {"undesirable_weight": -1.0}),
    ],
)
def test_options_out_of_range_are_refused(key, options):
    batch = make_batch() | {"loss_kl": torch.tensor(0.0)}
    with pytest.raises(UserError, match="above 0"):
        value_of(shelf_loss(key, **options), batch, make_logits(batch))
