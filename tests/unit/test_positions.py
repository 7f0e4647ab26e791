"""The longest row of a model, found from its table of positions: as many tokens as it reads."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from stageline.data.text.rendered import Piece, Rendered
from stageline.inference.generation import (
    ScoredRow,
    generate,
    longest_row,
    num_positions,
    score_rows,
)
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer
from tools.tiny_model import make

# positions of a model minus max_position_embeddings
LENGTHS = {"roberta": -2, "opt": 0, "llama": 0}


@pytest.mark.parametrize("family", LENGTHS)
def test_a_row_of_as_many_tokens_is_read_and_no_longer_one(family):
    torch.manual_seed(0)
    config = make(family)[0] if family != "llama" else tiny_config(family)
    config.is_decoder = True
    model = AutoModelForCausalLM.from_config(config).eval()
    longest = num_positions(model)
    assert longest == config.max_position_embeddings + LENGTHS[family]
    assert longest == num_positions(config) == longest_row(model)
    ids = torch.full((1, longest + 1), 9)
    assert model(ids[:, :-1]).logits.shape[1] == longest
    if family != "llama":  # rotary positions have no end
        with pytest.raises((IndexError, RuntimeError)):
            model(ids)


def test_a_roberta_answers_and_scores_rows_up_to_its_end():
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = make("roberta")[0]
    config.update({"is_decoder": True, "vocab_size": 400, "max_position_embeddings": 20})
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [Rendered((Piece(text, is_user=True),), for_generation=True) for text in "ab"]
    answers = generate(model, tokenizer, prompts=prompts, images=[None] * 2, max_new_tokens=99)
    assert [len(answer["token_ids"]) for answer in answers if "error" not in answer]
    row = ScoredRow([9] * 19, 18)  # the last token is not read
    (found,) = score_rows(model, tokenizer, [row], num_together=1)
    assert len(found.logprobs) == 18


def test_a_configuration_that_says_nothing_has_no_end():
    assert num_positions(PretrainedConfig()) is None
