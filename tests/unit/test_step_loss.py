"""The loss of a step: tokens and extra loss apart, and what the backward pass starts from."""

import torch

from stageline.training.loss_part import StepLoss


def loss_fn(logits, batch, *, num_targets):
    return (logits * batch["weight"]).sum() / num_targets


def run(outputs, *, scale=1.0, num_micro_batches=None):
    loss_of = StepLoss(
        loss_fn,
        num_targets=4,
        num_micro_batches=num_micro_batches or len(outputs),
        scale=scale,
        device=torch.device("cpu"),
    )
    batch = {"weight": torch.tensor(2.0)}
    return loss_of, [loss_of(output, batch).item() for output in outputs]


def test_an_extra_loss_counts_as_a_mean_over_micro_batches():
    outputs = [(torch.tensor([1.0, 3.0]), torch.tensor(extra)) for extra in (5.0, 7.0)]
    loss_of, starts = run(outputs)
    assert starts == [2.0 + 2.5, 2.0 + 3.5]
    assert (loss_of.loss.item(), loss_of.extra_loss.item()) == (4.0, 6.0)
    loss_of, _ = run(outputs * 2)
    assert loss_of.extra_loss.item() == 6.0
    loss_of, _ = run(outputs, num_micro_batches=4)  # two of them on another replica
    assert loss_of.extra_loss.item() == 3.0


def test_the_scale_of_fp16_is_in_the_gradient_and_in_no_figure():
    logits = torch.tensor([1.0, 3.0], requires_grad=True)
    extra = torch.tensor(5.0, requires_grad=True)
    loss_of, starts = run([(logits, extra)], scale=1024.0)
    assert starts == [7.0 * 1024]
    assert (loss_of.loss.item(), loss_of.extra_loss.item()) == (2.0, 5.0)
    loss_of((logits, extra), {"weight": torch.tensor(2.0)}).backward()
    assert extra.grad.item() == 1024.0 and logits.grad.tolist() == [512.0, 512.0]
    assert not loss_of.loss.requires_grad and not loss_of.extra_loss.requires_grad
