"""Compiled layers: the same loss and gradients, one graph for all layers and lengths, same names.

The backend here traces and splits as the real one does and leaves out the C++ compiler, which needs
a minute and a half for two layers on two cores.
"""

import pytest
import torch
from torch._dynamo.utils import counters

from loss_fn import sft
from pp_models import CausalLMStage
from stageline.checkpoint.init import init_split_model
from stageline.modules.recompute import compile_layers
from tests.helpers.split_backward import plain_backward
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config


def make_stage(family):
    model = CausalLMStage(tiny_config(family), stage=1, num_stages=2)
    init_split_model(model, seed=1, device="cpu", dtype=torch.float32)
    model.frozen()
    return model.train()


def run(model, family, length, backward=plain_backward):
    batch = tiny_micro_batches(family, lengths=(length,))[0]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, length, 16, generator=generator).requires_grad_()
    output = model(hidden, attention_mask=batch["attention_mask"])
    loss = sft(output, batch, num_targets=torch.tensor(7.0))
    model.zero_grad()
    return {"loss": loss.detach().clone(), **backward(loss, None, hidden=hidden, model=model)}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_compiled_layers_give_the_same_numbers():
    """Recomputed ones, and their draws, are in test_seeds_over_stages.py."""
    plain, compiled = make_stage("llama"), make_stage("llama")
    names = list(compiled.state_dict())
    compile_layers(compiled.layer_list(), backend="aot_eager")
    for length in (14, 11):
        theirs = run(plain, "llama", length)
        ours = run(compiled, "llama", length)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
    assert list(compiled.state_dict()) == names
    assert counters["stats"]["unique_graphs"] == 1, "two layers and two lengths share a graph"
