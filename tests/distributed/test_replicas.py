"""Sums, gathered values and refusals of replicas, on plain modules."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stageline.errors import UserError
from stageline.training import replicas as module
from stageline.training.precision import MasterWeights
from stageline.training.replicas import Replicas
from tests.helpers.ranks import run_ranks


def numbers(rank):
    replicas = Replicas(dist.group.WORLD)
    return [
        replicas.sum([2**53 + 1 + rank, rank]),
        replicas.sum([0.5, rank]),
        replicas.gather("ab"[rank]),
        [replicas.rank, replicas.size],
    ]


def test_sums_are_exact_and_in_order():
    first, second = run_ranks(numbers, 2)
    assert first[:3] == second[:3] == [[2**54 + 3, 1], [1.0, 1.0], ["a", "b"]]
    assert (first[3], second[3]) == ([0, 2], [1, 2])
    alone = Replicas()
    assert (alone.sum([3, 0.5]), alone.gather("x")) == ([3, 0.5], ["x"])


SHAPES = {"a": (3, 2), "b": (5,), "half": (4,), "large": (40,), "one side": (2,), "nowhere": (2,)}


def make_parameters():
    dtypes = {"half": torch.bfloat16}
    return {
        name: nn.Parameter(torch.zeros(shape, dtype=dtypes.get(name, torch.float32)))
        for name, shape in SHAPES.items()
    }


def reduce(rank, max_bytes):
    module.BUCKET_BYTES = max_bytes
    parameters = make_parameters()
    weights = MasterWeights(parameters)
    for name, parameter in weights.parameters.items():
        if name != "nowhere" and not (name == "one side" and rank == 0):
            torch.manual_seed(10 * rank + len(name))
            parameter.grad = torch.randn(parameter.shape)
    # neither is laid out as it was made
    weights.parameters["a"].grad = weights.parameters["a"].grad.T.contiguous().T
    own = {n: p.grad.clone() for n, p in weights.parameters.items() if p.grad is not None}
    Replicas(dist.group.WORLD).reduce_gradients(weights)
    return [own, {n: p.grad for n, p in weights.parameters.items() if p.grad is not None}]


@pytest.mark.parametrize("max_bytes", [1, 60, 2**20])
def test_gradients_are_added_up_in_any_buckets(max_bytes):
    (own_0, sum_0), (own_1, sum_1) = run_ranks(reduce, 2, max_bytes)
    assert set(sum_0) == set(sum_1) == set(SHAPES) - {"nowhere"}, "what has no gradient gets none"
    assert "one side" not in own_0
    for name, total in sum_0.items():
        assert total.dtype == torch.float32
        assert torch.equal(total, own_0.get(name, torch.zeros(())) + own_1[name])
        assert torch.equal(total, sum_1[name])


def test_buckets_keep_their_size():
    grads = [torch.zeros(n) for n in (4, 4, 4, 4, 4, 100, 2)] + [
        torch.zeros(2, dtype=torch.float64)
    ]
    sizes = [[g.numel() for g in bucket] for bucket in module._buckets(grads, 32)]
    assert sizes == [[4, 4], [4, 4], [4], [100], [2], [2]]


def start(rank, kind):
    torch.manual_seed(0)
    linear = nn.Linear(3, 2, dtype=torch.bfloat16 if kind == "half" else torch.float32)
    with torch.no_grad():
        linear.bias.fill_(torch.nan)  # NaN equals itself here
        if rank == 1 and kind != "equal":
            linear.weight[1, 2] += 1e-1
    try:
        Replicas(dist.group.WORLD).check_equal([linear])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["equal", "one weight", "half"])
def test_replicas_must_start_alike(kind):
    first, second = run_ranks(start, 2, kind)
    assert first == second, "every rank ends with the same message"
    if kind == "equal":
        assert first == ""
    else:
        assert "replica 1 starts with other weights than replica 0 (1 of 2 parameters" in first
        assert "weight" in first and "--model-path" in first
