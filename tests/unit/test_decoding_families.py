"""Decoders whose cache or positions are unlike a Llama's: answers and scores of a batch of unequal
prompts on two stages, against passes of the whole model over each row alone.
"""

import pytest
import torch
import transformers

import pp_models  # noqa: F401 (puts the parts on the shelf)
from commands.tiny import make
from register import train_model_register
from stageline.checking.tiny_models import tiny_tokenizer
from stageline.checkpoint.load import quiet
from stageline.inference.decoding.request import Failed, Request, Sampling, ScoreRequest
from tests.helpers.decoded_models import text_prompts
from tests.helpers.decoding_engines import built_stages, local_engine
from tests.helpers.tiny_checkpoints import tiny_whole

NUM_TOKENS, NUM_TARGETS = 6, 3
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 1.1],
    "long_factor": [2.0, 3.0, 5.0, 4.0],
    "original_max_position_embeddings": 20,
    "factor": 6.4,
}


@torch.no_grad()
def log_probs(whole, ids_T, num_targets):
    """Of the last tokens of a row, by one pass without a cache over all but the last."""
    logits = whole(input_ids=ids_T[None, :-1], use_cache=False).logits[0, -num_targets:]
    return logits.log_softmax(-1).gather(1, ids_T[-num_targets:, None])[:, 0]


def compared(whole, folder, prompts):
    """The answers of an engine to all prompts at once, after each number was compared."""
    with quiet():
        stages = built_stages(train_model_register["causal_lm"], folder, 2)
    engine = local_engine(stages, tiny_tokenizer(), max_rows=len(prompts), num_groups=1)
    sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=(), logprobs=0)
    found = {}
    for one in engine.answer(Request(str(i), p, sampling) for i, p in enumerate(prompts)):
        assert not isinstance(one, Failed), one.error
        ids = torch.cat([prompts[int(one.key)]["input_ids"][0], torch.tensor(one.token_ids)])
        expected = log_probs(whole, ids, len(one.token_ids))
        logprobs = torch.tensor([each.logprob for each in one.logprobs])
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
        found[int(one.key)] = one
    rows = [p["input_ids"] for p in prompts if p["input_ids"].shape[1] > NUM_TARGETS]
    items = (ScoreRequest(str(i), {"input_ids": ids}, NUM_TARGETS) for i, ids in enumerate(rows))
    for scored in engine.score(items):
        expected = log_probs(whole, rows[int(scored.key)][0], NUM_TARGETS)
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=1e-4, atol=1e-4)
    return engine, [found[place] for place in range(len(prompts))]


@pytest.mark.parametrize(
    ("family", "has_cache"),
    # states; no positions of a call; positions from 2 on; two attentions in a layer
    [("mamba", False), ("bloom", False), ("roberta", False), ("longcat_flash", True)],
)
def test_a_batch_of_unequal_rows(family, has_cache, tmp_path):
    config, tokenizer = make(family)
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    whole.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = text_prompts((2, 17, 9), vocab_size=len(tokenizer))
    engine, _ = compared(whole, tmp_path, prompts)
    assert engine.has_cache == has_cache


def test_rows_on_both_sides_of_the_length_where_frequencies_change(tmp_path):
    """LongRoPE: the longest row of a pass would decide for all, and keys would be of two kinds."""
    tokenizer = tiny_tokenizer()
    whole = tiny_whole(
        "phi3",
        tmp_path,
        noise=0.4,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        original_max_position_embeddings=20,
        rope_parameters=LONGROPE,
    )
    tokenizer.save_pretrained(tmp_path)
    prompts = text_prompts((2, 30, 17, 20, 21), vocab_size=len(tokenizer))
    _, answers = compared(whole, tmp_path, prompts)
    assert [len(one.token_ids) for one in answers] == [6, 6, 4, 1, 6], "a pass reads 20 at most"
    assert {one.reason for one in answers} == {"length"}
