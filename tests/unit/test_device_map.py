"""A model runs by its device_map: on fake devices that do not mix, and loaded by accelerate.

What needs true GPUs is not shown here: speed, memory, and kernels. Fake tensors have no values, so
equal answers are shown with layers on disk, which hooks load when they are called.
"""

import pytest
import torch

from models import generate
from stageline.data.processor import get_tokenizer
from stageline.data.rendered import Piece, Rendered
from stageline.inference.model_cutter import ModelCutter
from stageline.testing.fake_devices import fake_devices
from stageline.testing.tiny_batches import tiny_micro_batches
from stageline.testing.tiny_checkpoints import auto_class
from stageline.testing.tiny_mllama import mllama_micro_batch, tiny_mllama_config
from stageline.testing.tiny_models import VISION_LANGUAGE, tiny_config
from stageline.testing.tiny_tokenizers import tiny_tokenizer

FAMILIES = ("llama", *VISION_LANGUAGE, "mllama")
# their towers read sizes of images from tensors, and fake ones have no values
READS_SIZES = ("llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
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
    if family in READS_SIZES:
        kept = ("input_ids", "attention_mask")
        batch = {name: value for name, value in batch.items() if name in kept}
    return batch


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_devices", [2, 3])
def test_no_operation_mixes_devices(family, num_devices):
    model, batch = build(family), micro_batch(family)
    device_map = ModelCutter(model, num_devices=num_devices).device_map()
    with fake_devices() as devices:
        devices.dispatch(model, device_map)
        inputs = {name: devices.move(value, 0) for name, value in batch.items()}
        output = model(**inputs, use_cache=True)
        assert output.logits.device == devices.device(0)
        # one more token, as generation does it
        more = {
            "input_ids": inputs["input_ids"][:, :1],
            "attention_mask": torch.ones(2, LENGTH + 1, dtype=torch.long, device=devices.device(0)),
        }
        again = model(**more, past_key_values=output.past_key_values, use_cache=True)
        assert again.logits.shape[1] == 1
        cached = {layer.keys.device.index for layer in output.past_key_values.layers}
    assert cached == set(range(num_devices))


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
        with pytest.raises(RuntimeError, match="same device"):
            model(**inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same_with_layers_loaded_by_hooks(family, tmp_path):
    """`cpu` and `disk` in the place of two GPUs: accelerate reads every name of the map."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    model = build(family, vocab_size=len(get_tokenizer(tokenizer)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path / "model")
    device_map = ModelCutter(model, num_devices=2).device_map()
    placed = type(model).from_pretrained(
        tmp_path / "model",
        dtype=torch.float32,
        device_map={key: ("cpu", "disk")[device] for key, device in device_map.items()},
        offload_folder=tmp_path / "offload",
    )
    away = {name for name, p in placed.named_parameters() if p.is_meta}
    assert away and all(".layers." in name for name in away)
    prompts = [
        Rendered((Piece(text, is_user=True),), for_generation=True)
        for text in ("Which digit is this?", "true", "Answer: 7 or not")
    ]
    answers = [
        generate.generate(m, tokenizer, images=[None] * 3, prompts=prompts, max_new_tokens=8)
        for m in (model, placed.eval())
    ]
    assert answers[0] == answers[1]
    assert len({tuple(a["token_ids"]) for a in answers[0]}) > 1
