"""Likelihoods of answers about pictures, against the library's processor and model, row by row."""

import numpy
import pytest
import torch
import transformers
from PIL import Image

from models.likelihood import loglikelihood
from prompt_fn import auto, fill
from stageline.data.batch import render_sample
from stageline.data.processor import get_tokenizer
from stageline.testing.tiny_mllama import tiny_mllama_config, tiny_mllama_processor
from stageline.testing.tiny_models import tiny_config
from stageline.testing.tiny_processors import tiny_processor

SIZES = (((20, 30),), ((64, 33), (16, 16)), ((40, 90),))
QUESTIONS = ("Which digit?", "Is the cat left of the dog, yes or no?", "What is it?")
CHOICES = ["yes", "not the cat, the dog"]


def tiny_parts(family):
    if family == "mllama":
        processor, make = tiny_mllama_processor(), tiny_mllama_config
    else:
        processor, make = tiny_processor(family), lambda **fields: tiny_config(family, **fields)
    size = len(get_tokenizer(processor))
    return processor, make(vocab_size=size, max_position_embeddings=1024)


def picture(size):
    generator = numpy.random.default_rng(sum(size))
    return Image.fromarray(generator.integers(0, 256, (size[1], size[0], 3), dtype=numpy.uint8))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3_vl", "mllama"])
def test_choices_about_pictures(family):
    try:
        processor, config = tiny_parts(family)
    except ImportError as error:  # older releases of the library want torchvision for some
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
