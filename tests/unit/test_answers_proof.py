"""The check that answers of stages are the whole model's: its report, its finds, its limits."""

import pytest

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.cache_trial import cache_name
from stageline.distributed.ranks import Ranks
from stageline.errors import UserError
from stageline.inference.decoding.cache import Window
from stageline.inference.decoding.stage_decoder import StageDecoder
from stageline.stages import causal_lm
from stageline.verify.answers import answers
from stageline.verify.scaled_copy import ScaledCopy, verify
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_checkpoints import tiny_whole


@pytest.fixture
def proven(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def prove(family, num_stages=2):
        folder = tmp_path / family
        family_config(family).save_pretrained(folder)
        part = train_model_register["vision_language" if family == "qwen2_vl" else "causal_lm"]
        copy, said = ScaledCopy(part, str(folder), num_stages), []
        verify(copy, {"answers": answers}, mode="auto", ranks=Ranks.of(None), say=said.append)
        return " ".join(said)

    return prove


# windows, a state, whole rows, chosen keys, shared keys, pictures' positions
FAMILIES = ["gemma3_text", "jamba", "roberta", "deepseek_v32", "longcat_flash", "qwen2_vl"]


@pytest.mark.parametrize("family", FAMILIES)
def test_right_answers_are_recorded(proven, family, monkeypatch):
    said = proven(family)
    if family == "longcat_flash" and "cannot be split over stages" in said:
        pytest.skip("transformers 5.17 hands a tensor from layer to layer beside their arguments")
    assert f"answers of {family}" in said and "recorded" in said, said
    monkeypatch.setattr(StageDecoder, "run", None)
    assert proven(family) == "", "nothing is run a second time"


def test_a_cache_that_counts_positions_in_another_way_is_refused(proven, monkeypatch):
    """RoBERTa counts from another number than 0, by ids: stages let it read whole rows."""
    monkeypatch.setattr(causal_lm, "cache_name", lambda _: cache_name(tiny_whole("gpt2")))
    with pytest.raises(UserError, match=r"answers of roberta .* the log-probability of token \d"):
        proven("roberta")


def test_a_row_that_reads_what_another_one_left_is_found(proven, monkeypatch):
    """Rows of unequal lengths: without a mask the shorter one sees its padding."""
    decode = StageDecoder._decode

    def unmasked(self, order, tensors):
        monkeypatch.setattr(Window, "is_ragged", False)
        return decode(self, order, tensors)

    monkeypatch.setattr(StageDecoder, "_decode", unmasked)
    with pytest.raises(UserError, match="are not those of the whole model"):
        proven("llama")


def test_a_model_whose_rows_depend_on_their_batch_is_refused(proven):
    """CPM-Ant counts the padding of a row among its positions."""
    with pytest.raises(UserError, match=r"answers of cpmant .* let transformers answer"):
        proven("cpmant", 1)
