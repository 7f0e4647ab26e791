"""The norm of all gradients, on one rank and over ranks, against a sum of squares in float64."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stageline.training.grad_norm import Ownership, gather_norms, gather_owners, total_norm
from tests.helpers.ranks import run_ranks


@pytest.fixture
def alone():
    """Open a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_that_of_the_gradients_and_no_rounder(dtype, alone):
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.zeros(300, dtype=dtype)) for name in ("a", "b", "c")}
    for name in ("a", "b"):  # nothing came to the third
        parameters[name].grad = torch.randn(300).to(dtype)
    ownership = Ownership(parameters, order=list(parameters))
    norms = gather_norms(parameters, ownership=ownership, device=torch.device("cpu"))
    gradients = [parameters[name].grad.double() for name in ("a", "b")]
    expected = torch.linalg.vector_norm(torch.cat(gradients))
    assert abs(total_norm(norms) / expected - 1) < 1e-6


def test_a_rank_that_trains_nothing_sends_from_where_the_others_do(monkeypatch, alone):
    """From the host it would take another way than they, and all would wait for each other."""
    sent = []
    monkeypatch.setattr(dist, "all_gather", lambda found, own, group=None: sent.append(own.device))
    device = torch.device("meta")
    gather_norms({}, ownership=Ownership({}, order=["a"]), device=device)
    assert sent == [device]


# three stages, the model's order is not that of the ranks; the first and the last share a weight
ORDER = ["embed", "a.weight", "b.weight", "c.weight", "d.weight", "norm"]
HELD = [
    {"embed": 1.0, "a.weight": 2.0},
    {"b.weight": 3.0, "d.weight": None, "c.weight": 5.0},
    {"norm": 7.0, "embed": 11.0},
]


def norms_over_ranks(rank):
    parameters = {name: nn.Parameter(torch.zeros(4)) for name in HELD[rank]}
    for name, value in HELD[rank].items():
        parameters[name].grad = None if value is None else torch.full((4,), value)
    ownership = Ownership(parameters, order=ORDER)
    ownership.sum_tied_gradients(parameters)
    norms = gather_norms(parameters, ownership=ownership, device=torch.device("cpu"))
    owners = gather_owners(ownership, dict.fromkeys(parameters, 10 + rank))
    tied = parameters["embed"].grad.tolist() if "embed" in parameters else None
    return norms.tolist(), total_norm(norms).item(), [tuple(one) for one in owners], tied


def test_norms_of_all_stages_are_in_the_models_order_and_a_tied_weight_counts_once():
    results = run_ranks(norms_over_ranks, 3)
    for norms, total, owners, tied in results:
        # four equal numbers have twice the number as their norm; -1: there is no gradient
        assert norms == [24.0, 4.0, 6.0, 10.0, -1.0, 14.0]
        assert total == pytest.approx((24**2 + 4**2 + 6**2 + 10**2 + 14**2) ** 0.5)
        assert [name for name, _, _ in owners] == ORDER
        assert [(rank, stage) for _, rank, stage in owners] == [
            (rank, 10 + rank) for rank in (0, 0, 1, 1, 1, 2)
        ]
        assert tied in (None, [12.0] * 4)
    assert [tied for *_, tied in results] == [[12.0] * 4, None, [12.0] * 4]
