"""The contrastive loss, its gradient and the similarities against plain loops in float64."""

import math

import pytest
import torch

from loss_fn import cos, js, sft
from stageline.errors import UserError
from tests.helpers.shelf_losses import shelf_loss

SIM_FNS = {"js": js, "cos": cos}
VOCABULARY = 11


def make_batch(num_groups=3, size=4, *, tokens=9, seed=0):
    """Random labels, marks and lengths; row 1 has no mark, so all its targets stand for it."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_groups * size, tokens)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.4] = -100
    labels[:, -2] = 3  # each row has a target
    marks = (torch.rand(shape, generator=generator) < 0.5) & (labels != -100)
    marks[:, -2] = True
    marks[1] = False
    marks[2, 0], labels[2, 0] = True, 5  # the first token is never predicted
    return {
        "labels": labels,
        "loss_marks": marks,
        "loss_groups": torch.arange(num_groups).repeat_interleave(size),
    }


def make_logits(batch, *, seed=1, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch["labels"].shape, VOCABULARY)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


# -- the reference: loops, python's own numbers of torch's float64 -------------------------


def plain_js(p, q):
    total = 0.0
    for a, b in zip(p, q, strict=True):
        middle = (a + b) / 2
        total = total + (a * (a / middle).log() + b * (b / middle).log()) / 2
    return 1 - total / math.log(2)


def plain_cos(p, q):
    dot = sum(a * b for a, b in zip(p, q, strict=True))
    return dot / (sum(a * a for a in p) * sum(b * b for b in q)) ** 0.5


PLAIN = {"js": plain_js, "cos": plain_cos}


def plain_terms(logits, batch, sim, temperature, *, size):
    """Return sums and counts: tokens, marked tokens, groups."""
    token = marked = compared = torch.zeros((), dtype=torch.float64)
    counts = [0, 0, 0]
    what_they_say = []
    for row, row_labels in enumerate(batch["labels"].tolist()):
        all_places, marked_places = [], []
        for place in range(1, len(row_labels)):
            label = row_labels[place]
            if label == -100:
                continue
            shares = logits[row, place - 1].exp() / logits[row, place - 1].exp().sum()
            token = token - shares[label].log()
            counts[0] += 1
            all_places.append(shares)
            if batch["loss_marks"][row, place]:
                marked = marked - shares[label].log()
                counts[1] += 1
                marked_places.append(shares)
        chosen = marked_places or all_places
        what_they_say.append(sum(chosen) / len(chosen) if chosen else None)
    for start in range(0, len(what_they_say), size):
        members = what_they_say[start : start + size]
        if any(member is None for member in members):
            continue
        sims = [sim(members[0], other) / temperature for other in members[1:]]
        compared = compared - (sims[0].exp() / sum(s.exp() for s in sims)).log()
        counts[2] += 1
    return (token, marked, compared), counts


def plain_loss(logits, batch, sim, *, temperature=0.3, weights=(1.0, 0.7, 1.3), size=4):
    terms, counts = plain_terms(logits, batch, PLAIN[sim], temperature, size=size)
    parts = zip(weights, terms, counts, strict=True)
    return sum(weight * term / max(count, 1) for weight, term, count in parts)


def ours(logits, batches, sim, *, step=10, **options):
    """Loss over several micro-batches, each with its own logits, as the step adds it up."""
    options = {
        "temperature": 0.3, "marked_weight": 0.7, "contrastive_weight": 1.3, **options
    }  # fmt: skip
    sim_fn = SIM_FNS.get(sim, sim)
    part = shelf_loss("contrastive", sim_fn=sim_fn, **options)
    totals = {name: torch.tensor(float(n)) for name, n in part.count(batches).items()}
    loss, figures = 0.0, {}
    for own, batch in zip(logits, batches, strict=True):
        share, told = part(own, batch, totals=totals, step=step)
        loss = loss + share
        figures = {name: figures.get(name, 0) + value for name, value in told.items()}
    return loss, figures


def with_gradient(function, logits):
    leaf = logits.clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(("sim", "size"), [("js", 3), ("cos", 4)])
def test_loss_and_gradient_are_those_of_plain_loops(sim, size):
    batch = make_batch(size=size)
    logits = make_logits(batch)
    loss, grad = with_gradient(lambda own: ours([own], [batch], sim)[0], logits)
    wanted, wanted_grad = with_gradient(lambda own: plain_loss(own, batch, sim, size=size), logits)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sim", SIM_FNS)
def test_the_figures_are_the_terms(sim):
    batch = make_batch()
    logits = make_logits(batch)
    loss, figures = ours([logits], [batch], sim)
    terms, counts = plain_terms(logits, batch, PLAIN[sim], 0.3, size=4)
    names = ("token_loss", "marked_loss", "contrastive_loss")
    for name, term, count in zip(names, terms, counts, strict=True):
        torch.testing.assert_close(figures[name], term / count, rtol=1e-12, atol=0)
    own = sft(logits, batch, num_targets=torch.tensor(float(counts[0])))
    torch.testing.assert_close(figures["token_loss"], own, rtol=1e-6, atol=0)
    assert not any(value.requires_grad for value in figures.values())
    wanted = figures["token_loss"] + 0.7 * figures["marked_loss"]
    torch.testing.assert_close(loss, wanted + 1.3 * figures["contrastive_loss"])


def rows_of(batch, rows):
    part = {name: value[rows] for name, value in batch.items()}
    size = int((batch["loss_groups"] == 0).sum())
    return {**part, "loss_groups": torch.arange(len(rows) // size).repeat_interleave(size)}


@pytest.mark.parametrize("sim", SIM_FNS)
@pytest.mark.parametrize("split", [[3, 1, 0, 2], [[3, 2], [0, 1]]])
def test_neither_order_nor_micro_batches_of_groups_matter(sim, split):
    batch = make_batch(4)
    logits = make_logits(batch)
    parts = split if isinstance(split[0], list) else [split]
    rows = [[g * 4 + i for g in groups for i in range(4)] for groups in parts]
    loss, grad = with_gradient(lambda own: ours([own], [batch], sim)[0], logits)
    other, other_grad = with_gradient(
        lambda own: ours([own[r] for r in rows], [rows_of(batch, r) for r in rows], sim)[0], logits
    )
    torch.testing.assert_close(other, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(other_grad, grad, rtol=1e-10, atol=1e-14)


def test_what_fills_up_or_was_dropped_counts_for_nothing():
    batch = make_batch(3)
    logits = make_logits(batch)
    batch["labels"][4:8] = -100  # fills up
    batch["labels"][9] = -100  # one sample of the last group was dropped
    loss, figures = ours([logits], [batch], "js")
    torch.testing.assert_close(loss, plain_loss(logits, batch, "js"), rtol=1e-12, atol=0)
    alone, _ = ours([logits[:4]], [rows_of(batch, range(4))], "js")
    both = plain_terms(logits, batch, plain_js, 0.3, size=4)
    assert both[1][2] == 1, "one group is left"
    assert torch.isfinite(alone) and figures["contrastive_accuracy"] in (0, 1)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    loss, grad = with_gradient(lambda own: ours([own], [empty], "js")[0] * 0, logits)
    assert grad is None or not grad.any()


def test_without_marks_the_marked_term_is_nothing():
    batch = make_batch()
    batch["loss_marks"][:] = False
    logits = make_logits(batch)
    loss, figures = ours([logits], [batch], "cos")
    assert figures["marked_loss"] == 0
    torch.testing.assert_close(loss, plain_loss(logits, batch, "cos"), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("step", "start", "steps", "share"),
    [(0, 0, 0, 1), (0, 0, 10, 0), (3, 0, 10, 0.3), (10, 0, 10, 1), (99, 0, 10, 1),
     (4, 5, 0, 0), (5, 5, 0, 1), (6, 5, 4, 0.25)],
)  # fmt: skip
def test_the_warm_up_follows_the_step_and_no_counter(step, start, steps, share):
    batch = make_batch()
    logits = make_logits(batch)
    options = {"start_step": start, "warmup_steps": steps, "step": step}
    for _ in range(2):  # calls do not count
        loss, grad = with_gradient(lambda own: ours([own], [batch], "js", **options)[0], logits)
        weights = (1.0, 0.7, 1.3 * share)
        wanted, wanted_grad = with_gradient(
            lambda own, weights=weights: plain_loss(own, batch, "js", weights=weights), logits
        )
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sim", SIM_FNS)
def test_half_types_are_computed_in_float32(sim):
    batch = make_batch()
    logits = make_logits(batch).bfloat16()
    loss, grad = with_gradient(lambda own: ours([own], [batch], sim)[0], logits)
    wanted, wanted_grad = with_gradient(lambda own: plain_loss(own, batch, sim), logits.double())
    assert loss.dtype == torch.float32 and grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("sim", SIM_FNS)
def test_a_confident_model_has_finite_gradients(sim):
    batch = make_batch()
    logits = make_logits(batch, scale=500.0).float()  # shares of 0 and 1
    loss, grad = with_gradient(lambda own: ours([own], [batch], sim)[0], logits)
    assert torch.isfinite(loss) and torch.isfinite(grad).all()


def test_the_positive_that_says_the_same_wins():
    batch = make_batch(1)
    batch["labels"][:], batch["loss_marks"][:] = 3, True
    logits = torch.zeros(4, 9, VOCABULARY)
    logits[:2, :, 0], logits[2:, :, 1] = 20.0, 20.0
    _, figures = ours([logits], [batch], "js", temperature=0.1)
    assert figures["contrastive_accuracy"] == 1 and figures["contrastive_loss"] < 1e-3
    _, figures = ours([logits[[0, 2, 1, 3]]], [batch], "js", temperature=0.1)
    assert figures["contrastive_accuracy"] == 0 and figures["contrastive_loss"] > 9
    equal = torch.zeros_like(logits)
    _, figures = ours([equal], [batch], "cos", temperature=0.1)
    assert figures["contrastive_loss"].item() == pytest.approx(math.log(3), rel=1e-6)


def test_a_user_s_own_similarity():
    batch = make_batch()
    logits = make_logits(batch)

    def dot(a, b):
        assert a.shape == b.shape == (9, VOCABULARY)
        torch.testing.assert_close(a.sum(dim=1), torch.ones(9, dtype=a.dtype))
        return (a * b).sum(dim=1)

    loss, _ = ours([logits], [batch], dot)
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": -1.0}, {"marked_weight": -1.0}, {"warmup_steps": -1}],
)
def test_numbers_out_of_range(options):
    batch = make_batch()
    with pytest.raises(UserError, match="temperature above 0 and nothing below 0"):
        ours([make_logits(batch)], [batch], "js", **options)


def test_a_micro_batch_of_another_collate_part():
    batch = make_batch()
    del batch["loss_groups"]
    with pytest.raises(UserError, match="without loss_groups.*--collate-fn contrastive"):
        ours([make_logits(batch)], [batch], "js")


# -- the similarities ----------------------------------------------------------------------


def shares(*rows):
    return torch.tensor(rows, dtype=torch.float64)


RANDOM = torch.randn(2, 50, 17, generator=torch.Generator().manual_seed(4)).double() * 4


@pytest.mark.parametrize("sim", SIM_FNS)
def test_symmetric_and_one_for_the_same(sim):
    a, b = RANDOM.softmax(-1)
    assert torch.equal(SIM_FNS[sim](a, b), SIM_FNS[sim](b, a))
    torch.testing.assert_close(SIM_FNS[sim](a, a), torch.ones(50, dtype=torch.float64))
    assert ((SIM_FNS[sim](a, b) >= 0) & (SIM_FNS[sim](a, b) < 1)).all()


def test_js_stays_in_its_range():
    dtype = torch.float32
    generator = torch.Generator().manual_seed(2)
    for scale in (0.0, 1e-3, 1.0, 30.0, 300.0):
        a = (torch.randn(200, 30, generator=generator, dtype=dtype) * scale).softmax(-1)
        b = (torch.randn(200, 30, generator=generator, dtype=dtype) * scale).softmax(-1)
        for one, other in ((a, b), (a, a), (a, (a + 1e-7) / (1 + 30e-7))):
            values = js(one, other)
            assert ((values >= 0) & (values <= 1)).all()


@pytest.mark.parametrize(
    ("a", "b", "js_value", "cos_value"),
    [
        ([1.0, 0.0], [0.0, 1.0], 0.0, 0.0),
        ([1.0, 0.0], [1.0, 0.0], 1.0, 1.0),
        ([0.5, 0.5, 0.0], [0.5, 0.0, 0.5], 0.5, 0.5),
        ([1.0, 0.0], [0.5, 0.5], 1 - (math.log(4 / 3) + math.log(2 / 3) / 2 + math.log(2) / 2)
         / 2 / math.log(2), 0.5**0.5),
    ],
)  # fmt: skip
def test_known_values_with_zeros_have_finite_gradients(a, b, js_value, cos_value):
    for function, wanted in ((js, js_value), (cos, cos_value)):
        one, other = (shares(row).requires_grad_() for row in (a, b))
        value = function(one, other)
        assert value.item() == pytest.approx(wanted, abs=1e-12)
        value.backward()
        assert torch.isfinite(one.grad).all() and torch.isfinite(other.grad).all()


def test_js_has_no_gradient_at_the_same_distribution():
    """It is the highest value there, so along shares that still add up to 1 nothing pulls."""
    logits = RANDOM[0].clone().requires_grad_()
    js(logits.softmax(-1), RANDOM[0].softmax(-1)).sum().backward()
    assert logits.grad.abs().max() < 1e-12


def test_js_pulls_disjoint_ones_together():
    """Their value is put back into [0, 1] after rounding; the gradient must not go with it."""
    one, other = torch.eye(2).requires_grad_(), torch.eye(2).flip(0)
    js(one, other).sum().backward()
    assert (one.grad[0, 1] > one.grad[0, 0] + 1).item()
    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 500, 8, generator=generator)  # half of them are below 0 by rounding
    one = torch.cat([one / one.sum(-1, keepdim=True), torch.zeros_like(one)], dim=-1)
    other = torch.cat([torch.zeros_like(other), other / other.sum(-1, keepdim=True)], dim=-1)
    js(one.requires_grad_(), other).sum().backward()
    assert (one.grad[:, 8:].amin(-1) > one.grad[:, :8].amax(-1) + 1).all()


@pytest.mark.parametrize("sim", SIM_FNS)
def test_gradients_of_the_similarities_by_differences(sim):
    a, b = (RANDOM[:, :3] / 4).softmax(-1)
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    assert torch.autograd.gradcheck(SIM_FNS[sim], (a, b))
