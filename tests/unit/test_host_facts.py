"""Facts of a micro-batch that stages read on the host: masks left out, positions, no waits.

The reference is transformers' whole model with its mask, in float64.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, masking_utils

from commands.train_parts import host_facts
from pp_models import CausalLMStage, stage_class_of
from stageline.data.batches.loader import MicroBatchLoader
from stageline.shrink import shrink_config
from stageline.stages.packing import known_rows, row_lengths
from stageline.training.reference import mixed_batch
from stageline.verify.batches import draw_text, loss_of, run_chain, with_facts
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config


def rows_of(*masks, labels=None):
    mask = torch.tensor(masks)
    ids = torch.arange(mask.numel()).view(mask.shape) + 3
    known = torch.where(mask.bool(), ids, -100) if labels is None else torch.tensor(labels)
    return {"input_ids": ids, "attention_mask": mask, "labels": known}


def test_only_rows_that_are_padded_on_the_right_have_lengths():
    found = row_lengths(rows_of([1, 1, 1], [1, 0, 0]))
    assert found["row_lengths"].tolist() == [3, 1]
    assert row_lengths(rows_of([0, 1, 1], [1, 1, 1])) == {}  # it is padded on the left side
    assert row_lengths(rows_of([1, 0, 1], [1, 1, 1])) == {}  # a hole
    assert row_lengths(rows_of([1, 1, 1], [0, 0, 0])) == {}  # nothing to see at all
    assert row_lengths(rows_of([1, 2, 0])) == {}  # no mask of zeros and ones
    assert row_lengths(rows_of([1, 1, 0], labels=[[5, 6, 7]])) == {}  # padding has labels
    packed = {**rows_of([1, 1, 1]), "sample_ids": torch.tensor([[0, 0, 1]])}
    assert row_lengths(packed) == {}


class Kernel:
    """A counter in front of torch's attention and of transformers' look at a mask."""

    def __init__(self, monkeypatch):
        self.masks, self.looks = [], 0
        attention, look = functional.scaled_dot_product_attention, masking_utils.fast_all

        def seen(*args, attn_mask=None, **kwargs):
            self.masks.append(attn_mask)
            return attention(*args, attn_mask=attn_mask, **kwargs)

        def looked(mask):
            self.looks += 1
            return look(mask)

        monkeypatch.setattr(functional, "scaled_dot_product_attention", seen)
        monkeypatch.setattr(masking_utils, "fast_all", looked)


# alibi, and positions made from the mask; windows; linear attention states; a plain one
@pytest.mark.parametrize("family", ["llama", "bloom", "opt", "mistral", "olmo_hybrid"])
def test_the_loss_and_all_gradients_are_those_of_the_model_with_its_mask(family, monkeypatch):
    torch.manual_seed(0)
    config = shrink_config(family_config(family), num_layers=4)
    config.tie_word_embeddings = False  # a tied weight's gradient would be the sum of two stages
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    batch = draw_text(config, 11, 4, generator=torch.Generator().manual_seed(1))
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    expected = loss_of(whole(**inputs, use_cache=False).logits, batch)
    expected.backward()
    stages = [
        CausalLMStage(config, stage=stage, num_stages=2, dtype=torch.float64).to_empty(device="cpu")
        for stage in range(2)
    ]
    values = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    for stage in stages:
        for name, value in (*stage.named_parameters(), *stage.named_buffers()):
            value.data.copy_(values[name])
    kernel = Kernel(monkeypatch)
    stages = [stage.train() for stage in stages]
    (loss,) = run_chain(stages, with_facts(stages, [batch]), loss_fn=loss_of)
    assert kernel.looks == 0, "somebody asked the device whether there is padding"
    # bloom has attention of its own; a window shorter than the row is a mask without padding
    assert family in ("bloom", "mistral") or None in kernel.masks
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    gradients = dict[str, torch.Tensor]()
    for stage in stages:
        for name, value in stage.named_parameters():
            if value.grad is not None:
                gradients[name] = gradients.get(name, 0) + value.grad
    for name, value in whole.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(gradients[name], value.grad, rtol=1e-9, atol=1e-12)


def mask_of(batch, mask, **changes):
    """Return the mask that transformers makes for sdpa, in a pass with `batch`."""
    config = tiny_config("gemma3")
    config._attn_implementation = "sdpa"
    make = changes.pop("make", masking_utils.create_causal_mask)
    given = {"inputs_embeds": torch.zeros(*mask.shape, 4), "past_key_values": None, **changes}
    with known_rows(batch):
        return make(config, attention_mask=mask, **given)


def test_a_mask_stays_where_it_says_more_than_the_future():
    batch = rows_of([1] * 12, [1] * 7 + [0] * 5)
    told = {**batch, **row_lengths(batch)}
    mask = batch["attention_mask"]
    assert mask_of(told, mask) is None
    assert mask_of(batch, mask) is not None  # the batch does not tell how its rows are padded
    window = mask_of(told, mask, make=masking_utils.create_sliding_window_causal_mask)
    assert torch.equal(window[0], window[1])  # a window, and no padding
    for changes in (
        {"make": masking_utils.create_bidirectional_mask},
        {"block_sequence_ids": torch.zeros(2, 12, dtype=torch.long)},
        {"or_mask_function": lambda b, h, q, k: k < 3},
    ):
        plain = mask_of(batch, mask, **changes)
        assert torch.equal(mask_of(told, mask, **changes), plain), changes
        assert not plain[1, 0, 0, 8], "the padding is hidden"
    other = mask.clone()
    other[0, 2] = 0  # the model hides a token of its own: another mask of the same shape
    assert torch.equal(mask_of(told, other), mask_of(batch, other))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_positions_of_pictures_are_made_once_on_the_host(family, monkeypatch):
    config = tiny_config(family)
    stage = stage_class_of(config.model_type)(config, stage=1, num_stages=2)
    base, calls = type(stage.whole.base_model), []
    plain = base.get_rope_index

    def counted(self, *args, **kwargs):
        calls.append(self)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(base, "get_rope_index", counted)
    batch = tiny_micro_batches(family)[0]
    batch = {name: value for name, value in batch.items() if not name.startswith("pixel")}
    before = stage.whole.base_model.rope_deltas
    facts = stage.host_facts(batch)
    assert len(calls) == 1 and calls[0] is not stage.whole.base_model
    assert stage.whole.base_model.rope_deltas is before  # nothing of it stays behind
    alone, _ = plain(
        stage.whole.base_model,
        batch["input_ids"],
        mm_token_type_ids=batch["mm_token_type_ids"],
        image_grid_thw=batch["image_grid_thw"],
        attention_mask=batch["attention_mask"],
    )
    assert torch.equal(facts["position_ids"], alone)
    text = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert "position_ids" not in stage.host_facts(text)


def test_rows_with_other_answers_do_not_keep_what_was_read_of_the_own():
    batch = rows_of([1, 1, 0])
    batch |= {"position_ids": torch.zeros(3, 1, 3), **row_lengths(batch)}
    batch |= {f"loss_kl_{name}": value for name, value in rows_of([1, 1, 1, 1]).items()}
    assert set(mixed_batch(batch)) == {"input_ids", "attention_mask", "labels"}


def test_a_run_makes_them_where_micro_batches_are_made():
    def collate(samples):
        masks = [[1] * sample["n"] + [0] * (4 - sample["n"]) for _, sample in samples]
        return rows_of(*masks)

    dataset = [(None, {"n": length}) for length in (4, 2, 3, 1)]
    told = {"collate": collate, "batch_size": 4, "micro_batch_size": 2, "shuffle": False}
    loader = MicroBatchLoader(dataset, **told, facts=row_lengths)
    found = [batch["row_lengths"].tolist() for batch in next(iter(loader))]
    assert sorted(sum(found, [])) == [1, 2, 3, 4]
    stage = CausalLMStage(tiny_config("llama"), stage=0, num_stages=2)
    runner = SimpleNamespace(local=SimpleNamespace(models=[stage]))
    assert host_facts(runner) == stage.host_facts
