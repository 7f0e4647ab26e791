"""A model runs by its device_map on several devices: on fake ones, whose tensors do not mix.

Fake tensors have no values. That answers are equal is tested in test_generate_vision.py, with
layers on disk; what needs true GPUs (speed, memory, kernels) is shown by neither.
"""

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from stageline.inference.model_cutter import ModelCutter
from tests.helpers.fake_devices import fake_devices
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_mllama import mllama_micro_batch
from tests.helpers.tiny_models import tiny_config, tiny_mllama_config

FAMILIES = ("llama", "internvl", "qwen2_5_vl", "mllama")
LENGTH = 14


def build(family, **fields):
    config = tiny_mllama_config(**fields) if family == "mllama" else tiny_config(family, **fields)
    kind = auto_class("llama" if family == "llama" else "internvl")
    return kind.from_config(config).eval()


def micro_batch(family):
    if family == "mllama":
        batch = mllama_micro_batch((2, 1), length=LENGTH, dtype=torch.float32)
    else:
        batch = tiny_micro_batches(family, lengths=(LENGTH,))[0]
    del batch["labels"]
    if family == "qwen2_5_vl":  # its tower reads sizes of images; fake tensors have no values
        kept = ("input_ids", "attention_mask")
        batch = {name: value for name, value in batch.items() if name in kept}
    return batch


def answer_of(model, inputs):
    """The output with its cache; skips where an older transformers reads values of fake tensors."""
    try:
        return model(**inputs, use_cache=True)
    except GuardOnDataDependentSymNode as error:
        pytest.skip(
            f"{type(model).__name__} reads a value, and fake tensors have none: {error}"[:200]
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_operation_mixes_devices(family):
    model, batch = build(family), micro_batch(family)
    device_map = ModelCutter(model, num_devices=3).device_map()
    with fake_devices() as devices:
        devices.dispatch(model, device_map)
        inputs = {name: devices.move(value, 0) for name, value in batch.items()}
        output = answer_of(model, inputs)
        assert output.logits.device == devices.device(0)
        # the pass takes one more token, as generation does
        more = {
            "input_ids": inputs["input_ids"][:, :1],
            "attention_mask": torch.ones(2, LENGTH + 1, dtype=torch.long, device=devices.device(0)),
        }
        again = model(**more, past_key_values=output.past_key_values, use_cache=True)
        assert again.logits.shape[1] == 1
        cached = {layer.keys.device.index for layer in output.past_key_values.layers}
    assert cached == {0, 1, 2}


def test_deepstack_features_reach_layers_on_other_devices():
    model = build("qwen3_vl")
    count = len(model.config.vision_config.deepstack_visual_indexes)
    device_map = ModelCutter(model, num_devices=3).device_map()
    assert device_map["model.language_model.layers.1"] == 1
    is_image_BT = torch.arange(LENGTH).expand(2, -1) < 4
    with fake_devices() as devices:
        devices.dispatch(model, device_map)
        output = model.model.language_model(
            inputs_embeds=devices.move(torch.ones(2, LENGTH, 16), 0),
            position_ids=devices.move(torch.arange(LENGTH).expand(3, 2, -1), 0),
            visual_pos_masks=devices.move(is_image_BT, 0),
            deepstack_visual_embeds=[devices.move(torch.ones(8, 16), 0)] * count,
        )
        assert output.last_hidden_state.device == devices.device(0)


def test_a_wrong_map_is_found():
    model, batch = build("llava"), micro_batch("llava")
    device_map = ModelCutter(model, num_devices=2).device_map()
    with fake_devices() as devices:
        devices.dispatch(model, device_map)
        inputs = {name: devices.move(value, 0) for name, value in batch.items()}
        layer = model.model.language_model.layers[1]
        layer.mlp.up_proj._parameters["weight"] = devices.move(torch.ones(24, 16), 0)
        inner = [m for m in layer.modules() if hasattr(m, "_hf_hook")]
        assert inner, "accelerate hooks the layer"
        with pytest.raises(RuntimeError, match="same device|different devices"):
            model(**inputs)
