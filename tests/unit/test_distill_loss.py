"""The divergence from a teacher against trl's own functions, loss and gradient in float64."""

import pytest
import torch

from loss_fn import distill
from stageline.errors import UserError
from stageline.training.distillation import with_teacher
from tests.helpers.shelf_losses import shelf_loss

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
ROWS, TOKENS, VOCABULARY = 3, 7, 11


def make_batch():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels[0, :3] = labels[1, :5] = labels[1, 6:] = labels[2, 4:] = -100
    shape = (ROWS, TOKENS, VOCABULARY)
    student, teacher = (
        2 * torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    is_target = torch.nn.functional.pad(labels != -100, (0, 1))[:, 1:]
    return {"input_ids": labels, "labels": labels}, student.requires_grad_(), teacher, is_target


def ours(batch, student, found, **options):
    count = torch.tensor(float((batch["labels"][:, 1:] != -100).sum()))
    loss = distill(student, with_teacher(batch, found), num_targets=count, **options)
    return loss, torch.autograd.grad(loss, student)[0]


@pytest.mark.parametrize(("beta", "temperature"), [(1, 1), (0, 1), (0.3, 0.7)])
def test_each_divergence_is_trls(beta, temperature):
    gkd = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    batch, student, teacher, is_target = make_batch()
    own, gradient = ours(
        batch, student, (teacher[is_target], None), beta=beta, temperature=temperature
    )
    theirs = gkd.generalized_jsd_loss(
        student[:, :-1], teacher[:, :-1], batch["labels"][:, 1:], beta=beta, temperature=temperature
    )
    torch.testing.assert_close(own, theirs, **CLOSE)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, student)[0], **CLOSE)


@pytest.mark.parametrize("beta", [0.5, 1])
def test_other_tokens_of_a_top_k_are_lumped_as_in_trl(beta):
    trl = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    batch, student, teacher, is_target = make_batch()
    top = teacher.log_softmax(-1)[is_target].topk(4)
    own, gradient = ours(batch, student, (top.values, top.indices), beta=beta)
    chosen = student.log_softmax(-1)[is_target].gather(-1, top.indices)
    mask = torch.ones_like(chosen, dtype=torch.bool)
    both = [trl._add_tail_bucket(one, mask) for one in (chosen, top.values)]
    theirs = trl._jsd_divergence(both[0][0], both[1][0], beta, both[0][1]).sum() / is_target.sum()
    torch.testing.assert_close(own, theirs, **CLOSE)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, student)[0], **CLOSE)
    with pytest.raises(UserError, match="whole distributions"):
        ours(batch, student, (top.values, top.indices), temperature=2.0)


def test_it_adds_up_and_refuses_numbers_outside_of_its_range():
    batch, student, teacher, is_target = make_batch()
    part, count = shelf_loss("distill"), torch.tensor(9.0)
    whole = part.loss_fn(
        student, with_teacher(batch, (teacher[is_target], None)), num_targets=count
    )
    rows = [
        part.loss_fn(
            student[[row]],
            with_teacher({"labels": batch["labels"][[row]]}, (teacher[row][is_target[row]], None)),
            num_targets=count,
        )
        for row in range(ROWS)
    ]
    torch.testing.assert_close(sum(rows), whole, **CLOSE)
    with pytest.raises(UserError, match="beta 2"):
        distill(student, batch, num_targets=count, beta=2.0)
    with pytest.raises(UserError, match=r"teacher\.path"):
        distill(student, batch, num_targets=count)
