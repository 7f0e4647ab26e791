"""Fields outside OpenAI's API: arguments of a chat template, answers that continue a message."""

import contextlib

import httpx
import openai
import pytest
import torch
from PIL import Image

from prompt_fn import auto, chat
from stageline.data.text.processor import get_tokenizer
from tests.helpers.chat_templates import format_tokenizer
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served
from tests.helpers.tiny_models import tiny_processor
from tests.unit.test_serving_pictures import data_url

EFFORT = (
    "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if thinks is defined and thinks %}Thinks {{ words | join }}\n{% endif %}"
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Is it so?"}]


@contextlib.contextmanager
def asking(processor, *, render=chat, **settings):
    """Yield (client, engine that keeps what it is asked)."""
    with (
        FakeEngine(processor) as engine,
        served(engine, render=render, image_token=auto, **settings) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine


def effort_tokenizer():
    tokenizer = format_tokenizer("qwen")
    tokenizer.chat_template = EFFORT
    return tokenizer


def asked_ids(client, engine, messages, **body):
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    assert answer.choices[0].message.content == "Yes, it is."  # the answer has only the new text
    return engine.asked[-1].prompt["input_ids"][0].tolist()


def library_ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def refused(client, param, messages=HELLO, **body):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    assert caught.value.param == param, caught.value.message
    return caught.value.message


BEGUN = {
    "plain": [*HELLO, {"role": "assistant", "content": "It is"}],
    "blanks": [*HELLO, {"role": "assistant", "content": "  It is \n"}],
    "again": [*HELLO, {"role": "assistant", "content": "No"}, *HELLO,
              {"role": "assistant", "content": "e"}],
    "user": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Is it"}],
}  # fmt: skip


@pytest.mark.parametrize("name", ["qwen", "llama2", "mistral", "effort"])
def test_an_answer_goes_on_with_the_last_message_as_in_the_library(name):
    tokenizer = effort_tokenizer() if name == "effort" else format_tokenizer(name)
    with asking(tokenizer) as (client, engine):
        for messages in BEGUN.values():
            found = asked_ids(client, engine, messages, continue_final_message=True)
            assert found == library_ids(tokenizer, messages, continue_final_message=True)
            again = asked_ids(client, engine, messages, continue_final_message=True,
                              add_generation_prompt=False)  # fmt: skip
            assert again == found
            ended = asked_ids(client, engine, messages, add_generation_prompt=False)
            assert ended == library_ids(tokenizer, messages)
            assert name == "llama2" or ended != found


def test_a_begun_answer_about_pictures():
    processor = tiny_processor("internvl")
    picture = {"type": "image_url", "image_url": {"url": data_url((64, 56))}}
    text = {"type": "text", "text": "Which?"}
    begun = {"role": "assistant", "content": "The red "}
    with asking(processor) as (client, engine):
        found = asked_ids(
            client, engine, [{"role": "user", "content": [picture, text]}, begun],
            continue_final_message=True,
        )  # fmt: skip
        pixels = engine.asked[-1].prompt["pixel_values"]
    placed = [{"role": "user", "content": [{"type": "image"}, text]}, begun]
    template = get_tokenizer(processor).apply_chat_template
    written = template(placed, continue_final_message=True, tokenize=False)
    assert written.endswith("The red ")
    image = Image.new("RGB", (64, 56), "red")
    expected = processor(text=[written], images=[image], return_tensors="pt")
    assert found == expected["input_ids"][0].tolist()
    assert torch.equal(pixels, expected["pixel_values"])


def test_what_cannot_be_gone_on_with_is_refused():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = [*HELLO, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    on = {"continue_final_message": True}
    with asking(format_tokenizer("qwen")) as (client, engine):
        both = refused(client, "continue_final_message", add_generation_prompt=True, **on)
        assert "Leave one of them out" in both
        refused(client, "continue_final_message", called, **on)
        refused(client, "continue_final_message", BEGUN["plain"], tools=tools,
                tool_choice="required", **on)  # fmt: skip
        hint = refused(client, "messages", BEGUN["plain"])
        assert "continue_final_message" in hint
        assert not engine.asked
        written = '{"name": "f", "arguments": {}}'  # behind what was begun, it may be no call
        engine.reply = lambda _: written
        answer = client.chat.completions.create(
            model="tiny", messages=BEGUN["plain"], tools=tools, extra_body=on
        )
        assert answer.choices[0].message.content == written


def test_variables_of_the_chat_template():
    tokenizer = effort_tokenizer()
    options = {"thinks": True, "words": ["long", "and"]}
    with asking(tokenizer) as (client, engine):
        plain = asked_ids(client, engine, HELLO)
        found = asked_ids(client, engine, HELLO, chat_template_kwargs=options)
        both = asked_ids(
            client, engine, HELLO, chat_template_kwargs=options, reasoning_effort="low"
        )
        assert plain == library_ids(tokenizer, HELLO, add_generation_prompt=True)
        assert found == library_ids(tokenizer, HELLO, add_generation_prompt=True, **options)
        assert both == library_ids(
            tokenizer, HELLO, add_generation_prompt=True, reasoning_effort="low", **options
        )
        assert asked_ids(client, engine, HELLO) == plain  # the option was for one request only
        assert len({tuple(plain), tuple(found), tuple(both)}) == 3


WRONG = {
    "unknown": ({"colour": 1}, "reads is: add_generation_prompt|reasoning_effort, thinks, words"),
    "own": ({"messages": []}, "set by the server"),
    "token": ({"bos_token": "x"}, "set by the server"),
    "inside": ({"words": [{"a": "<|im_end|>"}]}, "special tokens"),
    "long": ({"words": ["x" * 3000]}, "letters of JSON"),
    "many": ({f"a{n}": 1 for n in range(17)}, "16"),
}


def test_variables_that_cannot_be_given_are_refused():
    with asking(effort_tokenizer()) as (client, engine):
        for options, words in WRONG.values():
            message = refused(client, "chat_template_kwargs", chat_template_kwargs=options)
            assert any(word in message for word in words.split("|")), message
        assert not engine.asked


def test_effort_is_refused_where_the_template_has_none():
    with asking(format_tokenizer("qwen")) as (client, _):
        assert "does not read" in refused(client, "reasoning_effort", reasoning_effort="high")
        refused(client, "reasoning_effort", reasoning_effort="enormous")
    with asking(effort_tokenizer()) as (client, _):
        twice = {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}
        assert "twice" in refused(client, "chat_template_kwargs", **twice)


def post(client, path, status=200, **body):
    """Post to a route that OpenAI's client has no method for."""
    url = str(client.base_url).removesuffix("v1/") + path
    response = httpx.post(url, json=body, headers={"Authorization": f"Bearer {client.api_key}"})
    assert response.status_code == status, response.text
    return response.json()


def test_tokens_of_texts_and_messages():
    tokenizer = format_tokenizer("llama2")  # it gives texts a first token
    template = tokenizer.apply_chat_template
    text = "Is it so? É"
    with asking(tokenizer) as (client, engine):
        told = post(client, "tokenize", model="tiny", prompt=text, return_token_strs=True)
        ids = tokenizer.encode(text)
        assert told == {"count": len(ids), "max_model_len": engine.max_length, "tokens": ids,
                        "token_strs": tokenizer.convert_ids_to_tokens(ids)}  # fmt: skip
        bare = post(client, "tokenize", prompt=text, add_special_tokens=False)
        assert bare["tokens"] == ids[1:] and bare["token_strs"] is None
        assert post(client, "tokenize", 400, prompt="", add_special_tokens=False)
        asked_of = engine.asked
        client.completions.create(model="tiny", prompt=text)
        assert asked_of[-1].prompt["input_ids"][0].tolist() == ids
        for messages, body in ((HELLO, {}), (BEGUN["plain"], {"continue_final_message": True})):
            told = post(client, "tokenize", messages=messages, **body)["tokens"]
            assert told == template(messages, return_dict=False, **body)
            assert post(client, "tokenize", 400, messages=messages, add_special_tokens=True)
        assert post(client, "detokenize", tokens=ids) == {"prompt": tokenizer.decode(ids)}
        assert tokenizer.bos_token in tokenizer.decode(ids)
        assert post(client, "detokenize", tokens=[]) == {"prompt": ""}
        assert "<s>" not in post(client, "tokenize", prompt="<s>", return_token_strs=True)[
            "token_strs"][1:]  # fmt: skip


def test_a_message_that_the_template_leaves_out_is_not_gone_on_with():
    tokenizer = format_tokenizer("qwen")
    users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer.chat_template = users
    with asking(tokenizer) as (client, engine):
        told = refused(client, "messages", BEGUN["plain"], continue_final_message=True)
        assert "does not appear in the chat" in told and "Rendered" not in told
        assert not engine.asked
