"""Split plans on disk: read in the place of a rehearsal, and only where nothing has changed."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

from stageline.stages import discover
from stageline.stages.causal_lm import run_whole
from stageline.stages.rehearsal import Key
from stageline.stages.split_plan import Slot, SplitPlan


@pytest.fixture
def plans(tmp_path, monkeypatch):
    """The folder of plans; every model counts as large, and nothing is known in memory."""
    monkeypatch.setenv("STAGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr("stageline.stages.rehearsal._SMALL", 0)
    monkeypatch.setattr(discover, "_PLANS", {})
    return tmp_path / "plans"


@functools.cache
def llama(num_layers=2):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def plan(whole=None):
    """As a process finds it that knows nothing yet."""
    whole = whole or llama()
    discover._PLANS.clear()
    sizes = functools.partial(discover.sizes_of, whole.config)
    return discover.plan_of(whole, run_whole, kind="logits", sizes=sizes)


def record(whole=None):
    return discover._record_of(whole or llama(), "key")


def test_a_plan_is_read_in_the_place_of_a_rehearsal(plans, monkeypatch):
    found = plan()
    (file,) = plans.iterdir()  # and no draft beside it
    with monkeypatch.context() as patch:
        patch.delattr(discover, "_rehearsed")
        assert plan() == found
    assert found.layers == "model.layers" and len(found.borders) == 3  # 0, 1 and behind
    for damaged in ("", '["dict"]', '["SplitPlan", 1]', '["other"]', "[" * 9999):
        file.write_text(damaged)
        assert plan() == found
    assert plan(llama(3)).size == 3 and len([*plans.iterdir()]) == 2


def test_a_plan_that_cannot_be_kept_is_found_each_time(plans, monkeypatch):
    plans.write_text("a file where the folder was to be")
    assert plan() == plan()
    monkeypatch.setattr(discover, "_written", {}.__getitem__)  # refuses a class of its own
    monkeypatch.setenv("STAGELINE_CACHE", str(plans.parent / "other"))
    assert plan().size == 2 and not (plans.parent / "other").exists()


def test_plans_of_small_models_are_not_kept(plans, monkeypatch):
    monkeypatch.setattr("stageline.stages.rehearsal._SMALL", 5_000_000)
    assert plan().size == 2 and not plans.exists()


def test_another_record_for_whatever_a_plan_depends_on(plans, monkeypatch):
    def other(self, hidden_states, **kwargs):
        return hidden_states, None

    usual = record()
    assert record() == usual and usual.parent == plans
    assert discover._record_of(llama(), "another key") != usual
    changes = [
        (modeling_llama.LlamaAttention, "forward", other),
        (modeling_llama, "apply_rotary_pos_emb", other),
        (discover, "VERSIONS", ("torch",)),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert record() != usual, name
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "another one")
        assert record() != usual
    assert record() == usual


def test_no_record_of_what_has_no_file(plans, monkeypatch):
    changed = llama().model.layers[0].mlp
    with monkeypatch.context() as patch:
        patch.setattr(changed, "forward", changed.forward)
        assert record() is None
    made = type("Made", (torch.nn.Module,), {"__module__": "made_while_it_runs"})
    monkeypatch.setattr(llama().model, "extra", made(), raising=False)
    assert record() is None


def test_all_that_a_plan_may_hold_is_written():
    path = ("a", 0, Key(1), "name")
    slot = Slot(((0, path), ("model.block", ("k", "x"))), ("B", 3, ("T", 2)), torch.bfloat16, True)
    layer = ("items", tuple, (("like", path), ("items", list, (("const", 0.5),)), ("const", None)))
    full = SplitPlan(
        layers="layers",
        size=1,
        owners={"a.weight": frozenset({-1, 1}), "b": frozenset()},
        borders=((slot,), ()),
        picture_borders=None,
        outputs=(layer, ("like", None), ("const", True)),
        around=("model",),
        called={"model": -1},
        seen={"tower": 8},
    )
    assert discover._read(discover._written(full)) == full
    assert discover._read(discover._written(full)).borders[0][0].dims == ("B", 3, ("T", 2))
