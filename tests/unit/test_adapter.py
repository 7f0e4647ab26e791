"""Adapter folders: `peft` loads Stageline's and computes the same, and Stageline loads `peft`'s."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks import adapter_fields
from commands.decode_run import AnsweringModel
from models.builders import auto
from pp_models import CausalLMStage
from stageline.checkpoint.adapter import attach_adapter, read_adapter, read_adapter_config
from stageline.checkpoint.init import init_split_model
from stageline.checkpoint.layout import verify
from stageline.checkpoint.plain_folder import export_folder
from stageline.checkpoint.save import save_split_model
from stageline.data.text.chat import prepare_chat
from stageline.errors import UserError
from stageline.inference.generation import stop_ids_of, stop_token_ids
from stageline.modules.lora import lora_stacks, merge_lora
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import auto_class, load_stages, shake, tiny_whole
from tests.helpers.tiny_models import TYPICAL, VISION_LANGUAGE, tiny_config, tiny_tokenizer


def save_lora(family, tmp_path, *, tied=False, **kwargs):
    """Return a model folder and an adapter that two stages saved on it."""
    tiny_whole(family, tmp_path / "base", tied=tied)
    lora = {"llm_lora_num": 1, "lora_rank": 3, "lora_alpha": 6.0, **kwargs}
    stages = shake(load_stages(tmp_path / "base", tmp_path / "base", **lora))
    return stages, save_split_model(stages, None, tmp_path / "adapter", step=1)


def base_model(family, tmp_path):
    return auto_class(family).from_pretrained(tmp_path / "base").eval()


@torch.no_grad()
def logits(model, family):
    batch = tiny_micro_batches(family)[0]
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def peft_logits(family, tmp_path, folder):
    model = peft.PeftModel.from_pretrained(base_model(family, tmp_path), folder)
    return logits(model.eval(), family)


@pytest.mark.parametrize("family", TYPICAL)
def test_peft_computes_the_same(family, tmp_path):
    tied = family in ("gpt2", "gemma2", "gemma3_vl")
    vision = {"vit_lora_num": 1} if family in VISION_LANGUAGE else {}
    stages, folder = save_lora(family, tmp_path, tied=tied, **vision)
    verify(folder)
    expected = peft_logits(family, tmp_path, folder)
    ours = attach_adapter(base_model(family, tmp_path), folder).eval()
    assert torch.equal(logits(ours, family), expected)
    state = {n: t for model in stages for n, t in model.state_dict().items()}
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    plain = logits(base_model(family, tmp_path), family)
    assert (plain - expected).abs().max() > 0.1  # the adapter does something
    merged = logits(merge_lora(ours), family)
    torch.testing.assert_close(merged, expected, rtol=1e-3, atol=2e-5)


def test_an_adapter_brings_the_tokens_that_end_its_answers(tmp_path):
    """The base ends with </s>; the template that was trained ends a turn with <|im_end|>."""
    tiny_whole("llama", tmp_path / "base", vocab_size=400)
    tiny_tokenizer(chat_template=None).save_pretrained(tmp_path / "base")
    GenerationConfig(eos_token_id=2, temperature=0.5).to_json_file(
        tmp_path / "base" / "generation_config.json"
    )
    stages = load_stages(tmp_path / "base", tmp_path / "base", llm_lora_num=1)
    tokenizer = tiny_tokenizer(chat_template=None)
    prepare_chat(tokenizer, template="chatml")
    expected = {2, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    run = save_split_model(stages, tokenizer, tmp_path / "run")
    report = export_folder(run, tmp_path / "out")
    card = (report.folder / "README.md").read_text()
    assert "model.generation_config = GenerationConfig.from_pretrained('out')" in card
    for folder in (run, report.folder):
        verify(folder)
        settings = GenerationConfig.from_pretrained(folder)
        assert (set(settings.eos_token_id), settings.temperature) == (expected, 0.5)
    # device_map and stages, which take the tokenizer of an adapter above the base's settings
    model, processor, _ = auto(str(run), device="cpu")
    assert set(stop_token_ids(model, processor)) == expected
    source = AnsweringModel(tmp_path / "base", 2, torch.float32, adapters=(str(run),))
    assert set(stop_ids_of(source.base, source.config, source.processor)) == expected


def test_stacked_adapters_are_one_for_peft_and_two_for_us(tmp_path):
    family, vision = "internvl", {"vit_lora_num": 1}
    _, first = save_lora(family, tmp_path, **vision)
    twice = {"llm_lora_num": 2, "lora_rank": 2, **dict.fromkeys(vision, 2)}
    stages = shake(load_stages(tmp_path / "base", first, **twice), seed=50)
    for model in stages:  # the inner one is the first run's, with its own rank
        for wrappers in lora_stacks(model).values():
            assert [wrapper.lora.rank for wrapper in wrappers] == [3, 2]
    folder = save_split_model(stages, None, tmp_path / "second")
    assert sorted(path.name for path in (folder / "stack").iterdir()) == ["0", "1"]
    one = read_adapter(folder / "stack" / "0")
    for name, (a, b) in read_adapter(first).pairs.items():
        assert torch.equal(one.pairs[name][0], a)
        assert torch.equal(one.pairs[name][1], b)
    # the same folder again, now as the two that it was
    state = {n: t for model in stages for n, t in model.state_dict().items()}
    (again,) = load_stages(tmp_path / "base", folder, num_stages=1, **twice)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    expected = logits(again.whole.eval(), family)
    found = peft_logits(family, tmp_path, folder)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5)


def test_a_random_base_is_saved_beside_the_adapter(tmp_path):
    model = CausalLMStage(tiny_config("llama"), stage=0, num_stages=1, llm_lora_num=1)
    init_split_model(model, seed=0, device="cpu", dtype=torch.float32)
    model.frozen()
    shake([model])
    folder = save_split_model(model, None, tmp_path / "adapter")
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(folder / "base")
    verify(folder)
    plain = auto_class("llama").from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, folder).eval()
    expected = logits(model.whole.eval(), "llama")
    assert torch.equal(logits(theirs, "llama"), expected)


def make_with_peft(tmp_path, **config):
    tiny_whole("llama", tmp_path / "base")
    torch.manual_seed(1)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | config
    model = peft.get_peft_model(base_model("llama", tmp_path), peft.LoraConfig(**config))
    shake([model])
    model.save_pretrained(tmp_path / "theirs")
    return logits(model.eval(), "llama")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r"layers.1.self_attn.q_proj": 3}},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "gaussian"},
        {"layers_to_transform": [1], "exclude_modules": ["q_proj"], "fan_in_fan_out": True},
    ],
    ids=str,
)
def test_adapters_of_peft_are_read(config, tmp_path):
    expected = make_with_peft(tmp_path, **config)
    ours = attach_adapter(base_model("llama", tmp_path), tmp_path / "theirs").eval()
    assert torch.equal(logits(ours, "llama"), expected)


def test_an_adapter_of_peft_is_a_start_for_stages(tmp_path):
    expected = make_with_peft(tmp_path)
    config = tmp_path / "theirs" / "adapter_config.json"
    facts = json.loads(config.read_text()) | {"base_model_name_or_path": "../base"}
    config.write_text(json.dumps(facts))
    (model,) = load_stages(tmp_path / "base", tmp_path / "theirs", num_stages=1, llm_lora_num=2)
    found = logits(model.whole.eval(), "llama")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_other_kinds_are_refused(tmp_path):
    _, folder = save_lora("llama", tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, value in (
        ("use_dora", True),
        ("bias", "all"),
        ("init_lora_weights", "pissa_niter_4"),
        ("field_of_a_newer_peft", 3),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(UserError, match=f"{name}={value}|use_dora"):
            attach_adapter(base_model("llama", tmp_path), folder)


def test_fields_at_their_defaults_are_read(tmp_path, monkeypatch):
    """Also those of a newer peft, where its default is not empty, and all of this one's."""
    defaults = peft.LoraConfig(peft_type="LORA").to_dict()
    monkeypatch.setattr(peft.LoraConfig, "group_size_to_come", 16, raising=False)
    config = {**defaults, "group_size_to_come": 16, "to_come": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config, default=str))
    assert read_adapter_config(tmp_path)["group_size_to_come"] == 16
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "group_size_to_come": 8}))
    with pytest.raises(UserError, match="group_size_to_come=8"):
        read_adapter_config(tmp_path)


def test_the_page_of_fields_is_that_of_the_installed_peft():
    """A peft with another field needs an entry for it, in HARMLESS_FIELDS or as refused."""
    assert adapter_fields.PAGE.read_text(encoding="utf-8") == adapter_fields.make_page()


def test_an_adapter_of_another_model_is_refused(tmp_path):
    _, folder = save_lora("llama", tmp_path)
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    for part in ("A", "B"):
        old = f"base_model.model.model.layers.0.mlp.up_proj.lora_{part}.weight"
        state[old.replace("layers.0", "layers.9")] = state[old].clone()
    save_file(state, file)
    with pytest.raises(UserError, match="layers.9.mlp.up_proj"):
        attach_adapter(base_model("llama", tmp_path), folder)
    with pytest.raises(UserError, match="layers.9.mlp.up_proj"):
        load_stages(tmp_path / "base", folder, llm_lora_num=1)


def test_counts_that_do_not_fit_and_a_missing_base_are_named(tmp_path):
    _, folder = save_lora("llama", tmp_path)
    for count, words in ((0, "lora.target of its run"), (3, "lora-num")):
        with pytest.raises(UserError, match=words):
            load_stages(tmp_path / "base", folder, llm_lora_num=count)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="belongs to the model '.*base', which is not on this"):
        load_stages(tmp_path / "moved", folder, llm_lora_num=2)


def test_trained_base_below_a_lora_is_refused(tmp_path):
    tiny_whole("llama", tmp_path / "base")
    stages = load_stages(tmp_path / "base", tmp_path / "base", llm_lora_num=1)
    for parameter in stages[1].parameters():
        parameter.requires_grad_(True)
    with pytest.raises(UserError, match="is trained and has a LoRA as well"):
        save_split_model(stages, None, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("way", "kept", "ties"),
    [
        ("goes_on", "embed_tokens", False),
        ("goes_on", "embed_tokens,lm_head", True),
        ("merged", "lm_head", False),
        ("merged", "embed_tokens", True),
        ("below", "embed_tokens,lm_head", False),
        ("below", "lm_head", True),
    ],
)
def test_a_tied_base_whose_embedding_or_head_was_trained_whole(way, kept, ties, tmp_path):
    """peft trains the one, the other, or both apart, unless it is told to keep them tied."""
    tiny_whole("llama", tmp_path / "base", tied=True)
    config = {"modules_to_save": kept.split(","), "ensure_weight_tying": ties}
    plain = peft.LoraConfig(r=2, target_modules=["q_proj"], **config)
    model = peft.get_peft_model(base_model("llama", tmp_path), plain)
    shake([model])
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "theirs")
    expected = peft_logits("llama", tmp_path, tmp_path / "theirs")
    start = tmp_path / ("theirs" if way == "below" else "base")
    options = {"adapter_path": [tmp_path / "theirs"], "create_new_adapter": way == "merged"}
    options = {"llm_lora_num": 1, **({} if way == "below" else options)}
    stages = load_stages(tmp_path / "base", start, **options)
    folder = save_split_model(stages, None, tmp_path / "run")  # compares the names of all stages
    export_folder(folder, tmp_path / "out", merge=True)
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), "llama")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
