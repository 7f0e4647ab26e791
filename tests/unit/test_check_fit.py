"""Weights that do not fit the configuration in their folder are found without a run."""

import json

import pytest

import pp_models  # noqa: F401 (puts the parts on the shelf)
from commands.stages import StageBuilder
from options.parts import chosen_part
from stageline.errors import CheckpointError
from tests.helpers.tiny_checkpoints import tiny_whole


def builder(folder, key="causal_lm"):
    return StageBuilder(chosen_part("train_model", key), str(folder), 2, str(folder))


def change(folder, **fields):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    assert fields.keys() <= config.keys()
    path.write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("gpt2", True), ("mixtral", False), ("gemma2", True)]
)
def test_the_weights_of_a_model_fit_it(family, tied, tmp_path):
    tiny_whole(family, tmp_path, tied=tied)
    builder(tmp_path).check_fit()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 2**40}, r"lm_head.weight \(file .*, model \[1099511627776, 16\]"),
        ({"intermediate_size": 40}, r"down_proj.weight \(file .*, model \[16, 40\]"),
        ({"num_hidden_layers": 3}, "9 names belong to no model: model.layers.3."),
        ({"num_hidden_layers": 5}, "9 names are missing: model.layers.4."),
    ],
)
def test_weights_of_another_model_are_refused(fields, words, tmp_path):
    tiny_whole("llama", tmp_path)
    change(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=words):
        builder(tmp_path).check_fit()
