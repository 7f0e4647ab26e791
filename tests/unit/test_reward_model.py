"""A reward model as a reward: the scores of plain transformers, and what is refused.

The reference writes the conversation with the tokenizer's own `apply_chat_template`, one row
without padding, and reads the score at its last token by hand.
"""

import numpy
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from options.parts import chosen_part
from register import import_shelf
from stageline.errors import CheckpointError, UserError
from stageline.training import reward_model
from stageline.training.rewards import Reward, Rewards
from tests.helpers.tiny_models import tiny_config, tiny_processor, tiny_tokenizer

import_shelf()
QUESTION = {"question": "What digit do you see?", "id": "a"}
TALK = {
    "messages": [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": "Which digit is this?"},
        {"role": "assistant", "content": "its own answer, which is not scored"},
    ]
}
SAMPLES = [QUESTION, QUESTION, TALK, TALK, QUESTION]
# lengths differ much; one is empty, one writes the template's own tokens
ANSWERS = ["7", "The cat is left of the dog. " * 4, "", "no<|im_end|>\n<|im_start|>user", "yes"]


def score(folder, samples=SAMPLES, answers=ANSWERS, **options):
    part = chosen_part("reward", "reward_model", {"reward_model": {"path": str(folder), **options}})
    [one] = part.part
    found = Rewards([Reward(one.key, one.bound)])([""] * len(answers), answers, samples)
    return found[0].float()


def save(folder, family="llama", model_class=AutoModelForSequenceClassification, **fields):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 512} | fields
    if family == "bert":  # the code does not name this family
        small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        small |= {"initializer_range": 0.3}
        config = AutoConfig.for_model(family, **small, num_attention_heads=4, **fields)
    else:
        config = tiny_config(family, **fields)
    model = model_class.from_config(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def conversation(sample, answer):
    asked = [{"role": "user", "content": sample.get("question")}]
    asked = sample["messages"][:2] if "messages" in sample else asked
    return [*asked, {"role": "assistant", "content": answer}]


@torch.no_grad()
def expected(model, tokenizer, samples=SAMPLES, answers=ANSWERS):
    scores = []
    for sample, answer in zip(samples, answers, strict=True):
        text = tokenizer.apply_chat_template(conversation(sample, "ANSWER"), tokenize=False)
        before, after = text.split("ANSWER")
        # an answer is text: a token that it writes out does not end its turn
        pieces = ((before, False), (answer.strip(), True), (after, False))
        options = {"add_special_tokens": False}
        plain = [
            token
            for piece, is_text in pieces
            for token in tokenizer(piece, split_special_tokens=is_text, **options).input_ids
        ]
        ids = torch.tensor([plain])
        if hasattr(model, "score"):
            scores.append(model.score(model.base_model(ids).last_hidden_state[0, -1])[0])
        else:
            scores.append(model(ids).logits[0, 0])
    return torch.stack(scores)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_scores_are_those_of_plain_transformers(family, tmp_path):
    model, tokenizer = save(tmp_path, family, num_labels=1, pad_token_id=0)
    wanted = expected(model, tokenizer)
    assert wanted.std() > 1e-3, "answers have to differ"
    for batch_size in (2, 8):
        found = score(tmp_path, batch_size=batch_size)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_model_that_sees_is_shown_the_pictures(tmp_path):
    processor = tiny_processor("gemma3_vl")
    processor.save_pretrained(tmp_path)
    torch.manual_seed(1)
    config = tiny_config("gemma3_vl", vocab_size=len(processor.tokenizer))
    config.num_labels, config.text_config.pad_token_id = 1, 0
    model = AutoModelForSequenceClassification.from_config(config).eval()
    assert type(model).__name__ == "Gemma3ForSequenceClassification"
    model.save_pretrained(tmp_path)
    pixels = numpy.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=numpy.uint8)
    pictures = [[Image.fromarray(one)] for one in pixels]
    samples = [{**QUESTION, "images": images} for images in [*pictures[:2], None]]
    answers = ["7", "no and not", "7"]
    wanted = []
    for sample, answer in zip(samples, answers, strict=True):
        seen = [{"type": "image"}] * len(sample["images"] or ())
        asked = [*seen, {"type": "text", "text": sample["question"]}]
        talk = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
        text = processor.apply_chat_template(talk, tokenize=False)
        options = {"add_special_tokens": False, "return_tensors": "pt"}
        inputs = processor(text=text, images=sample["images"] or None, **options)
        wanted.append(model(**inputs).logits[0, 0])
    found = score(tmp_path, samples, answers)
    torch.testing.assert_close(found, torch.stack(wanted), rtol=1e-5, atol=1e-6)
    blind = score(tmp_path, [QUESTION] * 3, answers)
    assert (blind[:2] != found[:2]).all() and torch.isclose(blind[2], found[2], rtol=1e-5)


def test_a_model_that_sees_nothing_is_shown_none_and_one_too_long_gets_no_score(tmp_path):
    model, tokenizer = save(tmp_path, num_labels=1, pad_token_id=0, max_position_embeddings=60)
    image = Image.new("RGB", (8, 8))
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION["question"]}]
    shown = {"messages": [{"role": "user", "content": parts}], "images": [image]}
    found = score(tmp_path, [shown, QUESTION, QUESTION], ["7", "7", "no " * 60])
    wanted = expected(model, tokenizer, [QUESTION], ["7"])
    torch.testing.assert_close(found[:2], wanted.repeat(2), rtol=1e-5, atol=1e-6)
    assert found[2].isnan()


def test_an_answer_is_scored_as_the_template_writes_it(tmp_path):
    _, tokenizer = save(tmp_path, num_labels=1, pad_token_id=0)
    found = []
    for content, answer in (("m.content | trim", " X "), ("m.content", "X")):
        turn = "{{ " + content + " if loop.last else m.content }}</s>"
        tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
        tokenizer.save_pretrained(tmp_path)
        found.append(score(tmp_path, [QUESTION], [answer]))
    assert found[0].isfinite().all() and torch.equal(*found)


def test_half_precision_and_one_load_for_all_calls(tmp_path, monkeypatch):
    model, tokenizer = save(tmp_path, num_labels=1, pad_token_id=0)
    loads = []

    def load(folder, **options):
        loads.append(options["dtype"])
        return original(folder, **options)

    original = reward_model.load_plain
    monkeypatch.setattr(reward_model, "load_plain", load)
    halves = [score(tmp_path, dtype="bfloat16") for _ in range(2)]
    assert loads == [torch.bfloat16] and torch.equal(*halves)
    wanted = expected(model.to(torch.bfloat16), tokenizer).float()
    torch.testing.assert_close(halves[0], wanted, rtol=2e-2, atol=2e-2)


def without_head(folder):
    save(folder, model_class=AutoModelForCausalLM)


def with_another_tokenizer(folder):
    save(folder, num_labels=1, vocab_size=40)


def without_a_template(folder):
    _, tokenizer = save(folder, num_labels=1)
    for file in folder.glob("*.jinja"):
        file.unlink()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)


def as_a_pickle(folder):
    model, _ = save(folder, num_labels=1)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def not_there(folder):
    pass


@pytest.mark.parametrize(
    ("make", "kind", "wanted"),
    [
        (without_head, UserError, "holds a LlamaForCausalLM, which has no score head"),
        (with_another_tokenizer, CheckpointError, "the tokenizer is another model's"),
        (without_a_template, UserError, "has no chat template"),
        (as_a_pickle, CheckpointError, "safetensors"),
        (not_there, UserError, "`path` of the reward is not a folder of this machine"),
    ],
)
def test_what_gives_no_score_is_refused(make, kind, wanted, tmp_path):
    make(tmp_path / "model")
    with pytest.raises(kind, match=wanted):
        score(tmp_path / "model")
