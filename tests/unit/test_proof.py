"""The split check at the start: what it finds, what it prints, and what it leaves unchanged."""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING

from pp_models import CausalLMStage, VisionLanguageStage
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.verify import scaled_copy
from stageline.verify.scaled_copy import ScaledCopy, verify
from stageline.verify.training import training
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_models import tiny_config

ALONE = Ranks.of(None)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STAGELINE_PROVE_SPLIT", "auto")
    monkeypatch.setenv("STAGELINE_CACHE", str(tmp_path / "cache"))


def prove(tmp_path, stage_class, config, num_stages=2, mode="auto", **more):
    """Run the split check; return its messages."""
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    said = []
    copy = ScaledCopy(stage_class.build, str(folder), num_stages, **more)
    verify(copy, {"loss and gradients": training}, mode=mode, ranks=ALONE, say=said.append)
    return "\n".join(said)


def granite(**fields):
    return CONFIG_MAPPING["granite"](
        hidden_size=64, num_hidden_layers=8, embedding_multiplier=12.0, logits_scaling=8.0, **fields
    )


def test_the_users_multipliers_are_in_the_copy(tmp_path):
    """An embedding multiplier that later stages apply again is seen at its first border."""
    assert "equals Granite of transformers" in prove(tmp_path, CausalLMStage, granite(), 3)

    class Twice(CausalLMStage):
        def forward(self, hidden_or_ids, *extras, **batch):
            if not self.is_first:
                hidden_or_ids = hidden_or_ids * self.config.embedding_multiplier
            return super().forward(hidden_or_ids, *extras, **batch)

    with pytest.raises(UserError, match="border before layer 2 .stage 1 to 2. is the first"):
        prove(tmp_path, Twice, granite(), 3)
    unscaled = granite()
    unscaled.embedding_multiplier = 1.0  # then there is nothing wrong
    assert "equals" in prove(tmp_path, Twice, unscaled, 3)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    with pytest.raises(UserError, match="CpmAntForCausalLM looks ahead"):
        prove(tmp_path, CausalLMStage, family_config("cpmant"))


def test_a_gradient_that_stops_at_a_border_is_seen(tmp_path):
    class Cuts(CausalLMStage):
        def forward(self, hidden_or_ids, *extras, **batch):
            cut = hidden_or_ids if self.is_first else hidden_or_ids.detach()
            return super().forward(cut, *extras, **batch)

    message = "all borders and the loss are equal; the first gradient that differs is that of "
    with pytest.raises(UserError, match=message + "model.embed_tokens.weight"):
        prove(tmp_path, Cuts, tiny_config("llama"))


def test_a_border_that_is_scaled_says_by_how_much(tmp_path):
    class Scales(CausalLMStage):
        def forward(self, hidden_or_ids, *extras, **batch):
            output = super().forward(hidden_or_ids, *extras, **batch)
            return output if self.is_last else output * 7.0

    with pytest.raises(UserError, match="is the first that differs .it is 7 times as large"):
        prove(tmp_path, Scales, tiny_config("llama"))


def test_what_pictures_alone_change_is_seen(tmp_path):
    class Blind(VisionLanguageStage):
        """Later stages do not let the tokens of a picture see each other."""

        def model_inputs(self, batch):
            inputs = super().model_inputs(batch)
            if not self.is_first:
                inputs["token_type_ids"] = torch.zeros_like(batch["input_ids"])
            return inputs

    config = tiny_config("gemma3_vl")
    assert "equals Gemma3 of transformers" in prove(tmp_path, VisionLanguageStage, config)
    with pytest.raises(UserError, match="does not compute what Gemma3 of transformers"):
        prove(tmp_path, Blind, config)


def test_router_losses_are_compared_too(tmp_path):
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = tiny_config("mixtral")
    assert "equals Mixtral" in prove(tmp_path, CausalLMStage, config, options=options)

    class Forgets(CausalLMStage):
        def forward(self, hidden_or_ids, *extras, **batch):
            output = super().forward(hidden_or_ids, *extras, **batch)
            is_wrong = self.is_last and not self.is_first
            return (output[0], output[1] * 0.5) if is_wrong else output

    with pytest.raises(UserError, match="stage 1 gives another loss"):
        prove(tmp_path, Forgets, config, options=options)


def test_a_record_builds_nothing(tmp_path, monkeypatch):
    assert "recorded" in prove(tmp_path, CausalLMStage, tiny_config("llama"))

    def fail(*args, **kwargs):
        raise AssertionError("something was built")

    monkeypatch.setattr(CausalLMStage, "__init__", fail)
    assert prove(tmp_path, CausalLMStage, tiny_config("llama")) == ""


def test_other_versions_code_and_settings_are_not_proven_by_a_record(tmp_path, monkeypatch):
    config = tiny_config("llama")
    assert "recorded" in prove(tmp_path, CausalLMStage, config)
    config.hidden_act = "gelu"
    assert "recorded" in prove(tmp_path, CausalLMStage, config)
    assert prove(tmp_path, CausalLMStage, config) == ""
    assert "recorded" in prove(tmp_path, CausalLMStage, config, 3)
    monkeypatch.setattr(scaled_copy, "VERSIONS", ("torch", "transformers", "tokenizers"))
    assert "recorded" in prove(tmp_path, CausalLMStage, config)
    monkeypatch.setattr(scaled_copy, "CODE", ("seeds.py",))
    assert "recorded" in prove(tmp_path, CausalLMStage, config)
    records = [json.loads(file.read_text()) for file in tmp_path.glob("cache/verified/*.json")]
    assert len(records) == 5 and not list(tmp_path.glob("cache/verified/*.json.*"))


def test_what_cannot_be_tried_is_said_and_not_refused(tmp_path, monkeypatch):
    class NoCopy(CausalLMStage):
        def __init__(self, config, **kwargs):
            raise UserError("this one is built on a full moon")

    said = prove(tmp_path, NoCopy, tiny_config("llama"))
    assert said.startswith("note: loss and gradients not compared") and "full moon" in said
    monkeypatch.setenv("STAGELINE_CACHE", "/proc/no/such/folder")  # cannot be written
    assert "equals Llama" in prove(tmp_path, CausalLMStage, tiny_config("llama"))
