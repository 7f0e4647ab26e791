"""`/v1/responses` as OpenAI's own client and LangChain's see it, beside the same chats."""

import json
import threading
import time

import httpx
import openai
import pytest
from pydantic import BaseModel

from prompt_fn import auto, chat
from stageline.serving.responses import ResponsesRequest, chat_of
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.served import served
from tests.unit.test_serving_openai import CALL, TOKENIZER, WEATHER, reply
from tests.unit.test_serving_pictures import data_url, tiny_processor

FUNCTION = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def server():
    with (
        FakeEngine(TOKENIZER, reply=reply, seconds=0.001) as engine,
        served(engine, render=chat, image_token=auto) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client(server):
    """One that checks each answer against its own types."""
    strict = {"_strict_response_validation": True, "max_retries": 0, "api_key": "none"}
    with openai.OpenAI(base_url=f"{server.url}/v1", **strict) as made:
        yield made


def ask(client, input="Hello", **options):
    return client.responses.create(model="tiny", input=input, **options)


def ask_chat(client, messages, **options):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def last(server):
    """The prompt that reached the engine, and how it is gone on with."""
    request = server.service.engine.asked[-1]
    return request.prompt["input_ids"].tolist(), request.sampling


PICTURELESS = [
    {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"},
                                 {"type": "input_text", "text": "!"}], "type": "message"},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
     "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]},
    {"role": "user", "content": "And?"},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x",
     "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"role": "assistant", "content": "Then."},
    {"role": "user", "content": "weather"},
    {"type": "message", "role": "assistant", "content": "Let me see."},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather",
     "arguments": '{"city": "Rome"}', "status": "completed"},
    {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "function_call_output", "call_id": "c2",
     "output": [{"type": "input_text", "text": "sun"}]},
]  # fmt: skip


def a_call(id, arguments):
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


AS_CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": "Hi!"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Then.", "reasoning_content": "Hm."},
    {"role": "user", "content": "weather"},
    {"role": "assistant", "content": "Let me see.",
     "tool_calls": [a_call("c1", '{"city": "Rome"}'), a_call("c2", "{}")]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_call_id": "c2", "content": "sun"},
]  # fmt: skip


def test_a_request_is_the_chat_that_it_means(client, server):
    own = {"seed": 5, "top_k": 4, "min_p": 0.1, "stop": ["x"], "logit_bias": {"3": -100}}
    shared = {"temperature": 0, "top_p": 0.5, "tools": [WEATHER], "extra_body": own}
    wanted = ask_chat(client, AS_CHAT, max_completion_tokens=7, **shared)
    prompt, sampling = last(server)
    answer = ask(
        client, PICTURELESS, instructions="Be kind.", max_output_tokens=7, user="u", store=True,
        include=["reasoning.encrypted_content"], metadata={"a": "b"}, truncation="disabled",
        background=False, prompt_cache_options={"mode": "implicit"},
        **{**shared, "tools": [FUNCTION]},
    )  # fmt: skip
    assert last(server) == (prompt, sampling)
    assert answer.output_text == wanted.choices[0].message.content
    found, usage = answer.usage, wanted.usage
    assert (found.input_tokens, found.output_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
    )
    assert found.total_tokens == usage.total_tokens
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.instructions, answer.temperature, answer.top_p) == ("Be kind.", 0, 0.5)
    assert (answer.tools[0].name, answer.metadata, answer.store) == (
        "get_weather",
        {"a": "b"},
        False,
    )


def test_thoughts_belong_to_the_answer_after_them():
    # few templates show them
    asked = ResponsesRequest(model="tiny", input=PICTURELESS)
    found = [getattr(message, "reasoning_content", None) for message in chat_of(asked).messages]
    assert found == [None] * 4 + ["Hm."] + [None] * 4


@pytest.mark.parametrize("text", ["Hello", "count"])
def test_whole_and_streamed_answers_are_those_of_chats(client, text):
    same = {"temperature": 0, "extra_body": {"seed": 3}}
    message = ask_chat(client, text, **same).choices[0].message
    whole = ask(client, text, **same)
    assert (whole.status, whole.output_text) == ("completed", message.content)
    assert [item.status for item in whole.output] == ["completed"]
    events = list(ask(client, text, stream=True, **same))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == message.content and len(deltas) > 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    others = [event.type for event in events if event not in deltas]
    assert others == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    last_one, kept = events[-1].response, {"id", "created_at", "output"}
    assert last_one.model_dump(exclude=kept) == whole.model_dump(exclude=kept)
    assert {event.response.id for event in (events[0], events[1], events[-1])} == {last_one.id}
    assert events[0].response.status == "in_progress" and not events[0].response.output
    with client.responses.stream(model="tiny", input=text, **same) as stream:
        assert [event.snapshot for event in stream if "text.delta" in event.type][-1] == (
            message.content
        )
        assert stream.get_final_response().output_text == message.content


def test_a_stream_is_spelled_as_the_protocol_has_it(server):
    body = {"model": "tiny", "input": "Hello", "stream": True}
    text = httpx.post(f"{server.url}/v1/responses", json=body).text
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    assert len(events) > 8 and "[DONE]" not in text
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_calls_go_to_the_client_and_back(client, server):
    wanted = ask_chat(client, "weather", tools=[WEATHER]).choices[0].message
    answer = ask(client, "weather", tools=[FUNCTION], tool_choice="auto")
    said, *calls = answer.output
    assert said.content[0].text == wanted.content == "Let me see.\n"
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Köln"}] * 2
    assert calls[0].call_id != calls[1].call_id
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls
    ]
    # the client's own objects, as people send them
    ask(client, [{"role": "user", "content": "weather"}, *answer.output, *results])
    prompt, _ = last(server)
    turns = [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": "Let me see.\n",
         "tool_calls": [a_call(call.call_id, call.arguments) for call in calls]},
        *({"role": "tool", "tool_call_id": call.call_id, "content": "rain"} for call in calls),
    ]  # fmt: skip
    ask_chat(client, turns)
    assert last(server)[0] == prompt
    with client.responses.stream(model="tiny", input="weather", tools=[FUNCTION]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call", "function_call"]
    snapshots = [event.snapshot for event in events if "arguments.delta" in event.type]
    assert [json.loads(snapshot) for snapshot in snapshots] == [{"city": "Köln"}] * 2
    assert [e.output_index for e in events if "item.done" in e.type] == [0, 1, 2]
    single = ask(client, "weather", tools=[FUNCTION], parallel_tool_calls=False)
    assert [item.type for item in single.output] == ["message", "function_call"]
    none = ask(client, "weather", tools=[FUNCTION], tool_choice="none")
    assert "<tool_call>" not in none.output_text and len(none.output) == 1


def test_text_after_a_call_is_an_item_of_its_own(tmp_path):
    with (
        FakeEngine(TOKENIZER, reply=f"{CALL} and on") as engine,
        served(engine, render=chat, image_token=auto) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = ask(client, "weather", tools=[FUNCTION])
        assert [item.type for item in answer.output] == ["function_call", "message"]
        assert answer.output_text.strip() == "and on"
        engine.reply = lambda request: ""
        [item] = ask(client).output
        assert (item.status, item.content[0].text) == ("completed", "")


def test_logprobs(client):
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    wanted = ask_chat(client, "Hello", logprobs=True, top_logprobs=2).choices[0].logprobs.content
    found = ask(client, **options).output[0].content[0].logprobs
    assert [(one.token, one.logprob) for one in found] == [
        (one.token, one.logprob) for one in wanted
    ]
    assert {len(one.top_logprobs) for one in found} == {2}
    assert b"".join(bytes(one.bytes) for one in found).decode() == "Yes, 2 turns. Ünï😀"
    deltas = [e for e in ask(client, stream=True, **options) if "text.delta" in e.type]
    assert [one.token for delta in deltas for one in delta.logprobs] == [o.token for o in wanted]


def test_pictures():
    with (
        FakeEngine(tiny_processor("internvl")) as engine,
        served(engine, render=chat, image_token=auto, max_images=2) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        text, picture = {"type": "input_text", "text": "Compare"}, {"type": "input_image"}
        picture |= {"image_url": data_url(), "detail": "auto"}
        ask(client, [{"role": "user", "content": [text, picture]}])
        part = {"type": "image_url", "image_url": {"url": data_url()}}
        ask_chat(client, [{"role": "user", "content": [{"type": "text", "text": "Compare"}, part]}])
        ours, chats = (request.prompt for request in engine.asked[-2:])
        assert (ours["pixel_values"] == chats["pixel_values"]).all()
        assert (ours["input_ids"] == chats["input_ids"]).all()
        with pytest.raises(openai.BadRequestError, match="3 images came") as caught:
            ask(client, [{"role": "user", "content": [picture] * 3}])
        assert caught.value.param == "input"


MESSAGE = {"role": "user", "content": "x"}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}
REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "nothing is kept"),
    "conversation": ({"conversation": "conv_1"}, "nothing is kept"),
    "background": ({"background": True}, None),
    "truncation": ({"truncation": "auto"}, None),
    "prompt": ({"prompt": {"id": "p"}}, "no prompts are kept"),
    "n": ({"extra_body": {"n": 2}}, "one answer"),
    "temperature": ({"temperature": 3}, None),
    "max_output_tokens": ({"max_output_tokens": 10**9}, "max_output_tokens is 1000000000"),
    "tools.0.type": ({"tools": [{"type": "web_search"}]}, "runs no tools of its own"),
    "tools.0.parameters": (
        {"tools": [{**FUNCTION, "strict": True, "parameters": {"type": "array"}}]}, "array"),
    "tool_choice": ({"tools": [], "tool_choice": "required"}, "asks for a tool"),
    "text.format.schema": ({"text": {"format": SCHEMA}}, "text.format.schema: .*objekt"),
    "text.verbosity": ({"text": {"verbosity": "low"}}, None),
    "input.0": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "nothing that was sent"),
    "input.1.content.0.file_id": (
        {"input": [MESSAGE, {"role": "user", "content": [
            {"type": "input_image", "image_url": "data:", "file_id": "f"}]}]}, "no files"),
    "input": ({"input": [MESSAGE, {"role": "assistant", "content": "Me"}]}, "the assistant's"),
    "colour": ({"extra_body": {"colour": "blue"}}, "not known"),
}  # fmt: skip


@pytest.mark.parametrize("param", REFUSED)
def test_what_cannot_be_done_is_refused_with_its_field(client, param):
    options, words = REFUSED[param]
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        ask(client, **{"input": "x", **options})
    assert caught.value.param == param and caught.value.type == "invalid_request_error"


def ask_when_free(client):
    """The last event of a stream may be here before its place in the queue is given back."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return ask(client)
        except openai.RateLimitError:
            assert time.monotonic() < deadline, "the place is never given back"
            time.sleep(0.01)


def test_errors_come_before_a_stream_or_end_it():
    limits = {"max_queue": 0, "request_seconds": 0.4, "max_body_bytes": 20_000}
    with (
        FakeEngine(TOKENIZER, reply="a " * 500, seconds=0.005, max_running=1) as engine,
        served(engine, render=chat, image_token=auto, **limits) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        events = []
        with pytest.raises(openai.APIError, match="not done within 0.4 s"):
            for event in ask(client, stream=True):
                events.append(event)
        failed = events[-1]
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert failed.response.error.code == "server_error"
        assert "not done within" in failed.response.error.message
        assert failed.response.output[0].status == "incomplete"
        assert failed.response.output_text == "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with pytest.raises(openai.InternalServerError, match="not done within"):
            ask_when_free(client)
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, "x" * 30_000)
        assert caught.value.status_code == 413
        with pytest.raises(openai.NotFoundError, match="'other' is not served"):
            client.responses.create(model="other", input="x")
        # the places are counted as those of chats are
        thread = threading.Thread(target=lambda: pytest.raises(openai.APIError, ask, client))
        thread.start()
        until = time.monotonic() + 10
        while not engine.stats().running and time.monotonic() < until:
            time.sleep(0.005)
        with pytest.raises(openai.RateLimitError):
            ask(client)
        thread.join()
        engine.reply = lambda request: RuntimeError("at /root/secret")
        for options in ({}, {"stream": True}):
            with pytest.raises(openai.InternalServerError, match="RuntimeError") as caught:
                list(ask(client, **options))
            assert "/root" not in caught.value.message
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'route="/v1/responses"' in metrics


class Yes(BaseModel):
    answer: str
    certain: bool


def test_answers_of_a_form_are_parsed(server, client):
    pytest.importorskip("llguidance")
    server.service.engine.reply = lambda request: '{"answer": "Ünï", "certain": true}'
    try:
        parsed = client.responses.parse(model="tiny", input="x", text_format=Yes)
        assert parsed.output_parsed == Yes(answer="Ünï", certain=True)
        assert "certain" in last(server)[1].grammar.text
        with client.responses.stream(model="tiny", input="x", text_format=Yes) as stream:
            assert stream.get_final_response().output_parsed == parsed.output_parsed
        call = CALL.replace("get_weather", "Yes").replace('"city": "Köln"', '"answer": "a", '
                                                          '"certain": false')  # fmt: skip
        server.service.engine.reply = lambda request: call
        tools = [openai.pydantic_function_tool(Yes)["function"]]
        tools = [{"type": "function", **tools[0]}]
        choice = {"type": "function", "name": "Yes"}
        found = client.responses.parse(model="tiny", input="x", tools=tools, tool_choice=choice)
        assert found.output[0].parsed_arguments == {"answer": "a", "certain": False}
        assert last(server)[1].grammar is not None and found.tool_choice.name == "Yes"
    finally:
        server.service.engine.reply = reply


class TestLangChain:
    @pytest.fixture
    def model(self, server):
        langchain = pytest.importorskip("langchain_openai")
        url = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        return langchain.ChatOpenAI(model="tiny", use_responses_api=True, **url)

    def test_answers_and_streams(self, model):
        answer = model.invoke([("system", "Be short."), ("user", "Hello")])
        assert answer.text == "Yes, 3 turns. Ünï😀"
        assert answer.usage_metadata["output_tokens"] > 5
        parts = [chunk.text for chunk in model.stream("count")]
        assert "".join(parts) == "one two three four five six" and len(parts) > 5

    def test_tools_there_and_back(self, model):
        from langchain_core.messages import HumanMessage, ToolMessage

        bound, question = model.bind_tools([WEATHER]), HumanMessage("weather")
        answer = bound.invoke([question])
        assert [call["args"] for call in answer.tool_calls] == [{"city": "Köln"}] * 2
        results = [ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls]
        assert model.invoke([question, answer, *results]).text.startswith("Yes, 4 turns")
