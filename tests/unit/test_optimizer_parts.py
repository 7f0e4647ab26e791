"""Learning rates against torch's own schedulers; groups of weight decay."""

import pytest
import torch
from torch import nn

from optimizer import adafactor, adamw, adamw_8bit, constant, cosine, linear, muon, wsd
from stageline.errors import UserError
from stageline.training.optimizers import optimizer_groups

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


@pytest.mark.parametrize(("fused", "amsgrad"), [(None, True), (False, False), (True, False)])
def test_adamw_equals_torch(fused, amsgrad):
    """Unfused on a CPU unless it is asked for: the fused kernel rounds differently there."""
    weights = [nn.Parameter(torch.linspace(-1, 1, 1000)) for _ in range(2)]
    rates = {"learning_rate": 0.1, "weight_decay": 0.2}
    ours = adamw([{"params": weights[:1]}], **rates, fused=fused, amsgrad=amsgrad)
    theirs = torch.optim.AdamW(
        weights[1:], lr=0.1, weight_decay=0.2, foreach=False, fused=fused is True, amsgrad=amsgrad
    )
    assert ours.param_groups[0]["amsgrad"] is amsgrad
    assert bool(ours.param_groups[0]["fused"]) is (fused is True)
    for step in range(5):
        for weight in weights:
            weight.grad = torch.sin(weight.detach() * (step + 1))
        ours.step()
        theirs.step()
    assert torch.equal(*weights)


def test_adamw_is_fused_where_all_parameters_are_on_a_gpu():
    class OnGpu(nn.Parameter):
        device = torch.device("cuda", 0)

    class OnOther(nn.Parameter):
        device = torch.device("meta", 0)  # stands for one of a package, such as torch_npu

    made = []
    original = torch.optim.AdamW
    torch.optim.AdamW = lambda groups, **options: made.append(options["fused"])
    try:
        here, there = nn.Parameter(torch.zeros(1)), OnGpu(torch.zeros(1))
        for groups in ([there], [there, here], [OnOther(torch.zeros(1))]):
            adamw([{"params": groups}], learning_rate=0.1, weight_decay=0.0)
    finally:
        torch.optim.AdamW = original
    assert made == [True, None, None]


def test_linear_equals_torch():
    rate = linear(**RATES)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end_factor=0.1, total_iters=16)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[4])
    for step in range(20):
        assert rate(step) == pytest.approx(both.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        both.step()
    assert rate(20) == pytest.approx(0.01) and rate(1000) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("shape", "half", "decay"), [("linear", 0.055, 0.2), ("cosine", 0.055, 4), ("sqrt", None, 4)]
)
def test_wsd_warms_up_stays_and_falls(shape, half, decay):
    rate = wsd(**RATES, decay=decay, shape=shape)
    assert [rate(step) for step in (0, 2)] == pytest.approx([0.02, 0.06])
    assert {rate(step) for step in range(4, 17)} == {0.1}
    falling = [rate(step) for step in range(16, 22)]
    assert sorted(falling, reverse=True) == falling
    assert rate(18) == pytest.approx(half or 0.01 + 0.09 * (1 - 0.5**0.5))
    assert rate(20) == rate(99) == pytest.approx(0.01)


def test_wsd_whose_ends_overlap_is_refused():
    with pytest.raises(UserError, match="17 steps of decay, after 4"):
        wsd(**RATES, decay=17)


def matrices_and_more():
    """Named weights of each kind that a model has, with gradients that depend on the step."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (16, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "vision.patch_embedding.weight": (4, 3, 2, 2),
        "lm_head.weight": (12, 8),
    }
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def give_gradients(weights, step):
    for index, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(100 * step + index)
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight)


def test_muon_takes_the_matrices_inside_and_adamw_the_rest():
    ours, theirs = matrices_and_more(), matrices_and_more()
    rates = {"learning_rate": 0.02, "weight_decay": 0.1}
    optimizer = muon(optimizer_groups(ours, weight_decay=0.1), **rates)
    inner = [name for name in theirs if "proj" in name]
    references = [
        torch.optim.Muon(
            [theirs[name] for name in inner],
            lr=0.02,
            weight_decay=0.1,
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    for decay, names in ((0.1, ("embed_tokens", "patch", "lm_head")), (0.0, ("layernorm",))):
        chosen = [weight for name, weight in theirs.items() if any(n in name for n in names)]
        references.append(torch.optim.AdamW(chosen, lr=0.02, weight_decay=decay))
    for step in range(4):
        for weights in (ours, theirs):
            give_gradients(weights.values(), step)
        optimizer.step()
        for reference in references:
            reference.step()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    keys = {name: set(optimizer.state[weight]) for name, weight in ours.items()}
    assert {name for name, kept in keys.items() if kept == {"momentum_buffer"}} == set(inner)
    assert all(
        kept == {"step", "exp_avg", "exp_avg_sq"} for n, kept in keys.items() if n not in inner
    )


def test_muon_follows_the_learning_rate_of_the_run():
    """The groups that a trainer changes are those that the two optimizers read."""
    weights = matrices_and_more()
    optimizer = muon(optimizer_groups(weights, weight_decay=0.0), learning_rate=1, weight_decay=0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    give_gradients(weights.values(), 0)
    optimizer.step()
    assert all(torch.equal(before[name], weight) for name, weight in weights.items())


def test_adafactor_is_the_papers():
    """Algorithm 4 and 5 (relative step, no momentum), written out in float64."""
    weights = {"a.weight": nn.Parameter(torch.linspace(-1, 1, 48, dtype=torch.float64).view(6, 8))}
    start = weights["a.weight"].detach().clone()
    optimizer = adafactor(
        optimizer_groups(weights, weight_decay=0.0), learning_rate=0.01, weight_decay=0.0
    )
    row, column, value = torch.zeros(6), torch.zeros(8), start
    for step in range(1, 5):
        give_gradients(weights.values(), step)
        grad = weights["a.weight"].grad
        optimizer.step()
        decay = 1 - step**-0.8
        row = decay * row + (1 - decay) * grad.square().mean(dim=1)
        column = decay * column + (1 - decay) * grad.square().mean(dim=0)
        update = grad / (torch.outer(row, column) / row.mean()).sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        rate = max(1e-3, value.square().mean().sqrt().item()) * min(0.01, step**-0.5)
        value = value - rate * update
    assert torch.allclose(weights["a.weight"], value, rtol=1e-6)
    kept = optimizer.state[weights["a.weight"]]
    assert sum(kept[name].numel() for name in ("row_var", "col_var")) == 14


def test_8_bit_moments_stay_near_adamw_and_are_small():
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    weights = {"a.weight": nn.Parameter(torch.randn(128, 128))}
    same = {"a.weight": nn.Parameter(weights["a.weight"].detach().clone())}
    rates = {"learning_rate": 0.01, "weight_decay": 0.1}
    ours = adamw_8bit(optimizer_groups(weights, weight_decay=0.1), **rates)
    exact = adamw(optimizer_groups(same, weight_decay=0.1), **rates)
    for step in range(10):
        for optimizer, named in ((ours, weights), (exact, same)):
            give_gradients(named.values(), step)
            optimizer.step()
    moved = (same["a.weight"] - weights["a.weight"]).abs().mean()
    assert 0 < moved < 0.005  # each step moves by about 0.01
    state = ours.state[weights["a.weight"]]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
