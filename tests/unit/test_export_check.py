"""The comparison of an export with its stages, and that it can fail."""

import sys

import peft
import pytest
import torch
import transformers
from transformers import AutoTokenizer

import pp_models  # noqa: F401 - puts the parts that make_stages looks for on the shelf
from commands.export import make_stages, stage_key
from pp_models import CausalLMStage
from stageline.checkpoint.layout import MANIFEST
from stageline.data.text.processor import save_processor
from stageline.errors import CheckpointError, UserError
from stageline.verify.export import ExportError
from tests.helpers.exports import export_alone, export_folder
from tests.helpers.tiny_checkpoints import auto_class, tiny_whole
from tests.helpers.tiny_models import (
    DECODERS,
    VISION_LANGUAGE,
    tiny_config,
    tiny_processor,
)


def spoil(change):
    """Changes each stage model after it was filled."""

    def make(folder):
        stages = make_stages(folder)
        change(stages)
        return stages

    return make


def test_a_stage_without_numbers_is_found(tmp_path):
    tiny_whole("llama", tmp_path / "base")

    def change(stages):
        stages[1].model.layers[3].mlp.up_proj.weight.data.mul_(torch.nan)

    with pytest.raises(ExportError, match="by nan"):
        export_folder(tmp_path / "base", tmp_path / "out", make_stages=spoil(change))


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl"])
def test_an_image_is_tried_too(family, tmp_path):
    processor = tiny_processor(family)
    size = len(processor.tokenizer)
    torch.manual_seed(3)
    whole = auto_class(family).from_config(tiny_config(family, vocab_size=size))
    whole.save_pretrained(tmp_path / "base")
    save_processor(processor, tmp_path / "base")
    report = export_folder(tmp_path / "base", tmp_path / "out", make_stages=make_stages)
    assert report.verdict.probes == ("text", "image")
    assert report.notes == ()

    def change(stages):  # it changes the projector, which only an image passes through
        for name, parameter in stages[0].named_parameters():
            if stages[0].part_of(name) == "mlp":
                parameter.data.add_(torch.randn_like(parameter))

    with pytest.raises(ExportError, match=r"\(image, compared with"):
        export_folder(tmp_path / "base", tmp_path / "no", make_stages=spoil(change))


def test_what_no_part_is_made_for_is_compared_in_plain_transformers(tmp_path):
    config = tiny_config("llama", num_labels=3)
    torch.manual_seed(0)
    whole = transformers.LlamaForSequenceClassification(config)
    whole.save_pretrained(tmp_path / "base")
    report = export_folder(tmp_path / "base", tmp_path / "out", make_stages=make_stages)
    assert report.verdict.reference == "the checkpoint in plain transformers"
    assert report.verdict.difference == 0.0
    assert "no train_model part is made for LlamaForSequenceClassification" in report.notes[0]


def test_stages_that_cannot_be_built_matter_for_checkpoints_of_a_run(tmp_path, monkeypatch):
    tiny_whole("llama", tmp_path / "base")

    def refuse(self, *args, **kwargs):
        raise CheckpointError("does not fit")

    monkeypatch.setattr(CausalLMStage, "__init__", refuse)
    report = export_folder(tmp_path / "base", tmp_path / "out", make_stages=make_stages)
    assert "not with stages: does not fit" in report.notes[0]
    assert (tmp_path / "out" / MANIFEST).exists()  # a checkpoint of a run has a manifest
    with pytest.raises(CheckpointError, match="does not fit"):
        export_folder(tmp_path / "out", tmp_path / "again", make_stages=make_stages)


def test_every_family_has_its_key():
    for family in DECODERS + VISION_LANGUAGE:
        assert stage_key(tiny_config(family)) == family
    assert stage_key(transformers.OlmoConfig()) == "causal_lm"
    assert stage_key(transformers.Cohere2VisionConfig()) == "vision_language"
    assert stage_key(transformers.BertConfig(architectures=["BertForMaskedLM"])) is None


def test_an_adapter_without_peft(tmp_path, monkeypatch):
    tiny_whole("llama", tmp_path / "base")
    base = auto_class("llama").from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "run")
    with_peft = export_folder(tmp_path / "run", tmp_path / "a", make_stages=make_stages)
    monkeypatch.setitem(sys.modules, "peft", None)
    without = export_folder(tmp_path / "run", tmp_path / "b", make_stages=make_stages)
    for report in (with_peft, without):
        assert report.verdict.reference == "its 2 stages"
        assert report.verdict.difference < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (None, 5e-2)])
def test_an_adapter_is_merged_as_exactly_as_the_type_allows(dtype, tolerance, tmp_path):
    """Merge in float32, like the adapter, into a base in bfloat16, without rounding to it."""
    tiny_whole("llama", tmp_path / "base", dtype=torch.bfloat16)
    base = auto_class("llama").from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "run")
    report = export_folder(
        tmp_path / "run", tmp_path / "out", merge=True, dtype=dtype, make_stages=make_stages
    )
    assert report.verdict.tolerance == tolerance
    assert report.verdict.difference <= tolerance
    assert dtype is torch.float32 or report.verdict.difference > 1e-5
    found = auto_class("llama").from_pretrained(tmp_path / "out", dtype="auto")
    assert found.dtype == (dtype or torch.bfloat16)


def test_an_adapter_that_is_cut_or_gone_is_named(tmp_path):
    tiny_whole("llama", tmp_path / "base")
    base = auto_class("llama").from_pretrained(tmp_path / "base")
    run = tmp_path / "run"
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(run)
    file = run / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    for _ in range(2):
        with pytest.raises(UserError, match=str(file)):
            export_alone(run, tmp_path / "out")
        file.unlink(missing_ok=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "run"]


def test_files_of_tokenizers_come_along_and_those_of_training_do_not(tmp_path):
    folder = tmp_path / "base"
    tiny_whole("llava", folder)
    processor = tiny_processor("llava")
    save_processor(processor, folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit")
    (folder / "trainer_state.json").write_text("{}")
    (folder / "optimizer.safetensors").write_bytes(b"")
    (folder / "rng-00000.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    export_alone(folder, tmp_path / "out")
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")}
    assert {"tokenizer.json", "processor_config.json", "chat_template.jinja", "LICENSE"} <= names
    assert "additional_chat_templates/tool.jinja" in names
    left_out = {"modeling_mine.py", "trainer_state.json", "optimizer.safetensors", "rng-00000.json"}
    assert not left_out & names
    rights = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert len(rights) == 1, "who may read the rest may read the weights"
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = {"default": processor.tokenizer.chat_template, "tool": "{{ messages }}"}
    assert again.chat_template == expected
    export_alone(folder, tmp_path / "code", trust_remote_code=True)
    assert (tmp_path / "code" / "modeling_mine.py").exists()
    assert not (tmp_path / "code" / "optimizer.safetensors").exists()


def test_generation_settings_stay_as_they_are(tmp_path):
    """Keep also settings that transformers reads and refuses to write."""
    tiny_whole("llama", tmp_path / "base")
    text = '{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3}'
    (tmp_path / "base" / "generation_config.json").write_text(text)
    report = export_folder(tmp_path / "base", tmp_path / "out", make_stages=make_stages)
    assert report.verdict is not None
    assert (tmp_path / "out" / "generation_config.json").read_text() == text
