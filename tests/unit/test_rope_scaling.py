"""Scaled positions: frequencies, losses and saved configurations against transformers' own."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from commands.decode_run import AnsweringModel
from models.builders import auto
from pp_models import CausalLMStage, VisionLanguageStage
from stageline.checkpoint.load import fill_stage
from stageline.checkpoint.plain_folder import export_folder
from stageline.checkpoint.plain_model import load_plain
from stageline.checkpoint.save import save_split_model
from stageline.errors import UserError
from stageline.modules.methods import RopeScaling, scale_rope
from stageline.pipeline.runner import LocalStages
from tests.helpers.chain import chained_logits
from tests.helpers.tiny_batches import tiny_micro_batches
from tests.helpers.tiny_checkpoints import shake, tiny_whole
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

KINDS = ("linear", "dynamic", "yarn", "llama3")
LENGTH = 150  # the tiny models have 64 positions: a factor of 3
DTYPE = torch.float64


def by_hand(kind):
    """Return the parameters that transformers' documentation asks for."""
    told = {"rope_theta": 10000.0, "rope_type": kind, "factor": 3.0}
    if kind in ("yarn", "llama3"):
        told["original_max_position_embeddings"] = 64
    if kind == "llama3":
        told |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return told


def scaled_config(folder, kind, length=LENGTH):
    config = AutoConfig.from_pretrained(folder)
    return config, scale_rope(config, RopeScaling(kind, length))


def make_stages(folder, kind, num_stages):
    stages = []
    for stage in range(num_stages):
        config, _ = scaled_config(folder, kind)
        model = CausalLMStage(config, stage=stage, num_stages=num_stages, dtype=DTYPE)
        fill_stage(model, str(folder), dtype=DTYPE)
        stages.append(model)
    return stages


def batch_of(length):
    batch = tiny_micro_batches("llama", lengths=(length,))[0]
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_whole("llama", path, dtype=DTYPE)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_the_library(folder, kind, tmp_path):
    reference = AutoConfig.from_pretrained(folder)
    reference.rope_parameters = by_hand(kind)
    if kind != "dynamic":
        reference.max_position_embeddings = 192
    whole = AutoModelForCausalLM.from_pretrained(folder, config=reference, dtype=DTYPE).train()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).train()
    batch = batch_of(LENGTH)
    expected = whole(**batch, use_cache=False).logits
    # dynamic scaling begins beyond 64 tokens, the others change every length
    assert (expected - plain(**batch, use_cache=False).logits).abs().max() > 1e-4
    expected.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for num_stages in (1, 4):
        stages = make_stages(folder, kind, num_stages)
        found = chained_logits(stages, batch)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        for stage in stages:
            assert stage.config.rope_parameters == by_hand(kind)
            for name, parameter in stage.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[name], msg=name)
    save_split_model(LocalStages(stages).models, None, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=DTYPE)
    assert loaded.config.rope_parameters == by_hand(kind)
    assert loaded.config.max_position_embeddings == (64 if kind == "dynamic" else 192)
    seen = loaded.model.rotary_emb.original_inv_freq, whole.model.rotary_emb.original_inv_freq
    assert torch.equal(*seen)
    torch.testing.assert_close(loaded(**batch, use_cache=False).logits, expected)


def test_dynamic_positions_know_nothing_of_passes_before(folder):
    """Compare with a model that sees one text; transformers' remembers the longest one."""
    stages = make_stages(folder, "dynamic", 2)
    for length in (LENGTH, 70, 20, 100):
        fresh = make_stages(folder, "dynamic", 1)
        batch = batch_of(length)
        assert torch.equal(chained_logits(stages, batch), chained_logits(fresh, batch)), length


@pytest.mark.parametrize("kind", ["dynamic", "llama3"])
def test_what_fits_already_is_left_alone(folder, kind):
    """Short texts, and the folder of a scaled run that is given again with the same options."""
    config, note = scaled_config(folder, kind, length=64)
    assert config.to_dict() == AutoConfig.from_pretrained(folder).to_dict()
    assert "does nothing" in note and "64 positions" in note
    config, _ = scaled_config(folder, kind)
    before = config.to_dict()
    scale_rope(config, RopeScaling(kind, LENGTH))
    assert config.to_dict() == before


def test_the_factor_is_rounded_up_and_numbers_stay_integers(folder):
    for length, factor in ((65, 2), (128, 2), (129, 3)):
        config, note = scaled_config(folder, "yarn", length)
        assert config.rope_parameters["factor"] == factor
        assert type(config.max_position_embeddings) is int
        assert config.max_position_embeddings == 64 * factor and str(64 * factor) in note
    assert "Warning" in scaled_config(folder, "dynamic")[1]


def test_layers_with_a_window_keep_their_frequencies():
    config = tiny_config("gemma3")
    before = dict(config.rope_parameters)
    scale_rope(config, RopeScaling("linear", LENGTH))
    told = config.rope_parameters
    assert told["sliding_attention"] == before["sliding_attention"]
    assert told["full_attention"] == {
        **before["full_attention"],
        "rope_type": "linear",
        "factor": 3.0,
    }


def test_a_vision_language_model_keeps_its_sections():
    config = tiny_config("qwen2_vl")
    scale_rope(config, RopeScaling("yarn", LENGTH))
    told = config.get_text_config().rope_parameters
    assert told["mrope_section"] == [2, 1, 1] and told["rope_type"] == "yarn"
    stage = VisionLanguageStage(config, stage=1, num_stages=2)
    rope = stage.get_submodule(stage.paths.text_model).rotary_emb
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config.get_text_config(), "cpu")
    assert rope.config.rope_parameters["factor"] == 3.0 and expected.shape == rope.inv_freq.shape


def test_what_has_no_plain_positions_is_refused(folder):
    with pytest.raises(UserError, match="no rotary positions"):
        scale_rope(tiny_config("gpt2"), RopeScaling("linear", LENGTH))
    config, _ = scaled_config(folder, "yarn")
    with pytest.raises(UserError, match="scaled already"):
        scale_rope(config, RopeScaling("linear", 1000))


def built(folder, kind, **options):
    """Return two stages as a run with scaled positions builds them."""
    paths = {"config_path": str(folder), "processor_path": None, "checkpoint_path": str(folder)}
    methods = {"rope_scaling": {"kind": kind, "max_token_num": LENGTH}}
    options = {**paths, "num_stages": 2, "is_piece": True, "methods": methods, **options}
    return [CausalLMStage.build(stage=stage, **options)[0] for stage in range(2)]


def test_training_keeps_no_cache_and_a_saved_model_does(folder, tmp_path):
    made = built(folder, "linear")
    for stage in made:
        config = stage.whole.config
        assert config.use_cache is False and config.get_text_config().use_cache is False
        assert config.rope_parameters["factor"] == 3.0
    assert len(made[0].notes) == 1 and made[1].notes == ()
    save_split_model(made, None, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.use_cache is True
    assert loaded.generation_config.use_cache in (True, None)


def test_an_adapter_brings_its_scaled_configuration(folder, tmp_path):
    """After training with LoRA the adapter's folder has the scaling, which the base's has not."""
    adapter, batch = tmp_path / "adapter", batch_of(LENGTH)
    options = {"dtype": torch.float32, "llm_lora_num": 1, "frozen_lm_head": True}
    made = shake(built(folder, "yarn", **options))
    save_split_model(made, None, adapter)
    expected = chained_logits([stage.eval() for stage in made], batch)
    for merge in (False, True):
        export_folder(adapter, tmp_path / f"exported-{merge}", merge=merge)
        found = load_plain(tmp_path / f"exported-{merge}", dtype=torch.float32)
        assert found.config.rope_parameters == by_hand("yarn")
        torch.testing.assert_close(found(**batch, use_cache=False).logits, expected)
    tiny_tokenizer().save_pretrained(folder)
    model, _, _ = auto(str(folder), device="cpu", adapter_path=str(adapter))
    torch.testing.assert_close(model(**batch, use_cache=False).logits, expected)
    # stages that answer: the adapter is the model, or is put on its base by --adapter-path
    for given in ({"folder": adapter}, {"folder": folder, "adapters": (str(adapter),)}):
        for merges in (False, True):
            answering = AnsweringModel(**given, num_stages=2, dtype=torch.float32, merges=merges)
            assert answering.config.rope_parameters == by_hand("yarn")
            assert answering.base == folder  # has generation_config.json
            stages = [answering.build(stage, "cpu").eval() for stage in range(2)]
            torch.testing.assert_close(chained_logits(stages, batch), expected)
