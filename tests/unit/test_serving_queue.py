"""The queue of requests by itself: places, events, counts; and responses with tool calls."""

import asyncio
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from stageline.inference.decoding.request import AnswerPiece, Finished
from stageline.serving.answers import _choice
from stageline.serving.errors import ApiError
from stageline.serving.request_queue import Metrics, RequestQueue
from stageline.serving.tool_calls import ToolReader


@dataclass(frozen=True)
class Asked:
    key: str
    adapter: int = 0


class Engine:
    """An engine that reports the events that it is given; `cancelled`: the keys."""

    def __init__(self, *told):
        self.told = told
        self.cancelled = []

    def stats(self):
        return SimpleNamespace(max_running=2, is_healthy=True)

    def submit(self, request, listener):
        if not self.told:
            raise RuntimeError("full")
        for event in self.told:
            listener(event)

    def cancel(self, key):
        self.cancelled.append(key)


def finished(text="", **changes):
    return Finished("a", "stop", 7, 3, text, (1, 2, 3), **changes)


def queue_of(engine, *, max_queue=1):
    return RequestQueue(engine, max_queue=max_queue, metrics=Metrics(engine.stats))


def test_as_many_answers_as_there_is_room_for():
    async def run():
        queue = queue_of(Engine())  # two that run and one that waits
        with queue.place(2):
            with pytest.raises(ApiError) as error, queue.place(2):
                pass
            assert error.value.status == 429 and queue.num_places == 2
            with queue.place(1):
                assert queue.num_places == 3
        assert queue.num_places == 0  # none was used
        with pytest.raises(ApiError) as error, queue.place(4):
            pass
        assert error.value.status == 400

    asyncio.run(run())


def test_all_events_of_all_requests_come_and_are_counted():
    pieces = AnswerPiece("a", "ye", (1,)), AnswerPiece("a", "s", (2, 3))

    async def run():
        engine = Engine(*pieces, finished("yes"))
        queue = queue_of(engine)
        with queue.place(3) as place:
            found = [event async for event in place.events([Asked("a"), Asked("b")])]
            assert queue.num_places == 1
        assert queue.num_places == 0 and engine.cancelled == []
        return found, queue.metrics.text().decode()

    found, figures = asyncio.run(run())
    for number in (0, 1):
        assert [event for one, event in found if one == number] == [*pieces, finished("yes")]
    lines = dict(line.rsplit(" ", 1) for line in figures.splitlines() if line[0] != "#")
    assert lines["stageline_prompt_tokens_total"] == "14.0"
    assert lines["stageline_completion_tokens_total"] == "6.0"
    assert lines["stageline_first_token_seconds_count"] == "2.0"


def test_who_leaves_before_the_end_is_cancelled_and_a_refusal_is_an_event():
    async def run():
        engine = Engine(AnswerPiece("a", "ye", (1,)))
        queue = queue_of(engine)
        with queue.place(1) as place:
            async for _ in place.events([Asked("a")]):
                break
        assert len(engine.cancelled) == 1 and queue.num_places == 1  # until the engine says so
        refusing = queue_of(Engine())
        with refusing.place(1) as place:
            with pytest.raises(ApiError) as error:
                assert [one async for one in place.events([Asked("a")])]
        assert error.value.status == 500 and refusing.num_places == 0

    asyncio.run(run())


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(("text", "content"), [(CALL, None), ("Well. " + CALL, "Well. "), ("", "")])
def test_an_answer_of_calls_alone_has_no_content(text, content):
    choice = _choice(0, finished(text), ToolReader({"f"}), None)
    message = choice["message"]
    assert message["content"] == content
    calls = message.get("tool_calls") or []
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": 1}] * (
        CALL in text
    )
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
