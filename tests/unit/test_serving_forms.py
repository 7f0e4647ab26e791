"""Answers of a form that a request asks for, over HTTP: JSON and tool calls of a random model."""

import contextlib
import json
import re
import sys
import threading

import openai
import pytest

import pp_models  # noqa: F401 (puts the parts on the shelf)
from prompt_fn import auto, chat
from register import train_model_register
from stageline.checkpoint.load import quiet
from tests.helpers.chat_templates import FORMATS, format_tokenizer
from tests.helpers.decoding_engines import local_engine
from tests.helpers.served import served
from tests.helpers.tiny_checkpoints import tiny_whole
from tests.helpers.tiny_models import TEXTS
from tests.helpers.tiny_tokenizers import tiny_metaspace_tokenizer

pytest.importorskip("llguidance")
checker = pytest.importorskip("jsonschema_rs")

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rome"]}, "days": {"type": "integer", "maximum": 9,
                                                                "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
PAIR = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}},
        "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "pair": PAIR}


def tool(name, **options):
    function = {"name": name, "parameters": SCHEMAS.get(name), **options}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather"), tool("pair")]


def tokenizer_of(name):
    if name != "mistral":
        return format_tokenizer(name)
    letters = '[{"name": "get_weather", "arguments": {"city": "Köln", "days": 123456789}}, ]'
    return tiny_metaspace_tokenizer(
        [*TEXTS, *[letters, "pair false true Rome\n\t"] * 20],
        special_tokens=FORMATS[name].special_tokens,
        chat_template=FORMATS[name].template,
    )


@contextlib.contextmanager
def client_of(name, folder):
    """Return a client of a server of an untrained model."""
    tokenizer = tokenizer_of(name)
    with quiet():
        tiny_whole("llama", folder, noise=0.1, vocab_size=len(tokenizer) + 5,
                   max_position_embeddings=2048)  # fmt: skip
        stage, _, _ = train_model_register["causal_lm"](
            config_path=None, processor_path=None, checkpoint_path=str(folder), stage=0,
            num_stages=1, is_piece=True,
        )  # fmt: skip
    engine = local_engine([stage], tokenizer, max_rows=4, max_length=2048)
    engine.stop_ids = (tokenizer.eos_token_id,)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    try:
        with (
            served(engine, render=chat, image_token=auto) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client
            assert engine.is_healthy
    finally:
        engine.stop()
        thread.join(10)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with client_of("qwen", tmp_path_factory.mktemp("qwen")) as made:
        yield made


def ask(client, **options):
    options = {"max_tokens": 600, "seed": 3, "temperature": 1.5, **options}
    messages = [{"role": "user", "content": "Hi"}]
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def as_json(schema, **options):
    body = {"name": "thing", "schema": schema, **options}
    return {"response_format": {"type": "json_schema", "json_schema": body}}


def test_json_of_a_schema(client):
    strict = {"strict": True}
    answer = ask(client, n=3, **as_json(WEATHER, **strict))
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and choice.message.tool_calls is None
        assert checker.is_valid(WEATHER, json.loads(choice.message.content))
    assert len({choice.message.content for choice in answer.choices}) == 3
    chunks = [c.choices[0] for c in ask(client, stream=True, **as_json(WEATHER, **strict))]
    told = "".join(chunk.delta.content or "" for chunk in chunks)
    assert told == answer.choices[0].message.content
    cut = ask(client, max_tokens=3, **as_json(WEATHER)).choices[0]
    assert cut.finish_reason == "length" and cut.message.content


def test_a_json_object_and_plain_text(client):
    # so that the model, which knows nothing, comes to an end
    object_only = {"response_format": {"type": "json_object"}}
    bias = {str(client_id): 12 for client_id in ids_of("}", '"')}
    content = ask(client, **object_only, logit_bias=bias, max_tokens=1500).choices[0]
    assert content.finish_reason == "stop" and isinstance(json.loads(content.message.content), dict)
    text = ask(client, response_format={"type": "text"}, max_tokens=9)
    assert text.choices[0].message.content == ask(client, max_tokens=9).choices[0].message.content


def ids_of(*texts):
    return [format_tokenizer("qwen").convert_tokens_to_ids(text) for text in texts]


def calls_of(choice):
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    for call in choice.message.tool_calls:
        assert checker.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    return [call.function.name for call in choice.message.tool_calls]


def test_forced_calls(client):
    several = {"tools": TOOLS, "tool_choice": "required", "n": 6}
    several["logit_bias"] = {str(ids_of("</s>")[0]): 1}  # so that it comes to an end
    answers = [calls_of(choice) for choice in ask(client, **several).choices]
    assert {name for names in answers for name in names} == set(SCHEMAS)
    assert max(map(len, answers)) > 1
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    assert [len(calls_of(c)) for c in ask(client, n=6, **options).choices] == [1] * 6
    chunks = [c.choices[0] for c in ask(client, stream=True, **options)]
    [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert checker.is_valid(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_named_tool_is_called_once(client):
    name = "pair"
    choice = {"type": "function", "function": {"name": name}}
    for one in ask(client, tools=TOOLS, tool_choice=choice, n=3).choices:
        assert calls_of(one) == [name]


def test_a_tool_without_parameters(client):
    bare = [{"type": "function", "function": {"name": "now"}}]
    options = {"tools": bare, "tool_choice": "required", "parallel_tool_calls": False}
    for choice in ask(client, n=6, **options).choices:
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {})


def test_strict_tools_leave_text_free_and_bind_calls(client):
    strict = [tool("get_weather", strict=True)]
    [mark, end] = ids_of("<tool_call>", "</s>")
    # calls of tools that are not strict are not checked
    loose = [*strict, tool("pair", parameters={"type": "array"})]
    free = ask(client, tools=loose, n=3, logit_bias={str(mark): -100, str(end): 100})
    assert [c.message.tool_calls for c in free.choices] == [None] * 3
    assert {c.finish_reason for c in free.choices} == {"stop"}
    # text, then a call: the mark is made likely among all tokens
    bias = {str(mark): 4, str(end): -100}
    found = ask(client, tools=strict, n=4, logit_bias=bias, parallel_tool_calls=False).choices
    assert any(c.message.content for c in found)
    for choice in found:
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert checker.is_valid(WEATHER, json.loads(call.function.arguments))


def test_json_or_calls(client):
    [mark] = ids_of("<tool_call>")
    strict = [tool(name, strict=True) for name in SCHEMAS]
    both = {"tools": strict, **as_json(PAIR), "n": 3, "parallel_tool_calls": False}
    for choice in ask(client, logit_bias={str(mark): 100}, **both).choices:
        calls_of(choice)
    for choice in ask(client, logit_bias={str(mark): -100}, **both).choices:
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"
        assert checker.is_valid(PAIR, json.loads(choice.message.content))


NOT = {"type": "object", "not": {"required": ["x"]}}
REFUSED = {
    "what can't be kept to": (
        as_json(NOT, strict=True), "response_format.json_schema.schema", r'\["not"\]'),
    "no such tool": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice", "'rm'"),
    "a strict tool": (
        {"tools": [TOOLS[0], tool("f", parameters=NOT, strict=True)]},
        "tools.1.function.parameters", r'\["not"\]'),
}  # fmt: skip


def test_what_cannot_be_kept_to_is_refused_with_its_field(client):
    for options, param, text in REFUSED.values():
        with pytest.raises(openai.BadRequestError, match=text) as caught:
            ask(client, **options)
        assert caught.value.param == param


def test_loose_schemas_and_tools_are_kept_to_as_far_as_can_be(client):
    loose = {**PAIR, "not": {"required": ["x"]}}
    content = ask(client, **as_json(loose)).choices[0].message.content
    assert checker.is_valid(PAIR, json.loads(content))
    options = {"tools": [tool("pair", parameters=loose)], "tool_choice": "required"}
    assert set(calls_of(ask(client, **options).choices[0])) == {"pair"}


def test_without_the_library_only_such_requests_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with client_of("qwen", tmp_path) as client:
        asked = {
            "response_format": {"response_format": {"type": "json_object"}},
            "tools.0.function.parameters": {"tools": TOOLS, "tool_choice": "required"},
        }
        for param, options in asked.items():
            with pytest.raises(openai.BadRequestError, match="pip install llguidance") as caught:
                ask(client, **options)
            assert caught.value.param == param
        assert ask(client, tools=TOOLS, max_tokens=3).choices[0].finish_reason == "length"


def test_forced_calls_in_another_format(tmp_path):
    name = "mistral"
    with client_of(name, tmp_path) as client:
        options = {"tools": TOOLS, "tool_choice": "required", "n": 8, "temperature": 2}
        [end] = tokenizer_of(name).convert_tokens_to_ids(["]"])
        options["logit_bias"] = {str(end): 8}  # so that a list comes to an end
        found = [calls_of(choice) for choice in ask(client, **options).choices]
        assert {name for names in found for name in names} == set(SCHEMAS)
        single = ask(client, parallel_tool_calls=False, **options).choices
        assert [len(calls_of(choice)) for choice in single] == [1] * 8
        with pytest.raises(openai.BadRequestError, match="can't be told from other text") as caught:
            ask(client, tools=[tool("pair", strict=True)])
        assert caught.value.param == "tools"


def test_a_format_of_its_own_is_refused(tmp_path):
    with client_of("channels", tmp_path) as client:
        with pytest.raises(openai.BadRequestError, match="a format of its own") as caught:
            ask(client, tools=TOOLS, tool_choice="required")
        assert caught.value.param == "tool_choice"
        assert ask(client, max_tokens=2, **as_json(PAIR)).choices[0].message.content


FORMS = {
    "json": (WEATHER, lambda text: checker.is_valid(WEATHER, json.loads(text))),
    "regex": ("[ab]{3}-[0-9]", lambda text: re.fullmatch("[ab]{3}-[0-9]", text)),
    "choice": (["so", 'Köln "b"\n', "so so"], lambda text: text in ["so", 'Köln "b"\n', "so so"]),
    "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
}


@pytest.mark.parametrize("kind", FORMS)
def test_forms_as_vllm_spells_them(client, kind):
    value, is_right = FORMS[kind]
    bodies = [{"structured_outputs": {kind: value}}]
    if kind != "json_object":
        bodies.append({f"guided_{kind}": value})
    bias = {str(i): 12 for i in ids_of("}", '"')} if kind == "json_object" else {}
    options = {"max_tokens": 1500, "temperature": 1.5, "seed": 5, "logit_bias": bias}
    for body in bodies:
        choices = ask(client, n=2, extra_body=body, **options).choices
        texts = [choice.message.content for choice in choices]
        more = client.completions.create(model="tiny", prompt="Hi", extra_body=body, **options)
        texts += [choice.text for choice in more.choices]
        assert all(is_right(text) for text in texts), texts


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("guided_json", {"guided_json": PAIR, **as_json(PAIR)}),
        ("guided_json", {"guided_json": "{"}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("min_tokens", {"guided_regex": "a+", "min_tokens": 3}),
    ],
)
def test_forms_that_cannot_be_are_refused(client, param, body):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=body)
    assert caught.value.param == param
    if "response_format" not in body:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny", prompt="Hi", extra_body=body, max_tokens=9)
