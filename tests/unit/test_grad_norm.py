"""The norm of all gradients, against a sum of squares in float64."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stageline.training.grad_norm import Ownership, gather_norms, total_norm


@pytest.fixture(autouse=True)
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_that_of_the_gradients_and_no_rounder(dtype):
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.zeros(300, dtype=dtype)) for name in ("a", "b", "c")}
    for name in ("a", "b"):  # nothing came to the third
        parameters[name].grad = torch.randn(300).to(dtype)
    ownership = Ownership(parameters, order=list(parameters))
    norms = gather_norms(parameters, ownership=ownership, device=torch.device("cpu"))
    gradients = [parameters[name].grad.double() for name in ("a", "b")]
    expected = torch.linalg.vector_norm(torch.cat(gradients))
    assert abs(total_norm(norms) / expected - 1) < 1e-6


def test_a_rank_that_trains_nothing_sends_from_where_the_others_do(monkeypatch):
    """From the host it would take another way than they, and all would wait for each other."""
    sent = []
    monkeypatch.setattr(dist, "all_gather", lambda found, own, group=None: sent.append(own.device))
    device = torch.device("meta")
    gather_norms({}, ownership=Ownership({}, order=["a"]), device=device)
    assert sent == [device]
