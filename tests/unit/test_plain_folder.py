"""Folders made for engines that read only plain folders."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stageline.checkpoint import plain_folder as module
from stageline.checkpoint.plain_folder import export_folder, plain_folder
from tests.helpers.tiny_checkpoints import tiny_whole

IDS = torch.tensor([[9, 12, 33, 5]])


@pytest.fixture
def base(tmp_path):
    tiny_whole("llama", tmp_path / "base")
    return tmp_path / "base"


def make_adapter(base, path, *, scale):
    """Return an adapter by peft itself."""
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    torch.manual_seed(4)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * scale)
        logits = adapted.eval()(input_ids=IDS).logits
    adapted.save_pretrained(path)
    return logits


def logits_of(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


def test_a_plain_folder_is_handed_on_as_it_is(base, tmp_path):
    assert plain_folder(base, cache=tmp_path / "cache") == base
    exported = export_folder(base, tmp_path / "exported").folder
    assert plain_folder(exported, cache=tmp_path / "cache") == exported
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("is_source", [False], ids=["added"])
def test_an_adapter_is_merged_once_and_again_when_it_changes(
    base, tmp_path, is_source, monkeypatch
):
    adapter, cache = tmp_path / "adapter", tmp_path / "cache"
    source, added = (adapter, []) if is_source else (base, [adapter])
    expected = make_adapter(base, adapter, scale=1.0)
    found = plain_folder(source, cache=cache, adapter_paths=added)
    torch.testing.assert_close(logits_of(found), expected, rtol=1e-4, atol=1e-5)
    with monkeypatch.context() as patch:
        patch.delattr(module, "export_folder")  # it must not be needed
        assert plain_folder(source, cache=cache, adapter_paths=added) == found
    changed = make_adapter(base, adapter, scale=2.0)
    again = plain_folder(source, cache=cache, adapter_paths=added)
    assert again != found
    torch.testing.assert_close(logits_of(again), changed, rtol=1e-4, atol=1e-5)


def test_weights_of_adapters_are_part_of_the_name(base, tmp_path):
    make_adapter(base, tmp_path / "adapter", scale=1.0)
    options = {"cache": tmp_path / "cache", "adapter_paths": [tmp_path / "adapter"]}
    half = plain_folder(base, **options, adapter_weights=[0.5])
    assert half != plain_folder(base, **options)
