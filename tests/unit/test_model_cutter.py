"""The device_map: every layer once, no device empty, the last layer with the first."""

import itertools

import pytest
import torch

from stageline.errors import UserError
from stageline.inference.model_cutter import ModelCutter, layer_counts, layer_devices
from stageline.testing.tiny_checkpoints import auto_class
from stageline.testing.tiny_models import DECODERS, VISION_LANGUAGE, tiny_config

RATIOS = (0.0, 0.25, 0.5, 1.0, 1.5, 3.0)


def test_layers_are_covered_evenly_for_any_numbers():
    for num_layers, num_devices, ratio in itertools.product(range(1, 41), range(1, 9), RATIOS):
        counts = layer_counts(num_layers, num_devices, visual_gpu_ratio=ratio)
        devices = layer_devices(num_layers, num_devices, visual_gpu_ratio=ratio)
        assert sum(counts) == num_layers == len(devices)
        assert devices[0] == devices[-1] == 0
        assert [devices.count(device) for device in range(len(counts))] == counts
        if num_layers > num_devices:
            assert len(counts) == num_devices and min(counts) >= 1
        if len(counts) > 1:
            assert max(counts[1:]) - min(counts[1:]) <= 1
        middle = devices[:-1]
        assert middle == sorted(middle), "each device has one run of layers"


def test_the_tower_takes_layers_off_device_0():
    assert layer_counts(32, 4) == [8, 8, 8, 8]
    assert layer_counts(28, 4, visual_gpu_ratio=0.5) == [4, 8, 8, 8]
    with pytest.raises(UserError, match="negative"):
        layer_counts(8, 2, visual_gpu_ratio=-1)


@pytest.mark.parametrize("family", DECODERS + VISION_LANGUAGE)
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_every_tensor_has_one_device(family, num_devices):
    with torch.device("meta"):
        model = auto_class(family).from_config(tiny_config(family, tied=True))
    placed = ModelCutter(model, num_devices=num_devices).device_map()
    assert set(placed.values()) == set(range(num_devices))
    # the library's own reading of a device_map: the longest matching name
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        assert sum(name == key or name.startswith(key + ".") for key in placed) == 1, name
