"""Generation with images: an evaluation's components against transformers, sample by sample.

The reference is transformers' processor on the text of its chat template, and `model.generate`.
Stageline's path is a saved folder, the builder, rendered prompts and one batch padded on the left.
"""

import pytest
import torch
import transformers
from PIL import Image

from models import builders, devices, generate
from prompt_fn import auto, chat
from stageline.data.batches.batch import render_sample
from stageline.data.text.processor import get_tokenizer, save_processor
from stageline.inference.model_cutter import ModelCutter
from tests.helpers.pictured_prompts import picture, tiny_parts
from tests.helpers.tiny_models import TYPICAL_VISION

FAMILIES = (*TYPICAL_VISION, "mllama")
NEW_TOKENS = 10
PROMPT = "[IMAGE]\n[QUESTION][ANSWER]"
# width, height of each sample's images; questions of several lengths
SIZES = (((20, 30),), (), ((64, 33), (16, 16)), ((40, 90),), ((16, 16), (60, 20), (20, 60)))
QUESTIONS = (
    "Which digit?",
    "Is the cat left of the dog, yes or no?",
    "What is it?",
    "true",
    "What digit do you see? Answer: 7 or not 7",
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    """Return a saved model whose answers depend on its images."""
    try:
        processor, config = tiny_parts(request.param)
    except ImportError as error:  # older releases of transformers need torchvision for some
        pytest.skip(str(error))
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(2.0)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    save_processor(processor, path)
    return path


def samples():
    return [
        ([picture(size) for size in sizes], {"id": str(i), "question": question, "answer": ""})
        for i, (sizes, question) in enumerate(zip(SIZES, QUESTIONS, strict=True))
    ]


def our_answers(model, processor, rows):
    prompts = [
        render_sample(
            images, sample, prompt=PROMPT, prompt_fn=chat, image_token=auto, processor=processor,
            for_generation=True,
        )
        for images, sample in rows
    ]  # fmt: skip
    answers = generate.generate(
        model,
        processor,
        images=[images for images, _ in rows],
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
    )
    return [answer["token_ids"] for answer in answers]


def library_answer(model, processor, images, sample, *, stop_ids):
    """Answer one sample with transformers only."""
    content = [{"type": "image"}] * len(images)
    content.append({"type": "text", "text": sample["question"]})
    if not images:
        content = sample["question"]
    text = get_tokenizer(processor).apply_chat_template(
        [{"role": "user", "content": content}],
        chat_template=processor.chat_template,
        add_generation_prompt=True,
        tokenize=False,
    )
    inputs = processor(
        text=[text],
        images=[images] if images else None,
        add_special_tokens=False,
        return_tensors="pt",
    )
    output = model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=stop_ids
    )
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    ends = [place for place, token in enumerate(tokens) if token in stop_ids]
    return tokens[: ends[0]] if ends else tokens


def test_answers_equal_the_librarys(folder):
    model, processor, device_map = builders.auto(str(folder), device="cpu")
    assert device_map == {"": "cpu"}
    plain = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    rows = samples()
    found = our_answers(model, processor, rows)
    expected = [library_answer(plain.eval(), processor, *row, stop_ids=[2]) for row in rows]
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 3, "equal answers would show nothing"
    others = [([Image.new("RGB", i.size) for i in images], s) for images, s in rows]
    blank = our_answers(model, processor, others)
    changed = [a != b for a, b in zip(found, blank, strict=True)]
    assert not changed[1] and sum(changed) >= 3, "the images must matter"
    texts = [([], sample) for _, sample in rows]
    assert our_answers(model, processor, texts) == [
        library_answer(plain, processor, *row, stop_ids=[2]) for row in texts
    ]


def test_a_cut_model_answers_the_same(folder, monkeypatch):
    """`cpu` and `disk` in the place of two GPUs: layers there are loaded when they are called.

    So accelerate reads every name of the map, and moves every tensor that a layer takes.
    """
    whole, processor, _ = builders.auto(str(folder), device="cpu")
    device_map = ModelCutter(whole, num_devices=2).device_map()
    two = {key: ("cpu", "disk")[device] for key, device in device_map.items()}
    monkeypatch.setattr(devices, "make_device_map", lambda *_, **__: two)
    cut, _, found_map = builders.auto(str(folder))
    assert found_map == two
    away = {name for name, parameter in cut.named_parameters() if parameter.is_meta}
    assert away and all(".layers." in name for name in away)
    rows = samples()[:3]
    assert our_answers(cut, processor, rows) == our_answers(whole, processor, rows)
