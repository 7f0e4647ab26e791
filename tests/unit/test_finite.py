"""Weights that are not finite are refused by name."""

import math

import pytest
import torch

from stageline.checkpoint.init import check_finite, is_finite
from stageline.errors import NonFiniteError

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_one_bad_value_is_found(dtype, bad):
    tensor = torch.ones(4, 300)
    assert is_finite(tensor.to(dtype))
    tensor[2, 7] = bad
    if dtype != torch.float8_e4m3fn or math.isnan(bad):  # that type has no inf
        assert not is_finite(tensor.to(dtype))


def test_infinities_of_both_signs_do_not_cancel():
    assert not is_finite(torch.tensor([math.inf, -math.inf]))


@pytest.mark.parametrize("dtype", TYPES[:4], ids=str)
def test_a_sum_that_overflows_is_no_fault(dtype):
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full((100,), largest, dtype=dtype))


def test_what_is_no_floating_tensor_passes():
    assert is_finite(torch.arange(3)) and is_finite(torch.empty(3, device="meta"))
    assert is_finite(torch.empty(0))


def test_c18_names_tensors_and_places():
    tensors = {"good": torch.ones(3), **{name: torch.full((2,), math.nan) for name in "abcde"}}
    tensors["b"] = torch.tensor([math.inf, 1.0])
    with pytest.raises(NonFiniteError) as error:
        named, place_of = tensors.items(), lambda name: f"{name}.file: "
        check_finite(named, what="weights of step 200", cure="Do this.", place_of=place_of)
    text = str(error.value)
    for word in ("weights of step 200", "a (a.file: 2 nan, 0 inf of 2 values)", "Do this."):
        assert word in text
    assert "b (b.file: 0 nan, 1 inf of 2 values)" in text and "and 2 more tensors" in text
    assert "good" not in text
    check_finite({"good": torch.ones(3)}.items(), what="", cure="")
