"""A random start: independent of the number of stages, whole, and the model's own."""

import pytest
import torch
from torch import nn

from pp_models import class_of_key
from stageline.checkpoint import init
from stageline.checkpoint.init import init_split_model
from stageline.errors import UserError
from stageline.modules.stage_names import names_on_disk
from tests.helpers.tiny_checkpoints import OwnStage, auto_class
from tests.helpers.tiny_models import DECODERS, TYPICAL, VISION_LANGUAGE, tiny_config


def start(family, *, stage=0, num_stages=1, tied=False, seed=3, **kwargs):
    stage_class = class_of_key(family)
    dtype = kwargs.get("dtype", torch.float32)
    config = tiny_config(family, tied=tied)
    model = stage_class(config, stage=stage, num_stages=num_stages, **kwargs)
    init_split_model(model, seed=seed, device="cpu", dtype=dtype)
    return model


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, False) for family in TYPICAL), ("llama", True), ("gpt2", True)]
)
def test_independent_of_the_number_of_stages(family, tied):
    one = start(family, tied=tied).state_dict()
    for num_stages in (4,) if tied else (2, 4):
        seen = {}
        for stage in range(num_stages):
            model = start(family, stage=stage, num_stages=num_stages, tied=tied)
            for name, tensor in model.state_dict().items():
                # a tied weight is on the first and the last stage, and the same
                assert torch.equal(tensor, seen.setdefault(name, tensor)), name
        assert set(seen) == set(one)
        for name, tensor in seen.items():
            assert torch.equal(tensor, one[name]), name


@pytest.mark.parametrize("family", DECODERS + VISION_LANGUAGE)
def test_buffers_constants_and_spread_are_the_librarys(family):
    torch.manual_seed(0)
    whole = auto_class(family).from_config(tiny_config(family))
    model = start(family)
    buffers = dict(whole.named_buffers())
    assert dict(model.named_buffers()).keys() == buffers.keys()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    parameters = dict(model.named_parameters())
    for name, expected in whole.named_parameters():
        if (expected == expected.view(-1)[0]).all():  # a norm or a bias, set to a constant
            assert torch.equal(parameters[name], expected), name
        elif expected.numel() >= 128:
            ratio = parameters[name].std() / expected.std()
            assert 0.7 < ratio < 1.4, name


def test_the_host_draws_whatever_the_device(monkeypatch):
    drawn = {}

    def check(model, source):
        drawn.update((name, value.clone()) for name, value in model.state_dict().items())

    monkeypatch.setattr(init, "check_filled", check)
    model = class_of_key("llama")(tiny_config("llama"), stage=0, num_stages=1)
    init_split_model(model, seed=3, device="meta", dtype=torch.float32)
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    assert drawn
    for name, value in start("llama").state_dict().items():
        assert torch.equal(drawn[name], value), name


def test_the_global_generator_is_left_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    start("llama")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", ["gpt2"])
def test_lora_changes_nothing_of_the_base(family):
    plain = start(family).state_dict()
    wrapped = start(family, llm_lora_num=1)
    key_map = names_on_disk(wrapped)
    state = wrapped.state_dict()
    assert len(key_map) == len(plain) < len(state)
    for name, there in key_map.items():
        assert torch.equal(state[name], plain[there]), name


def test_own_modules_start_by_reset_parameters():
    options = {"seed": 0, "device": "cpu", "dtype": torch.float32}
    one = OwnStage(None, stage=0, num_stages=1)
    init_split_model(one, **options)
    for stage in range(2):
        split = OwnStage(None, stage=stage, num_stages=2)
        init_split_model(split, **options)
        for name, tensor in split.state_dict().items():
            assert torch.equal(tensor, one.state_dict()[name])


def test_a_parameter_without_a_start_is_named():
    model = OwnStage(None, stage=0, num_stages=1)
    model.gate = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(UserError, match="1 tensors have no value.*gate"):
        init_split_model(model, seed=0, device="cpu", dtype=torch.float32)
