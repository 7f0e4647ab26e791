"""The device_map: every layer once, no device empty, the last layer with the first."""

import itertools

import pytest
import torch
import transformers

from stageline.inference.model_cutter import ModelCutter, layer_devices
from stageline.planner.estimate import layers_path
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import TYPICAL, tiny_config, tiny_mllama_config

RATIOS = (0.0, 0.25, 0.5, 1.0, 1.5, 3.0)
BY_BYTES = None


def counts_of(devices):
    return [devices.count(device) for device in range(max(devices) + 1)]


def test_layers_are_covered_evenly_for_any_numbers():
    for num_layers, num_devices, ratio in itertools.product(range(1, 21), range(1, 9), RATIOS):
        devices = layer_devices(num_layers, num_devices, visual_gpu_ratio=ratio)
        counts = counts_of(devices)
        assert sum(counts) == num_layers == len(devices)
        assert devices[0] == devices[-1] == 0
        if num_layers > num_devices:
            assert len(counts) == num_devices and min(counts) >= 1
        if len(counts) > 1:
            assert max(counts[1:]) - min(counts[1:]) <= 1
        middle = devices[:-1]
        assert middle == sorted(middle), "each device has one run of layers"


def test_the_tower_takes_layers_off_device_0():
    assert counts_of(layer_devices(32, 4)) == [8, 8, 8, 8]
    assert counts_of(layer_devices(28, 4, visual_gpu_ratio=0.5)) == [4, 8, 8, 8]


def whole(family):
    with torch.device("meta"):
        if family == "mllama":
            return transformers.AutoModelForImageTextToText.from_config(tiny_mllama_config())
        return auto_class(family).from_config(tiny_config(family, tied=True))


@pytest.mark.parametrize("family", (*TYPICAL, "qwen3_vl", "mllama"))
@pytest.mark.parametrize("num_devices", [1, 3])
def test_every_tensor_has_one_device(family, num_devices):
    model = whole(family)
    for ratio in (*RATIOS, BY_BYTES):
        cutter = ModelCutter(model, num_devices=num_devices, visual_gpu_ratio=ratio)
        placed = cutter.device_map()
        assert set(placed.values()) == set(range(num_devices))
        # transformers reads a device_map like this: the longest matching name wins
        for name, _ in [*model.named_parameters(), *model.named_buffers()]:
            assert sum(name == key or name.startswith(key + ".") for key in placed) == 1, name
        tensors = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
        assert placed.keys() <= tensors | dict(model.named_modules()).keys(), "no phantoms"
        layers = layers_path(model)
        devices = [placed[f"{layers}.{i}"] for i in range(len(model.get_submodule(layers)))]
        assert devices[0] == devices[-1] == 0
        others = {key: device for key, device in placed.items() if not key.startswith(layers + ".")}
        assert set(others.values()) == {0}, "all but layers is on device 0"
