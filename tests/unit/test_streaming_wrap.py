"""The rules by which a model is wrapped, in their order, and what runs where afterwards."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from stageline.streaming import (
    AutoRoundPipe,
    RoundPipe,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from stageline.streaming.lanes import Lane
from tests.helpers.late_queues import late_lanes
from tests.helpers.tiny_batches import join_micro_batches, tiny_micro_batches
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_config

LINEAR = 4 * (8 * 8 + 8)  # bytes of a Linear(8, 8)


class Model(nn.Module):
    """A module with children and a forward that calls them in turn."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, value):
        for child in self.children():
            for each in child if isinstance(child, nn.ModuleList) else [child]:
                value = each(value)
        return value


class Whole(Model):
    """A module that computes without children."""

    def __init__(self, size=8):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, size))

    def forward(self, value):
        return value * self.scale


def linear(size=8):
    return nn.Linear(size, size)


def wrap(model, *, num_lanes=1, is_late=False, **kwargs):
    kwargs = {"lower_threshold": 16 * 1024, "upper_threshold": 0, **kwargs}
    lanes = late_lanes(num_lanes) if is_late else [Lane.cpu() for _ in range(num_lanes)]
    return wrap_model_to_roundpipe(model, lanes=lanes, **kwargs)


def parts(model):
    """Return, by name, the number of layers of a RoundPipe, or the class name of a module."""
    return {
        name: len(child._layers) if isinstance(child, RoundPipe) else type(child).__name__
        for name, child in model._modules.items()
    }


def test_what_is_skipped_is_left_on_the_host():
    row, one = nn.Sequential(linear(), linear()), linear()
    model = Model(row=row, one=one, all=nn.ModuleList([linear(), linear()]), last=linear())
    skipped = [row, one, model.all[0]]
    wrapped = wrap(model, skip_modules=skipped, lower_threshold=LINEAR)
    assert isinstance(wrapped, AutoRoundPipe)
    assert model.row is row and model.one is one  # before all other rules
    assert parts(model) == {"row": "Sequential", "one": "Linear", "all": "ModuleList", "last": 1}
    assert parts(model.all) == {"0": "Linear", "1": 1}
    assert parts(row) == {"0": "Linear", "1": "Linear"}


def test_a_sequential_has_a_layer_a_child_however_small():
    assert len(wrap(nn.Sequential(linear(), linear()))._layers) == 2
    held = Model(inner=Model(row=nn.Sequential(linear(), nn.ReLU(), linear()), one=linear(2)))
    wrap(held, upper_threshold=2 * LINEAR)
    assert parts(held.inner) == {"row": 3, "one": 1}


@pytest.mark.parametrize(
    ("lower", "upper", "is_one"),
    [
        (32, 0, True),  # own weights as large as the lower threshold
        (33, 0, False),
        (33, 32 + LINEAR, True),  # the whole no larger than the upper one
        (33, 31 + LINEAR, False),
    ],
)
def test_thresholds_of_a_single_layer(lower, upper, is_one):
    inner = Whole()
    inner.inside = linear()
    model = Model(inner=inner, other=linear(80))
    wrap(model, lower_threshold=lower, upper_threshold=upper)
    assert isinstance(model.inner, RoundPipe) == is_one
    if not is_one:  # its own forward runs on the host, its children are walked through
        assert parts(inner) == {"inside": 1 if lower <= LINEAR else "Linear"}


def test_elements_of_a_list_hand_micro_batches_on():
    model = Model(layers=nn.ModuleList([linear() for _ in range(4)]))
    asked = {model.layers[1]: RoundPipeRunConfig(merge_output=True)}
    plain = copy.deepcopy(model)
    wrapped = wrap(model, override_config=asked, num_lanes=2)
    merges = [layer._run_config.merge_output for layer in model.layers]
    assert merges == [False, True, False, None]
    batch = torch.randn(7, 8)
    handed = []
    model.layers[0].register_forward_hook(lambda *each: handed.append(each[2]))
    output = wrapped(batch)
    assert [len(each) for each in handed[0]] == [3, 2, 2]
    torch.testing.assert_close(output, plain(batch))


def test_presets_and_the_lack_of_them(capsys):
    with pytest.raises(NotImplementedError, match="no preset: Model is not a model of"):
        wrap(Model(one=linear()), use_sequential_preset=True)
    model = transformers.LlamaForCausalLM(tiny_config("llama"))
    config = RoundPipeRunConfig(recompute_grain="layer")
    engine = wrap(model, override_config={model: config})
    assert isinstance(engine, RoundPipe) and len(engine._layers) == 6
    assert engine._run_config.recompute_grain == "layer"
    assert "LlamaForCausalLM streams as 6 layers" in capsys.readouterr().err
    assert wrap(engine) is engine
    assert isinstance(wrap(model, use_sequential_preset=False), AutoRoundPipe)


@pytest.mark.parametrize("family", ["gpt2"])
def test_a_model_of_transformers_wrapped_part_by_part_trains_as_it_is(family):
    torch.manual_seed(3)
    config = tiny_config(family, tied=True)
    plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model = copy.deepcopy(plain)
    batch = join_micro_batches(tiny_micro_batches(family))
    auto = wrap(
        model, use_sequential_preset=False, lower_threshold=4096, num_lanes=2, upper_threshold=None
    )
    # the loss is the model's over the whole batch, not a mean of micro-batches' means
    assert model.loss_function.func._run_config.num_microbatch == 1
    assert not hasattr(model.base_model, "_loss_function")  # it has none to call
    assert list(auto.state_dict()) == list(plain.state_dict())
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in auto.optim_named_parameters()] == names  # the tied one once
    ours = torch.optim.SGD(auto.optim_parameters(), lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        output, expected = auto(**batch), plain(**batch)
        torch.testing.assert_close(output.loss, expected.loss)
        torch.testing.assert_close(output.logits, expected.logits)
        output.loss.backward()
        expected.loss.backward()
        auto.synchronize()
        for one, other in zip(auto.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        auto.step(ours.step, is_async=False)
        theirs.step()
        theirs.zero_grad()
    for one, other in zip(auto.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="use_cache: a model that streams"):
        auto(**batch, use_cache=True)


def test_a_vision_language_model_keeps_no_cache_of_micro_batches():
    """Its forward names no use_cache, and hands it on among other keywords."""
    model = tiny_whole("llava", dtype=torch.float64)
    plain, ids = copy.deepcopy(model), torch.arange(9, 37).view(4, 7)
    auto = wrap(model, use_sequential_preset=False, lower_threshold=512, upper_threshold=None)
    made = auto(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(made, plain(input_ids=ids).logits)


class Tied(nn.Module):
    """A weight on the host, two parts that share one, and one part more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second, self.row = linear(), linear(), nn.Sequential(linear(), nn.Tanh())
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, value):
        return self.row(self.second(self.first(value)) * self.gain)


@pytest.mark.parametrize(("is_async", "is_late"), [(False, False), (True, True)])
def test_all_parts_have_one_step(is_async, is_late):
    plain, model = Tied(), Tied()
    auto = wrap(model, upper_threshold=LINEAR, num_lanes=2, is_late=is_late)
    assert parts(model) == {"first": 1, "second": 1, "row": 2}
    optimizer = torch.optim.Adam(auto.optim_parameters(), lr=0.05)
    reference = torch.optim.Adam(plain.parameters(), lr=0.05)
    stale = copy.deepcopy(plain)  # V of V_(t+1) = W_t
    for number in range(4):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        for _ in range(2):  # sums over two calls
            loss, expected = auto(batch).square().sum(), stale(batch).square().sum()
            torch.testing.assert_close(loss, expected)
            loss.backward()
            expected.backward()
        auto.step(optimizer.step, is_async=is_async)
        before = copy.deepcopy(plain.state_dict())
        for one, other in zip(plain.parameters(), stale.parameters(), strict=True):
            one.grad, other.grad = other.grad, None
        reference.step()
        stale.load_state_dict(before if is_async else plain.state_dict())
    auto.synchronize()
    assert all(parameter.grad is None for parameter in auto.parameters())
    for (name, one), other in zip(auto.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert model.first.weight is model.second.weight


def test_the_program_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "roundpipe.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(program, {})
