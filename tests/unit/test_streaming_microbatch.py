"""Values of a call cut into micro-batches and joined again, and how settings are inherited."""

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, sum_reducer

from stageline.streaming.run_config import (
    RoundPipeRunConfig,
    merge_outputs,
    split_inputs,
    split_label,
)


def values(size=6):
    draw = torch.Generator().manual_seed(0)
    tensor = torch.randn(size, 3, generator=draw)
    args = (tensor, [tensor[:, 0], ("word", 7)], {"b": tensor * 2, "a": None})
    kwargs = {"scale": torch.tensor(2.0), "other": torch.ones(size + 1, 2), "flag": True}
    return args, kwargs


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (tuple, list)):
        return type(left) is type(right) and all(map(equal, left, right))
    return left == right


@pytest.mark.parametrize("num_parts", [1, 4])
def test_what_is_cut_comes_back(num_parts):
    args, kwargs = values()
    parts = split_inputs(args, kwargs, None, num_parts)
    assert len(parts) == num_parts
    assert sum(len(part[0]) for part, _ in parts) == 6
    for _, its_kwargs in parts:  # another size, a scalar and anything but a tensor are repeated
        assert its_kwargs["other"] is kwargs["other"] and its_kwargs["flag"] is True
        assert its_kwargs["scale"] is kwargs["scale"]
    for joined in (None, True):
        assert equal(merge_outputs([part for part, _ in parts], joined), args)
    labels = split_label((torch.arange(6), "x"), None, num_parts)
    assert equal(merge_outputs(labels, None), (torch.arange(6), "x"))


def test_a_small_batch_has_fewer_parts_and_no_empty_ones():
    parts = split_inputs((torch.ones(2, 3),), {}, None, 4)
    assert [len(args[0]) for args, _ in parts] == [1, 1]
    assert len(split_inputs((3, "x"), {}, None, 3)) == 3


def test_specs_say_what_is_cut_where():
    tensor = torch.arange(12).reshape(2, 6)
    spec = ((TensorChunkSpec(1), _Replicate()), {"x": TensorChunkSpec(0)})
    parts = split_inputs((tensor, tensor), {"x": torch.arange(6), "y": tensor}, spec, 3)
    for number, (args, kwargs) in enumerate(parts):
        assert torch.equal(args[0], tensor[:, 2 * number : 2 * number + 2])
        assert args[1] is tensor and kwargs["y"] is tensor
        assert kwargs["x"].tolist() == [2 * number, 2 * number + 1]
    out = [(args[0], torch.tensor(2.0), "same") for args, _ in parts]
    joined = merge_outputs(out, (TensorChunkSpec(1), sum_reducer, None))
    assert torch.equal(joined[0], tensor) and joined[1] == 6 and joined[2] == "same"


def test_scalars_are_averaged_and_others_must_be_equal():
    assert merge_outputs([torch.tensor(1.0), torch.tensor(3.0)], None) == 2
    assert merge_outputs([torch.tensor(4), torch.tensor(4)], None) == 4
    with pytest.raises(ValueError, match="'a', 'b'"):
        merge_outputs([("a",), ("b",)], None)


def test_settings_are_inherited():
    call = RoundPipeRunConfig(num_microbatch=3)
    model = RoundPipeRunConfig(num_microbatch=5, recompute_grain="layer", merge_output=False)
    both = call.over(model)
    assert (both.num_microbatch, both.recompute_grain, both.merge_output) == (3, "layer", False)
    filled = RoundPipeRunConfig().filled(num_lanes=2)
    assert (filled.num_microbatch, filled.recompute_grain) == (3, "stage")
    with pytest.raises(ValueError, match="recompute_grain 'block'"):
        RoundPipeRunConfig(recompute_grain="block").filled(1)
    with pytest.raises(ValueError, match="num_microbatch 0"):
        RoundPipeRunConfig(num_microbatch=0).filled(1)


def test_splits_of_another_number_are_refused():
    with pytest.raises(ValueError, match="made 1 labels. Return 3"):
        split_label(5, lambda label, num: [label], 3)
    with pytest.raises(ValueError, match="2 args and 1 kwargs"):
        split_inputs((), {}, lambda *_: ([(), ()], [{}]), 2)
    spec = ((TensorChunkSpec(0),), {})
    with pytest.raises(ValueError, match="the spec of 2 values"):
        split_inputs((torch.ones(2), torch.ones(2)), {}, spec, 2)
