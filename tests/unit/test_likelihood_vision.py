"""Likelihoods of answers about images, against transformers' processor and model, row by row."""

import pytest
import torch
import transformers

from models.likelihood import loglikelihood
from prompt_fn import auto, fill
from stageline.data.batches.batch import render_sample
from stageline.data.text.processor import get_tokenizer
from tests.helpers.pictured_prompts import picture, tiny_parts

SIZES = (((20, 30),), ((64, 33), (16, 16)), ((40, 90),))
QUESTIONS = ("Which digit?", "Is the cat left of the dog, yes or no?", "What is it?")
CHOICES = ["yes", "not the cat, the dog"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "mllama"])
def test_choices_about_pictures(family):
    try:
        processor, config = tiny_parts(family)
    except ImportError as error:  # older releases of transformers need torchvision for some
        pytest.skip(str(error))
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    images = [[picture(size) for size in sizes] for sizes in SIZES]
    samples = [
        {"id": str(i), "question": question, "answer": "", "choices": CHOICES}
        for i, question in enumerate(QUESTIONS)
    ]
    texts = {"prompt": "[IMAGE]\n[QUESTION]\nAnswer: [ANSWER]", "prompt_fn": fill}
    texts |= {"image_token": auto, "processor": processor, "for_generation": True}
    prompts = [
        render_sample(row, sample, **texts) for row, sample in zip(images, samples, strict=True)
    ]
    options = {"images": images, "prompts": prompts, "samples": samples, "batch_size": 4}
    # mllama's processor would put it behind the first picture, and its tokenizer add another one
    first = "<s>" if family == "mllama" else ""
    found = dict(loglikelihood(model, processor, **options))
    for place, prompt in enumerate(prompts):
        for choice, own in zip(CHOICES, found[place]["choice_scores"], strict=True):
            inputs = processor(
                text=[f"{first}{prompt.text} {choice}"],
                images=[images[place]],
                return_tensors="pt",
                **({"add_special_tokens": False} if first else {}),
            )
            with torch.no_grad():
                logits = model(**inputs).logits[0].double()
            ids = inputs["input_ids"][0]
            table = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]]
            assert own["logprob"] == pytest.approx(
                table[-own["num_tokens"] :].sum().item(), abs=1e-4
            )
            num_own = len(get_tokenizer(processor).encode(f" {choice}", add_special_tokens=False))
            assert own["num_tokens"] == num_own
