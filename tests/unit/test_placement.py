"""Layers by bytes: no contiguous cut leaves the fullest device emptier, by trying all of them."""

import itertools

import pytest
import torch
from accelerate.utils import compute_module_sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import UserError
from stageline.inference.model_cutter import ModelCutter, check_fit, device_bytes, place
from stageline.planner.estimate import (
    Cost,
    Load,
    ModelBytes,
    layers_path,
    measure_model,
    model_on_meta,
)
from tests.helpers.tiny_models import TYPICAL, VISION_LANGUAGE, tiny_config

SIZE = st.integers(0, 40)
LAYER = st.builds(Cost, weights=st.integers(1, 40), cache=SIZE, beyond=SIZE, answering=SIZE)
END = st.builds(Cost, weights=SIZE, answering=SIZE)
MODEL = st.builds(ModelBytes, st.lists(LAYER, min_size=1, max_size=8).map(tuple), END, END)
GIB = 1024**3


def fullest(model, devices, memory):
    """Written down once more, from the text of the documentation."""
    fractions = []
    for device, limit in enumerate(memory):
        own = [layer for layer, home in zip(model.layers, devices, strict=True) if home == device]
        lasting = sum(layer.weights + layer.cache + layer.beyond for layer in own)
        peak = max((layer.answering for layer in own), default=0)
        if device == 0:
            lasting += model.ends.weights + model.tower.weights
            peak = max(peak, model.ends.answering, model.tower.answering)
        fractions.append((lasting + peak) / limit)
    return max(fractions)


def every_map(num_layers, num_devices):
    for cuts in itertools.combinations(range(1, num_layers - 1), num_devices - 1):
        places = (0, *cuts, num_layers - 1)
        runs = [[d] * (b - a) for d, (a, b) in enumerate(itertools.pairwise(places))]
        yield [*itertools.chain(*runs), 0]


@settings(max_examples=50, deadline=None)
@given(MODEL, st.lists(st.integers(1, 100), min_size=1, max_size=4))
def test_no_cut_leaves_the_fullest_device_emptier(model, memory):
    devices = place(model, memory)
    num_layers = len(model.layers)
    assert len(devices) == num_layers and devices[0] == devices[-1] == 0
    assert devices[:-1] == sorted(devices[:-1]), "each device has one run of layers"
    used = min(len(memory), max(1, num_layers - 1))
    assert set(devices) == set(range(used)), "no device is empty if there are layers enough"
    best = min(fullest(model, found, memory[:used]) for found in every_map(num_layers, used))
    assert fullest(model, devices, memory[:used]) == pytest.approx(best)


@settings(max_examples=30, deadline=None)
@given(MODEL, st.lists(st.integers(1, 100), min_size=1, max_size=4))
def test_the_table_counts_every_byte_once(model, memory):
    homes = place(model, memory)
    devices, found = homes, device_bytes(model, homes, memory)
    assert sorted(i for item in found for i in item.layers) == list(range(len(model.layers)))
    assert sum(item.cost.weights for item in found) == model.weights
    assert sum(item.cost.cache for item in found) == sum(layer.cache for layer in model.layers)
    assert max(i.fraction for i in found) == pytest.approx(fullest(model, devices, memory))


def model_of_two_gib():
    layer = Cost(weights=GIB // 2, cache=GIB // 4, answering=GIB // 4)
    return ModelBytes((layer,) * 4, ends=Cost(weights=GIB))


def test_what_does_not_fit_is_refused_with_what_is_missing_and_what_helps():
    found = device_bytes(model_of_two_gib(), [0, 1, 1, 0], [2 * GIB, 2 * GIB])
    with pytest.raises(UserError) as caught:
        check_fit(found, asked="2 rows of 64 tokens")
    text = str(caught.value)
    # 2.75 of 1.9 GiB, and 1.75 of 1.9
    assert "0.85 GiB on device 0 is missing" in text and "device 1 is" not in text
    check_fit(device_bytes(model_of_two_gib(), [0, 1, 1, 0], [3 * GIB, 2 * GIB]), asked="")


def test_weights_alone_may_fit():
    found = device_bytes(model_of_two_gib(), [0, 1, 1, 0], [int(2.5 * GIB)] * 2)
    check_fit(found, asked="", without_passes=True)
    with pytest.raises(UserError, match="on device 0 is missing"):
        check_fit(found, asked="")


@pytest.mark.parametrize("family", (*TYPICAL, "qwen3_vl"))
def test_weights_are_those_that_accelerate_counts(family):
    model = model_on_meta(tiny_config(family, tied=family != "gpt_neox"), dtype=torch.bfloat16)
    found = measure_model(model, Load(rows=2, length=16, images=1))
    sizes = compute_module_sizes(model)
    path = layers_path(model)
    assert [layer.weights for layer in found.layers] == [sizes[f"{path}.{i}"] for i in range(4)]
    assert found.weights == sizes[""]
    of_images = [
        name for name in sizes if name.endswith(("visual", "vision_tower", "vision_model"))
    ]
    assert (found.tower.weights > 0) == (family in VISION_LANGUAGE) == bool(of_images)
    if of_images:
        tower = sizes[min(of_images, key=len)]
        assert tower <= found.tower.weights < tower + sizes[""] / 4, "tower and projector"
        assert found.tower.answering > 0


@pytest.mark.parametrize("family", ["mixtral", "internvl"])
def test_a_loaded_model_has_on_each_device_what_the_table_says(family):
    meta = model_on_meta(tiny_config(family), dtype=torch.float32)
    cutter = ModelCutter(meta, num_devices=3, memory=[3 * GIB, GIB, 2 * GIB])
    placed, found = cutter.device_map(), cutter.devices()
    real = type(meta)(tiny_config(family))
    lying = [0, 0, 0]
    for name, tensor in [*real.named_parameters(), *real.named_buffers()]:
        home = next(d for key, d in placed.items() if name == key or name.startswith(key + "."))
        lying[home] += tensor.nbytes
    assert lying == [item.cost.weights for item in found]
    assert [len(item.layers) for item in found] == [2, 1, 1]
