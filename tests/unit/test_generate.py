"""Batched generation against the library's generate, one prompt at a time."""

import pytest
import torch
from transformers import GenerationConfig

from stageline.checking.tiny_models import tiny_config, tiny_tokenizer
from stageline.data.text.rendered import Piece, Rendered
from stageline.inference.generation import encode_prompts, generate
from tests.helpers.tiny_checkpoints import auto_class

TEXTS = ("Which digit is this?", "true", "What digit do you see? Answer: 7 or not 7, and why")


def prompts():
    return [
        Rendered((Piece("Question: "), Piece(text, is_user=True)), for_generation=True)
        for text in TEXTS
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3"])
def test_a_left_padded_batch_equals_single_prompts(family):
    tokenizer = tiny_tokenizer()
    torch.manual_seed(5)
    config = tiny_config(family, vocab_size=len(tokenizer))
    model = auto_class(family).from_config(config).eval()
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


def test_padding_is_on_the_left():
    batch = encode_prompts(prompts(), [None] * 3, processor=tiny_tokenizer())
    lengths = batch["attention_mask"].sum(dim=1)
    assert lengths[1] < lengths[0]
    assert batch["attention_mask"][:, -1].tolist() == [1, 1, 1]
    assert batch["attention_mask"][1, 0] == 0


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
