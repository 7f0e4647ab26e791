"""Packed rows against single samples: loss, gradients, and no token sees another sample.

The reference is transformers' whole model on one sample at a time, without padding.
"""

import pytest
import torch
from transformers import AutoConfig

from loss_fn import sft
from pp_models import class_of_key
from stageline.checkpoint.load import load_split_model
from stageline.data.batches.batch import count_samples, pack_rows
from stageline.data.text.encode import Encoded
from stageline.errors import UserError
from tests.helpers.tiny_batches import FIRST_TEXT_ID, count_targets, tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import (
    DECODERS,
    IMAGE_TOKEN_ID,
    TYPICAL,
    TYPICAL_VISION,
    VISION_LANGUAGE,
    VOCAB_SIZE,
    tiny_config,
)

# longer than the sliding window of 8, one token, padding; those above 8 hold a picture, where the
# family knows any: more pictures than rows
ROWS = ((11, 5, 9), (13,), (4, 1, 12))
FAMILIES = DECODERS + VISION_LANGUAGE
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
TYPE_INPUTS = {family: "mm_token_type_ids" for family in VISION_LANGUAGE if "qwen" in family}
TYPE_INPUTS["gemma3_vl"] = "token_type_ids"
ROUNDED_INSIDE = 1e-6  # eager attention and Gemma's norms compute in float32 whatever comes in


def stage_class(family):
    return class_of_key(family)


def config_of(config, dtype, attention=None):
    if dtype == torch.float64:  # grouped products of experts know no float64
        config._experts_implementation = "eager"
    if attention:
        config._attn_implementation = attention
    return config


def samples_of(family, dtype=torch.float32):
    """Return rows of single samples, each a micro-batch of one row without padding."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number, lengths in enumerate(ROWS):
        rows.append([])
        for place, length in enumerate(lengths):
            seed = 10 * number + place
            if family in VISION_LANGUAGE and length > 8:
                batch = tiny_micro_batches(family, lengths=(length,), seed=seed, dtype=dtype)[0]
                # the first row; the second one is padded
                batch = {name: value[: len(value) // 2] for name, value in batch.items()}
            else:
                shape = (1, length)
                ids = torch.randint(FIRST_TEXT_ID, VOCAB_SIZE, shape, generator=generator)
                labels = torch.where(torch.rand(shape, generator=generator) < 0.6, ids, -100)
                # the first token is never predicted, neither packed nor single
                labels[:, 0] = ids[:, 0]
                batch = {"input_ids": ids, "labels": labels}
                batch["attention_mask"] = torch.ones_like(ids)
                if family in TYPE_INPUTS:
                    batch[TYPE_INPUTS[family]] = torch.zeros_like(ids)
            rows[-1].append(batch)
    return rows


def packed_of(rows):
    """Return the same samples as one packed micro-batch, by `pack_rows`."""
    encoded = [
        [
            Encoded(ids := sample["input_ids"][0].tolist(), is_target, [False] * len(ids))
            for sample in row
            for is_target in [(sample["labels"][0] != -100).tolist()]
        ]
        for row in rows
    ]
    packed = pack_rows(encoded, pad_token_id=0)
    flat = [sample for row in rows for sample in row]
    for name in ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"):
        found = [sample[name] for sample in flat if name in sample]
        if found:
            packed[name] = torch.cat(found)
    for name in set(TYPE_INPUTS.values()) & set(flat[0]):
        packed[name] = (packed["input_ids"] == IMAGE_TOKEN_ID).long()
    return packed


def whole_model(family, folder, dtype, attention=None):
    torch.manual_seed(3)
    config = config_of(tiny_config(family), dtype)
    kwargs = {"attn_implementation": attention} if attention else {}
    whole = auto_class(family).from_config(config, dtype=dtype, **kwargs)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    whole.save_pretrained(folder)
    return whole.train()


def build_stages(family, folder, dtype, attention=None, num_stages=2):
    stages = []
    for stage in range(num_stages):
        config = config_of(AutoConfig.from_pretrained(folder), dtype)
        model = stage_class(family)(
            config, stage=stage, num_stages=num_stages, dtype=dtype, attn_implementation=attention
        )
        load_split_model(model, folder, device="cpu", dtype=dtype)
        stages.append(model.train())
    return stages


def chain(stages, batch):
    """Return the logits of the stages, chained as the runner feeds them."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    output = batch["input_ids"]
    for stage in stages:
        if not stage.is_first:
            inputs = {name: value for name, value in inputs.items() if "pixel" not in name}
        output = stage(*(output if isinstance(output, tuple) else (output,)), **inputs)
    return output


def compare(family, folder, dtype, attention=None):
    whole = whole_model(family, folder, dtype, attention)
    rows = samples_of(family, dtype)
    flat = [sample for row in rows for sample in row]
    count = torch.tensor(float(count_targets(flat)), dtype=dtype)
    expected = torch.zeros((), dtype=dtype)
    for sample in flat:
        labels = sample["labels"].clone()
        logits = whole(**{k: v for k, v in sample.items() if k != "labels"}, use_cache=False).logits
        share = sft(logits, {"labels": labels}, num_targets=count)
        share.backward()
        expected += share.detach()
    stages = build_stages(family, folder, dtype, attention)
    packed = packed_of(rows)
    assert count_targets([packed]) == int(count) and count_samples(packed) == 6
    loss = sft(chain(stages, packed), packed, num_targets=count)
    loss.backward()
    is_rounded = attention == "eager" or family.startswith("gemma")
    tolerance = max(TOLERANCE[dtype], ROUNDED_INSIDE if is_rounded else 0.0)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    grads = {}
    for stage in stages:
        grads.update({n: p.grad for n, p in stage.named_parameters() if p.grad is not None})
    reference = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert set(grads) == set(reference)
    for name, grad in reference.items():
        difference = (grads[name] - grad).abs().max().item()
        assert difference <= tolerance * max(1.0, grad.abs().max().item()), name


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float64) for family in FAMILIES),
        *((family, torch.float32) for family in ("mixtral", "gemma3_vl")),
    ],
    ids=str,
)
def test_two_stages_on_packed_rows_equal_the_samples_alone(family, dtype, tmp_path):
    compare(family, tmp_path, dtype)


@pytest.mark.parametrize("family", ["mistral", "qwen2_5_vl"])
def test_eager_attention_too(family, tmp_path):
    compare(family, tmp_path, torch.float64, "eager")


def test_flex_attention_has_no_mask_to_cut_a_window_out_of(tmp_path):
    whole_model("gemma3_vl", tmp_path, torch.float32)
    stages = build_stages("gemma3_vl", tmp_path, torch.float32, "flex_attention", num_stages=1)
    with pytest.raises(UserError, match="attention flex.*--attention sdpa"):
        chain(stages, packed_of(samples_of("gemma3_vl")))


@pytest.mark.parametrize("family", TYPICAL)
def test_no_token_sees_another_sample(family, tmp_path):
    """Every text token of the middle sample is changed: its neighbours' logits keep each bit."""
    whole_model(family, tmp_path, torch.float32)
    stages = build_stages(family, tmp_path, torch.float32)
    texts = [sample for row in samples_of(family) for sample in row if "pixel_values" not in sample]
    rows = [texts[:3] + texts[:1]] * 2
    packed = packed_of(rows)
    changed = {name: value.clone() for name, value in packed.items()}
    middle = (packed["sample_ids"] == 1) & (torch.arange(2)[:, None] == 0)
    changed["input_ids"][middle] = 9 + (packed["input_ids"][middle] - 9 + 7) % (VOCAB_SIZE - 9)
    with torch.no_grad():
        before, after = (chain(stages, batch) for batch in (packed, changed))
    assert not torch.equal(before[middle], after[middle])
    if family == "mixtral":  # experts get other numbers of tokens: rounding
        torch.testing.assert_close(before[~middle], after[~middle], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(before[~middle], after[~middle])


@pytest.mark.parametrize("family", TYPICAL_VISION)
def test_no_token_sees_the_picture_of_another_sample(family, tmp_path):
    whole_model(family, tmp_path, torch.float32)
    stages = build_stages(family, tmp_path, torch.float32)
    packed = packed_of(samples_of(family))
    first = (packed["sample_ids"] == 0) & (torch.arange(len(ROWS))[:, None] == 0)
    changed = {name: value.clone() for name, value in packed.items()}
    num_images = sum(length > 8 for row in ROWS for length in row)
    changed["pixel_values"][: len(packed["pixel_values"]) // num_images] += 0.5
    with torch.no_grad():
        before, after = (chain(stages, batch) for batch in (packed, changed))
    assert not torch.equal(before[first], after[first])
    assert torch.equal(before[~first], after[~first])


def test_a_packed_batch_is_what_it_says():
    first = Encoded([11, 12, 13], [True, False, True], [False] * 3)
    second = Encoded([21, 22], [True, True], [False] * 2)
    batch = pack_rows([[first, second], []], pad_token_id=7, multiple_of=4, max_width=7)
    assert batch["input_ids"].tolist() == [[11, 12, 13, 21, 22, 7, 7], [7] * 7]
    assert batch["labels"].tolist() == [[-100, -100, 13, -100, 22, -100, -100], [-100] * 7]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0], [0] * 7]
    assert batch["sample_ids"].tolist() == [[0, 0, 0, 1, 1, -1, -1], [-1] * 7]
    assert batch["attention_mask"].tolist() == [[1] * 5 + [0] * 2, [0] * 7]
    assert count_samples(batch) == 2
    assert pack_rows([[]], pad_token_id=7)["input_ids"].tolist() == [[7, 7]]


@pytest.mark.parametrize("family", ["mistral", "qwen2_5_vl"])
def test_a_row_of_padding_weighs_nothing(family, tmp_path):
    whole_model(family, tmp_path, torch.float32)
    stages = build_stages(family, tmp_path, torch.float32)
    empty = pack_rows([[]], pad_token_id=0)
    if family == "qwen2_5_vl":
        empty["mm_token_type_ids"] = torch.zeros_like(empty["input_ids"])
    loss = sft(chain(stages, empty), empty, num_targets=torch.tensor(3.0))
    loss.backward()
    assert loss.item() == 0.0
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is None or not parameter.grad.any(), name
