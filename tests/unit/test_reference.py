"""The start model: adapters off is the base to the bit; what is kept in a file; what is refused."""

import pytest
import torch

from pp_models import CausalLMStage
from stageline.checkpoint.files import weights_fingerprint
from stageline.checkpoint.init import init_split_model
from stageline.model_folder import files_fingerprint
from stageline.modules.lora import LoRAWrapper, adapters_off, begun_adapters, trained_besides
from stageline.training.reference import FromTable, _read, _write
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_models import tiny_config

FROZEN = {"frozen_lm_head": True}


def build(family="llama", **options):
    model = CausalLMStage(tiny_config(family), stage=0, num_stages=1, **options)
    init_split_model(model, seed=1, device="cpu", dtype=torch.float32)
    model.frozen()
    return model.eval()


@torch.no_grad()
def train_adapters(model):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter))


@torch.no_grad()
def logits_of(model):
    batch = tiny_micro_batches("llama")[0]
    return model(batch["input_ids"], attention_mask=batch["attention_mask"])


@pytest.mark.parametrize("family", ["gpt2"])
def test_adapters_off_is_the_base_to_the_bit(family):
    base, model = build(family), build(family, llm_lora_num=1, lora_dropout=0.3, **FROZEN)
    before = dict(model.named_modules())
    train_adapters(model)
    assert not torch.equal(logits_of(model), logits_of(base))
    own = logits_of(model)
    with adapters_off([model]):
        assert torch.equal(logits_of(model), logits_of(base))
    assert torch.equal(logits_of(model), own) and dict(model.named_modules()) == before


def test_of_stacked_adapters_the_outermost_alone_goes():
    two = build(llm_lora_num=2, **FROZEN)
    with torch.no_grad():  # the inner one was trained before, by another run
        for name, parameter in two.named_parameters():
            if ".lora_module.lora.lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    start = logits_of(two)
    assert not torch.equal(start, logits_of(build()))
    assert begun_adapters(two) == [] and trained_besides(two) == []
    train_adapters(two)
    assert not torch.equal(logits_of(two), start)
    with adapters_off([two]):
        assert torch.equal(logits_of(two), start)
        assert any(isinstance(module, LoRAWrapper) for module in two.modules())
    assert len(begun_adapters(two)) > 0


def test_what_is_trained_besides_is_found():
    assert trained_besides(build(llm_lora_num=1)) == ["lm_head.weight"]
    assert len(trained_besides(build())) == len(list(build().parameters()))


def test_a_table_gives_rows_in_any_order():
    values = torch.arange(8.0).view(4, 2)
    source = FromTable(values)
    pairs = {"input_ids": torch.zeros(4, 3), "loss_rows": torch.tensor([2, 2, -1, -1])}
    pairs["loss_pairs"] = torch.tensor([0, 0, 1, 1])
    assert [found.tolist() for found in source([pairs], [])] == [[4, 5, 0, 0]]
    single = {"input_ids": torch.zeros(2, 3), "loss_rows": torch.tensor([3, 0])}
    own, mixed = source([single], [single])
    assert own.tolist() == [6, 0] and mixed.tolist() == [7, 1]


def test_a_file_of_another_key_is_not_read(tmp_path):
    path, values = tmp_path / "a" / "t.safetensors", torch.rand(3, 2)
    assert _read(path, "one") is None
    _write(path, values, "one")
    assert torch.equal(_read(path, "one"), values) and _read(path, "two") is None
    assert [file.name for file in path.parent.iterdir()] == ["t.safetensors"]
    path.write_bytes(path.read_bytes()[:-9])
    assert _read(path, "one") is None


def test_other_weights_have_another_fingerprint(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(300_000))
    first = weights_fingerprint(tmp_path)
    assert first == weights_fingerprint(tmp_path) == weights_fingerprint(file)
    content = bytearray(300_000)
    content[-1] = 1
    file.write_bytes(content)
    assert weights_fingerprint(tmp_path) != first


def test_files_that_decide_what_a_model_does_have_a_fingerprint(tmp_path):
    def after(name, text):
        (tmp_path / name).write_text(text)
        return files_fingerprint(tmp_path), files_fingerprint(tmp_path, answers=True)

    first = after("config.json", "1")
    assert after("README.md", "1") == after("model.safetensors", "1") == first
    other = after("generation_config.json", "1")
    assert other[0] == first[0] and other[1] != first[1]
    for name in ("config.json", "adapter_config.json", "tokenizer.json", "chat_template.jinja"):
        assert after(name, "2")[0] != other[0], name
        other = after(name, "2")
