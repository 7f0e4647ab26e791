"""Batched generation against transformers' generate, one prompt at a time."""

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from stageline.cache_trial import cache_name
from stageline.data.text.rendered import Piece, Rendered
from stageline.inference.generation import encode_prompts, generate
from tests.helpers.tiny_checkpoints import auto_class
from tests.helpers.tiny_models import tiny_config, tiny_tokenizer

TEXTS = ("Which digit is this?", "true", "What digit do you see? Answer: 7 or not 7, and why")


def prompts():
    return [
        Rendered((Piece("Question: "), Piece(text, is_user=True)), for_generation=True)
        for text in TEXTS
    ]


def model_of(family, vocab_size, **fields):
    """Return a model with random weights."""
    torch.manual_seed(5)
    if family != "opt":  # OPT's positions begin at 2, and are counted from the attention mask
        config = tiny_config(family, vocab_size=vocab_size, **fields)
        return auto_class(family).from_config(config).eval()
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "init_std": 0.4, "pad_token_id": 0, "bos_token_id": 1}
    return OPTForCausalLM(OPTConfig(vocab_size=vocab_size, **sizes, **fields)).eval()


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "opt"])
def test_a_left_padded_batch_equals_single_prompts(family):
    tokenizer = tiny_tokenizer()
    model = model_of(family, len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():  # sharper than a fresh start, so that tokens differ
            parameter.mul_(1.5)
    answers = generate(model, tokenizer, prompts=prompts(), images=[None] * 3, max_new_tokens=12)
    seen = set()
    for text, answer in zip(TEXTS, answers, strict=True):
        ids = tokenizer("Question: " + text, return_tensors="pt")["input_ids"]
        expected = model.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )[0, ids.shape[1] :].tolist()
        if 2 in expected:
            expected = expected[: expected.index(2)]
        assert answer["token_ids"] == expected
        seen.add(tuple(expected))
    assert len(seen) > 1, "equal answers to all prompts would show nothing"


def test_sampling_follows_the_seed():
    tokenizer = tiny_tokenizer()
    model = auto_class("llama").from_config(tiny_config("llama", vocab_size=len(tokenizer)))

    def sample(seed):
        options = {"max_new_tokens": 8, "temperature": 1.0, "seed": seed}
        answers = generate(model, tokenizer, prompts=prompts(), images=[None] * 3, **options)
        return [answer["token_ids"] for answer in answers]

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_folders_own_settings_change_no_answer(temperature):
    """But where answers end: an engine of stages, which does the same, knows of no others."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    model = auto_class("llama").from_config(tiny_config("llama", vocab_size=len(tokenizer))).eval()
    options = {"prompts": prompts(), "images": [None] * 3, "max_new_tokens": 8}
    options |= {"temperature": temperature, "seed": 1}
    plain = generate(model, tokenizer, **options)
    likeliest = [answer["token_ids"][0] for answer in plain]
    own = GenerationConfig(
        num_beams=3, no_repeat_ngram_size=1, suppress_tokens=likeliest, min_p=0.9, eos_token_id=7
    )
    model.generation_config = own
    assert generate(model, tokenizer, **options) == plain and model.generation_config is own
    own.eos_token_id = likeliest[0]
    ended = generate(model, tokenizer, **options)[0]
    assert (ended["token_ids"], ended["finish_reason"]) == ([], "stop")


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_prompts_and_answers_end_where_positions_do(family):
    """Learned ones have no more, and of rotary ones the model has seen no more."""
    tokenizer = tiny_tokenizer()
    limits = dict.fromkeys(["max_position_embeddings", "n_positions"][: 1 + (family == "gpt2")], 24)
    model = model_of(family, len(tokenizer), **limits)
    texts = ("ab", "a b c d e f g h", "", "true or false? " * 9)
    asked = [Rendered((Piece(text, is_user=True),), for_generation=True) for text in texts]
    short, near, empty, beyond = generate(
        model, tokenizer, prompts=asked, images=[None] * 4, max_new_tokens=20
    )
    length = encode_prompts(asked[1:2], [None], processor=tokenizer)["input_ids"].shape[1]
    assert 4 < length < 24
    ids = tokenizer(texts[1], return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = model.generate(
        ids, max_new_tokens=24 - length, do_sample=False, eos_token_id=2, pad_token_id=0
    )[0, length:].tolist()
    assert near["token_ids"] == (expected[: expected.index(2)] if 2 in expected else expected)
    assert "text" in short and "error" not in short
    assert "The prompt has 0 tokens; 1 to 23 fit" in empty["error"]
    assert "tokens; 1 to 23 fit" in beyond["error"]


class Forgetful(LlamaForCausalLM):
    """Its forward takes a cache among other keywords, and keeps none."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids}
        return super().forward(input_ids, **inputs, use_cache=False)


def test_a_model_that_keeps_no_cache_reads_whole_rows():
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    config = tiny_config("llama", vocab_size=len(tokenizer))
    model = Forgetful(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    answers = generate(model, tokenizer, prompts=prompts(), images=[None] * 3, max_new_tokens=8)
    whole = LlamaForCausalLM(config).eval()
    whole.load_state_dict(model.state_dict())
    options = {"images": [None] * 3, "max_new_tokens": 8}
    assert answers == generate(whole, tokenizer, prompts=prompts(), **options)
    assert cache_name(model) is None and cache_name(whole) is not None
