"""Learning rates against torch's own schedulers; groups of weight decay."""

import pytest
import torch
from torch import nn

from optimizer import adamw, constant, cosine
from stageline.training.optimizer_groups import optimizer_groups

RATES = {
    "learning_rate": 0.1,
    "min_lr": 0.01,
    "warmup_steps": 4,
    "warmup_start_lr": 0.02,
    "total_steps": 20,
}


def test_cosine_equals_torch():
    rate = cosine(**RATES)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16, eta_min=0.01)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[4])
    for step in range(20):
        assert rate(step) == pytest.approx(both.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        both.step()
    assert rate(20) == pytest.approx(0.01) and rate(1000) == pytest.approx(0.01)


def test_constant_stays():
    rate = constant(**RATES)
    assert [rate(step) for step in (0, 2, 4, 100)] == pytest.approx([0.02, 0.06, 0.1, 0.1])


def test_norms_and_biases_do_not_decay():
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "n": nn.LayerNorm(3), "e": nn.Embedding(4, 3)})
    groups = optimizer_groups(dict(model.named_parameters()), weight_decay=0.5)
    decay = {group["weight_decay"]: set(group["param_names"]) for group in groups}
    assert decay == {0.5: {"a.weight", "e.weight"}, 0.0: {"a.bias", "n.weight", "n.bias"}}


@pytest.mark.parametrize("fused", [None, False, True])
def test_adamw_equals_torch(fused):
    """Unfused on a CPU unless it is asked for: the fused kernel rounds differently there."""
    weights = [nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2)]
    rates = {"learning_rate": 0.1, "weight_decay": 0.2}
    ours = adamw([{"params": weights[:1]}], **rates, fused=fused)
    theirs = torch.optim.AdamW(
        weights[1:], lr=0.1, weight_decay=0.2, foreach=False, fused=fused is True
    )
    assert bool(ours.param_groups[0]["fused"]) is (fused is True)
    for step in range(5):
        for weight in weights:
            weight.grad = torch.sin(weight.detach() * (step + 1))
        ours.step()
        theirs.step()
    assert torch.equal(*weights)


def test_adamw_is_fused_where_all_parameters_are_on_a_gpu():
    class OnGpu(nn.Parameter):
        is_cuda = True

    made = []
    original = torch.optim.AdamW
    torch.optim.AdamW = lambda groups, **options: made.append(options["fused"])
    try:
        here, there = nn.Parameter(torch.zeros(1)), OnGpu(torch.zeros(1))
        for groups in ([{"params": [there]}], [{"params": [there]}, {"params": [here]}]):
            adamw(groups, learning_rate=0.1, weight_decay=0.0)
    finally:
        torch.optim.AdamW = original
    assert made == [True, None]
