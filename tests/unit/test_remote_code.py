"""Models that come with code of their own: stages start, load, save and are checked as others."""

import functools

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from commands.export import make_stages
from commands.stages import stage_key
from pp_models import CausalLMStage
from stageline.checkpoint import load
from stageline.checkpoint.plain_model import load_plain, save_whole
from stageline.data.text.processor import load_processor
from stageline.data.text.rendered import Piece, Rendered
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.inference.generation import encode_prompts, generate
from stageline.inference.model_cutter import ModelCutter
from stageline.model_folder import load_config
from stageline.planner.estimate import model_on_meta
from stageline.verify.scaled_copy import ScaledCopy, verify
from stageline.verify.training import training
from tests.helpers.chain import chained_logits
from tests.helpers.exports import export_folder
from tests.helpers.remote_model import INITS, remote_model

ALONE = Ranks.of(None)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STAGELINE_PROVE_SPLIT", "auto")
    monkeypatch.setenv("STAGELINE_CACHE", str(tmp_path / "cache"))


def stages_of(folder, num_stages, *, weights=None, **options):
    return [
        CausalLMStage.build(
            config_path=str(folder),
            processor_path=str(folder),
            checkpoint_path=weights,
            stage=stage,
            num_stages=num_stages,
            trust_remote_code=True,
            **options,
        )[0]
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize(
    ("init", "tied"), [(init, bool(number % 2)) for number, init in enumerate(INITS)]
)
def test_a_random_start_does_not_depend_on_the_number_of_stages(tied, init, tmp_path):
    """Neither `nn.init` nor `.data.normal_()` knows of weights that are drawn, or elsewhere."""
    folder = remote_model(tmp_path / "model", init=init, tied=tied, seed=None)
    one = stages_of(folder, 1)[0].state_dict()
    for num_stages in (3,):
        seen = {}
        for stage in stages_of(folder, num_stages):
            for name, tensor in stage.state_dict().items():
                assert torch.equal(tensor, seen.setdefault(name, tensor)), name
        assert seen.keys() == one.keys()
        assert all(torch.equal(tensor, one[name]) for name, tensor in seen.items())
    assert 0.25 < one["model.embed_tokens.weight"].std() < 0.35


def test_stages_with_weights_are_the_whole_model_and_proved(tmp_path):
    folder = remote_model(tmp_path / "model", tied=True)
    ids = torch.tensor([[9, 12, 33, 5]])
    whole = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        expected = whole(ids).logits
        stages = [stage.eval() for stage in stages_of(folder, 3, weights=str(folder))]
    assert torch.equal(chained_logits(stages, {"input_ids": ids}), expected)
    said = []
    split = ScaledCopy(CausalLMStage.build, str(folder), 3, trust_remote_code=True)
    verify(split, {"loss and gradients": training}, mode="always", ranks=ALONE, say=said.append)
    assert "equals Parrot of transformers" in said[0]


@pytest.mark.parametrize(
    "forward",
    [
        "input_ids):\n return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids)))",
        "input_ids, **kwargs):\n return {'logits': self.lm_head(self.model(input_ids))}",
        "input_ids, attention_mask=None, return_dict=None):\n"
        " logits = self.lm_head(self.model(input_ids, attention_mask))\n"
        " return CausalLMOutputWithPast(logits=logits) if return_dict else logits",
    ],
    ids=["ids", "a dict", "return_dict"],
)
def test_a_forward_of_few_arguments_is_called_as_others(forward, tmp_path):
    """Stages, their proof and answers of padded rows by device_map are those of the usual one."""
    usual = remote_model(tmp_path / "usual")
    folder = remote_model(tmp_path / "model", forward=forward.replace("\n ", "\n        "))
    ids = torch.tensor([[9, 12, 33, 5]])
    whole = AutoModelForCausalLM.from_pretrained(usual, trust_remote_code=True).eval()
    stages = [stage.eval() for stage in stages_of(folder, 2, weights=str(folder))]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(chained_logits(stages, batch), whole(ids).logits)
    said = []
    split = ScaledCopy(CausalLMStage.build, str(folder), 2, trust_remote_code=True)
    verify(split, {"loss and gradients": training}, mode="always", ranks=ALONE, say=said.append)
    assert "equals Parrot of transformers" in said[0]
    prompts = [Rendered((Piece(text, is_user=True),)) for text in ("ab", "a longer prompt")]
    processor = load_processor(str(usual), trust_remote_code=True)
    plain = load_plain(folder, trust_remote_code=True)
    options = {"prompts": prompts, "images": [None, None], "max_new_tokens": 4}
    answers = generate(plain, processor, **options)
    for prompt, answer in zip(prompts, answers, strict=True):
        row = encode_prompts([prompt], [None], processor=processor)
        expected = whole.generate(**row, max_new_tokens=4, do_sample=False, use_cache=False)
        expected = expected[0, row["input_ids"].shape[1] :].tolist()
        assert answer["token_ids"] == expected[: len(answer["token_ids"])]
        assert len(answer["token_ids"]) == 4 or 1 in expected


def test_a_model_whose_passes_cannot_be_measured_is_cut_by_its_weights(tmp_path, capsys):
    """Split by weights, because its decoder accepts only token ids."""
    config = load_config(remote_model(tmp_path / "model", seed=None), trust_remote_code=True)
    assert stage_key(config) == "causal_lm"  # before transformers has built one
    model = model_on_meta(config, trust_remote_code=True)
    placed = ModelCutter(model, num_devices=3).device_map()
    homes = [placed[f"model.layers.{index}"] for index in range(6)]
    assert homes == sorted(homes[:-1]) + [0] and set(homes) == {0, 1, 2}
    assert "a pass of ParrotForCausalLM takes could not be measured" in capsys.readouterr().err


def test_a_proof_of_other_code_is_no_proof(tmp_path):
    folder = remote_model(tmp_path / "model")
    split = ScaledCopy(CausalLMStage.build, str(folder), 2, trust_remote_code=True)
    said = []
    for _ in range(2):
        verify(split, {"loss and gradients": training}, mode="auto", ranks=ALONE, say=said.append)
    assert len(said) == 1
    with (folder / "modeling_parrot.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    verify(split, {"loss and gradients": training}, mode="auto", ranks=ALONE, say=said.append)
    assert len(said) == 2


def test_weights_that_were_read_are_not_drawn_again(tmp_path):
    """Files with LoRA names in them are read by name, then the model fills its buffers."""
    folder = remote_model(tmp_path / "model")
    stage = stages_of(folder, 1, weights=str(folder))[0]
    before = {name: tensor.clone() for name, tensor in stage.state_dict().items()}
    load._fill_buffers(stage, done=set(before), device=torch.device("cpu"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in stage.state_dict().items())


def test_an_export_agrees_with_the_stages(tmp_path):
    folder = remote_model(tmp_path / "model")
    make = functools.partial(make_stages, trust_remote_code=True, prove_split="never")
    options = {"make_stages": make, "trust_remote_code": True}
    report = export_folder(folder, tmp_path / "exported", **options)
    assert report.verdict.reference == "its 2 stages"
    saved = load_file(folder / "model.safetensors")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], saved[name]) for name in saved | exported)


def test_code_of_transformers_4_without_ties_is_saved(tmp_path):
    """Its names of weights that may be tied are a list, which cannot be saved any more."""
    folder = remote_model(tmp_path / "model", keys="a list", seed=None)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    whole = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    save_whole(whole, tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == whole.state_dict().keys()


def test_code_that_does_not_run_is_refused_in_one_sentence(tmp_path):
    folder = remote_model(tmp_path / "model", tied=True, keys="a list", seed=None)
    whole = remote_model(tmp_path / "whole", tied=True)
    (folder / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes())
    for way in (lambda: stages_of(folder, 2), lambda: load_plain(folder, trust_remote_code=True)):
        with pytest.raises(UserError, match="_tied_weights_keys.*is a mapping"):
            way()
