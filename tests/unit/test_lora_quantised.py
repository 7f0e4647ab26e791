"""LoRA and DoRA on quantized weights; what would change these weights is refused."""

import pytest
import torch
from torch import nn

from stageline.errors import UserError
from stageline.modules.lora import LoRAWrapper, merge_lora, wrap_linear
from stageline.modules.lora_layer import dense_weight


class Packed(nn.Module):
    """A linear layer of integers whose `weight` is converted to floats at each call."""

    is_quantised = is_linear_layer = True

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("values", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    @property
    def weight(self):
        return self.values * self.scale

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def packed(seed=0):
    torch.manual_seed(seed)
    return Packed(nn.Linear(6, 8))


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_computes_what_it_does_beside_the_same_floats(use_dora):
    layer = packed()
    plain = nn.Linear(layer.in_features, layer.out_features)
    with torch.no_grad():
        plain.weight.copy_(dense_weight(layer))
        plain.bias.copy_(layer.bias)
    x = torch.randn(3, layer.in_features)
    ours, theirs = (
        wrap_linear(one, rank=2, alpha=4.0, use_dora=use_dora) for one in (layer, plain)
    )
    assert isinstance(ours, LoRAWrapper)
    assert ours.lora.lora_A.weight.dtype == torch.float32
    torch.testing.assert_close(ours(x), layer(x), rtol=1e-5, atol=1e-6)
    for wrapper in (ours, theirs):
        with torch.no_grad():
            wrapper.lora.lora_B.weight.fill_(0.1)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    for wrapper in (ours, theirs):
        wrapper(x).sum().backward()
    for a, b in zip(ours.lora.parameters(), theirs.lora.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_what_would_change_the_base():
    with pytest.raises(UserError, match="--lora.init pissa does not work with a quantised base"):
        wrap_linear(packed(), rank=2, start="pissa")
    with pytest.raises(UserError, match="merging an adapter does not work with a quantised"):
        merge_lora(wrap_linear(packed(), rank=2))


def test_the_adapter_has_the_dtype_that_it_is_given():
    wrapper = LoRAWrapper(nn.Linear(4, 4).bfloat16(), rank=2, alpha=2.0, dtype=torch.float32)
    assert wrapper.lora.lora_B.weight.dtype == torch.float32
    assert wrapper(torch.randn(2, 4).bfloat16()).dtype == torch.bfloat16
