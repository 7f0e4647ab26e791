"""Rows for tokens that a tokenizer has and the weights have not."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from commands.train_data import add_tokens, rows_option
from options.fields import replaced
from options.train import RunConfig
from pp_models import CausalLMStage
from stageline.checkpoint.load import fill_stage
from stageline.checkpoint.save import save_split_model
from stageline.data.text.tokenizers import NewTokens, with_rowless
from stageline.modules.new_rows import NewRows
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import VOCAB_SIZE, tiny_tokenizer

WIDTH = 16
IDS = (VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2)


def rows(**changes):
    told = {"pieces": ((9, 10), (), ()), "fresh": frozenset(IDS), "noisy": frozenset(IDS[1:])}
    return NewRows(ids=IDS, **{**told, "seed": 5, "multiple": 64, **changes})


def make_stages(folder, num_stages, new_rows):
    stages = []
    for stage in range(num_stages):
        config = AutoConfig.from_pretrained(folder)
        model = CausalLMStage(config, stage=stage, num_stages=num_stages)
        fill_stage(model, str(folder), dtype=torch.float32, new_rows=new_rows)
        stages.append(model)
    return stages


@pytest.mark.parametrize(("tied", "num_stages"), [(False, 1), (True, 2)])
def test_new_rows_start_near_the_mean(tied, num_stages, tmp_path):
    whole = tiny_whole("llama", tmp_path / "base", tied=tied)
    stages = make_stages(tmp_path / "base", num_stages, rows())
    embedding = stages[0].get_submodule("model.embed_tokens").weight
    head = stages[-1].get_submodule("lm_head").weight
    old = (whole.get_input_embeddings().weight, whole.get_output_embeddings().weight)
    for found, before in zip((embedding, head), old, strict=True):
        assert found.shape == (128, WIDTH)  # 67 rounded up
        assert torch.equal(found[:VOCAB_SIZE], before)
        torch.testing.assert_close(found[IDS[0]], before[[9, 10]].mean(0))
        noise = (found[list(IDS[1:])] - before.mean(0)) * WIDTH**0.5
        assert 0.5 < noise.std() < 2 and noise.mean().abs() < 1
        assert not torch.equal(noise[0], noise[1])
        assert not found[IDS[-1] + 1 :].any()  # no token uses the tail
    assert torch.equal(embedding, head) == tied
    assert stages[0].config.vocab_size == 128
    save_split_model(stages, None, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.vocab_size == 128
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
    # the same rows on every number of stages, and others with another seed
    again = make_stages(tmp_path / "base", 3, rows())[0].get_submodule("model.embed_tokens").weight
    assert torch.equal(again, embedding)
    other = make_stages(tmp_path / "base", 1, rows(seed=6))[0].get_submodule("lm_head").weight
    assert not torch.equal(other[IDS[1]], head[IDS[1]])


def test_a_checkpoint_with_its_rows_keeps_them(tmp_path):
    tiny_whole("llama", tmp_path / "base")
    stages = make_stages(tmp_path / "base", 1, rows())
    save_split_model(stages, None, tmp_path / "saved")
    before = stages[0].get_submodule("model.embed_tokens").weight
    again = make_stages(tmp_path / "saved", 1, rows(fresh=frozenset()))[0]
    assert torch.equal(again.get_submodule("model.embed_tokens").weight, before)


def test_rows_are_added_only_where_the_tokenizer_is_larger():
    tokenizer = tiny_tokenizer()
    size = max(tokenizer.get_vocab().values()) + 1
    assert with_rowless(tokenizer, None, size) is None
    found = with_rowless(tokenizer, None, size - 2)
    assert found.ids == (size - 2, size - 1) and found.pieces == ((), ())
    assert found.fresh == found.rowless == frozenset(found.ids)
    given = NewTokens((size - 1,), ((3,),), frozenset({size - 1}))
    found = with_rowless(tokenizer, given, size - 2)
    assert found.ids == (size - 1, size - 2) and found.rowless == frozenset({size - 2})


def test_tokens_in_spare_rows_are_new(tmp_path, capsys):
    """A larger tokenizer by --processor-path: its rows train under LoRA, or a line says not."""
    tokenizer = tiny_tokenizer()
    size = max(tokenizer.get_vocab().values()) + 1
    config = AutoConfig.for_model(
        "llama",
        vocab_size=size + 8,
        num_hidden_layers=2,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_attention_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["<left>", "<right>"])
    ids = (size, size + 1)
    base = str(tmp_path / "base")
    run = RunConfig(model_path=base)
    for asked, path, wanted in ((0, base, None), (0, "other", None), (1, "other", ids)):
        arguments = SimpleNamespace(run=replaced(run, {"vocab.resize": bool(asked)}))
        found = add_tokens(arguments, tokenizer, path)
        assert (found and found.ids) == wanted
        said = "2 tokens of other are not in the tokenizer of" in capsys.readouterr().out
        assert said == (path == "other" and not asked)
    stage = CausalLMStage(config, stage=0, num_stages=1, llm_lora_num=1, frozen_lm_head=True)
    fill_stage(stage, base, dtype=torch.float32, **rows_option(arguments.run, found))
    trained = {name for name, one in stage.named_parameters() if one.requires_grad}
    assert {name for name in trained if "lora" not in name} == {
        "model.embed_tokens.new_rows.weight",
        "lm_head.new_rows.weight",
    }
    assert stage.config.vocab_size == size + 8
    # a run with the saved tokenizer continues from there: nothing is new
    tokenizer.save_pretrained(tmp_path / "base")
    assert add_tokens(arguments, tokenizer, "other") is None
