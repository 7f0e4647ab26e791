"""Decoders whose cache or positions are unlike a Llama's: answers and scores of a batch of unequal
prompts on two stages, against passes of the whole model over each row alone.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers

import pp_models  # noqa: F401 (puts the parts on the shelf)
from register import train_model_register
from stageline.cache_trial import cache_name
from stageline.checkpoint.load import quiet
from stageline.data.text.rendered import Piece, Rendered
from stageline.errors import UserError
from stageline.inference.decoding.answer_groups import AnswerLoad, answer_cost
from stageline.inference.decoding.request import Failed, Request, Sampling, ScoreRequest
from stageline.inference.decoding.stage_decoder import StageDecoder, can_keep_logits
from stageline.inference.generation import ScoredRow, generate, score_rows
from stageline.model_folder import special_tokens
from stageline.shrink import shrink_config
from stageline.stages.example_batch import picture_batch
from tests.helpers.decoded_models import text_prompts
from tests.helpers.decoding_engines import built_stages, local_engine
from tests.helpers.family_configs import family_config
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import tiny_tokenizer
from tools.tiny_model import make

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
def log_probs(whole, ids_T, num_targets, **pictures):
    """Return log-probabilities of a row's last tokens, by one pass without a cache."""
    inputs = {"input_ids": ids_T[None, :-1], "attention_mask": torch.ones_like(ids_T[None, :-1])}
    logits = whole(**inputs, use_cache=False, **pictures).logits[0, -num_targets:]
    return logits.log_softmax(-1).gather(1, ids_T[-num_targets:, None])[:, 0]


def noisy(whole, folder):
    """Give the model weights that hide no mistake, and save it."""
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    whole.save_pretrained(folder)
    return whole.eval()


def seeing(family, folder):
    """Return a scaled-down model that reads images."""
    torch.manual_seed(0)
    config = shrink_config(family_config(family), num_layers=4)
    return noisy(transformers.AutoModelForImageTextToText.from_config(config), folder)


def compared(whole, folder, prompts, *, key="causal_lm"):
    """Return the answers of an engine to all prompts, after a check of each number."""
    with quiet():
        stages = built_stages(train_model_register[key], folder, 2, is_piece=True)
    engine = local_engine(stages, tiny_tokenizer(), max_rows=len(prompts), num_groups=1)
    bias = tuple((one, -1e4) for one in sorted(special_tokens(whole.config)))
    sampling = Sampling(max_new_tokens=NUM_TOKENS, stop_token_ids=(), logprobs=0, logit_bias=bias)
    found = {}
    for one in engine.answer(Request(str(i), p, sampling) for i, p in enumerate(prompts)):
        assert not isinstance(one, Failed), one.error
        ids = torch.cat([prompts[int(one.key)]["input_ids"][0], torch.tensor(one.token_ids)])
        names = ("pixel_values", "image_grid_thw")
        pictures = {n: v for n, v in prompts[int(one.key)].items() if n in names}
        expected = log_probs(whole, ids, len(one.token_ids), **pictures)
        logprobs = torch.tensor([each.logprob for each in one.logprobs])
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
        found[int(one.key)] = one
    rows = [
        p["input_ids"] for p in prompts if len(p) == 2 and p["input_ids"].shape[1] > NUM_TARGETS
    ]
    items = [ScoreRequest(str(i), {"input_ids": ids}, NUM_TARGETS) for i, ids in enumerate(rows)]
    short = ScoreRequest("short", items[0].prompt, rows[0].shape[1])
    for scored in engine.score([short, *items]):
        if scored.key == "short":
            assert "a token is scored by those before it" in str(scored.error)
            continue
        expected = log_probs(whole, rows[int(scored.key)][0], NUM_TARGETS)
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=1e-4, atol=1e-4)
    return engine, [found[place] for place in range(len(prompts))]


@pytest.mark.parametrize(
    ("family", "has_cache"),
    # states; a border with more than hidden states; positions from 2 on, of the ids or of the mask;
    # two attentions in a layer
    [
        ("mamba", False),
        ("bloom", False),
        ("roberta", False),
        ("opt", True),
        ("longcat_flash", True),
    ],
)
def test_a_batch_of_unequal_rows(family, has_cache, tmp_path):
    config, tokenizer = make(family)
    torch.manual_seed(0)
    whole = noisy(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    prompts = text_prompts((2, 17, 9), vocab_size=len(tokenizer))
    engine, _ = compared(whole, tmp_path, prompts)
    assert engine.has_cache == has_cache
    if has_cache:  # the estimate before a run counts as many places as the engine's cache has
        load = AnswerLoad(
            3, copies=1, lot_size=3, lots_at_once=1, prompt_tokens=17, answer_tokens=6
        )
        build = train_model_register["causal_lm"]
        [stage] = built_stages(build, tmp_path, 1, is_piece=True, device="meta")
        [decoded] = built_stages(build, tmp_path, 1, is_piece=True)
        token = StageDecoder(decoded).bytes_of_a_token()
        assert answer_cost(stage, [load]).cache == token * load.cells


KEEPING = ("llama", "gemma3_text", "gpt2", "gpt_neox", "falcon", "gpt_oss", "deepseek_v3")
KEEPING += ("mpt", "qwen2_vl", "internvl", "mllama")


def test_families_that_answer_on_a_cache_in_every_version_of_the_library():
    """Find families whose cache argument transformers renamed: each token would reread its row."""
    lacking = []
    for family in KEEPING:
        config = shrink_config(family_config(family), num_layers=4)
        kind = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        with torch.device("meta"):
            model = (kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])(config)
        if cache_name(model) is None or not can_keep_logits(SimpleNamespace(whole=model)):
            lacking.append(family)
    assert lacking == []


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
    prompts = text_prompts((2, 30, 17, 20, 21), vocab_size=len(tokenizer))
    _, answers = compared(whole, tmp_path, prompts)
    assert [len(one.token_ids) for one in answers] == [6, 6, 4, 1, 6], "a pass reads 20 at most"
    assert {one.reason for one in answers} == {"length"}
    # the engine of one process
    rows = [ScoredRow(p["input_ids"][0].tolist(), NUM_TARGETS) for p in prompts[1:]]
    for scored in score_rows(whole, tokenizer, rows, num_together=4):
        expected = log_probs(whole, torch.tensor(rows[int(scored.key)].input_ids), NUM_TARGETS)
        torch.testing.assert_close(torch.tensor(scored.logprobs), expected, rtol=1e-4, atol=1e-4)
    asked = [Rendered((Piece("true or false? " * count),)) for count in (1, 9)]
    options = {"images": [None], "max_new_tokens": NUM_TOKENS}
    alone = [generate(whole, tokenizer, prompts=[one], **options)[0] for one in asked]
    options["images"] = [None, None]
    assert generate(whole, tokenizer, prompts=asked, **options) == alone


def test_positions_of_a_model_that_asks_for_no_kinds_of_tokens(tmp_path):
    whole = seeing("qwen2_5_omni_thinker", tmp_path)
    pictured = picture_batch(whole.config, whole, rows=(2,), dtype=torch.float32, seed=0)
    prompts = (pictured, *text_prompts((5, 9), vocab_size=whole.config.text_config.vocab_size))
    compared(whole, tmp_path, prompts, key="vision_language")


def test_a_prompt_that_is_read_in_both_directions_is_refused(tmp_path):
    """Refuse PaliGemma: without padding, all tokens would be read in both directions."""
    seeing("paligemma", tmp_path)
    [stage] = built_stages(train_model_register["vision_language"], tmp_path, 1, is_piece=True)
    with pytest.raises(UserError, match="both directions"):
        StageDecoder(stage).bytes_of_a_token()
