"""Rows of each format against the samples that they are to become; and rows that no format takes.

The alpaca and sharegpt rows are those of LLaMA-Factory's own tests and example files in kind.
"""

import copy

import pytest

from stageline.data.rows.converters import make_converter
from stageline.errors import DataError, UserError


def _user(text, **fields):
    return {"role": "user", "content": text, **fields}


def _bot(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def _says(**pairs):
    return [{"from": who, "value": text} for who, text in pairs.items()]


SUM = {"name": "sum", "parameters": {"type": "object"}}
SUM_TOOL = {"type": "function", "function": SUM}
CALL = [{"type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2]}}}]

FUNCTION = {"name": "sum", "arguments": '{"a": [1, 2]}'}
WRITTEN_CALL = {"id": "c1", "type": "function", "function": FUNCTION}
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
URL = {"type": "image_url", "image_url": {"url": "a.png"}}


def _text(text):
    return {"type": "text", "text": text}


# name -> (options, row, sample)
GOLDENS = {
    "alpaca": (
        {"formatting": "alpaca"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"messages": [_user("Add.\n1 2"), _bot("3")]},
    ),
    "alpaca with all": (
        {"formatting": "alpaca"},
        {
            "instruction": "c",
            "output": "d",
            "history": [["a", "b"], ["e", "f"]],
            "system": "S",
            "tools": '[{"name": "sum", "parameters": {"type": "object"}}]',
        },
        {
            "messages": [_user("a"), _bot("b"), _user("e"), _bot("f"), _user("c"), _bot("d")],
            "system": "S",
            "tools": [SUM_TOOL],
        },
    ),
    "alpaca of a pre-training set": (
        {"formatting": "alpaca", "columns": {"prompt": "body"}},
        {"body": "Once upon"},
        {"text": "Once upon"},
    ),
    "alpaca ranking": (
        {"formatting": "alpaca", "ranking": True},
        {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"},
        {"messages": [_user("Q")], "chosen": [_bot("good")], "rejected": [_bot("bad")]},
    ),
    "alpaca kto": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "kto_tag": False},
        {"messages": [_user("Q"), _bot("A")], "label": False},
    ),
    "sharegpt": (
        {"formatting": "sharegpt"},
        {"conversations": _says(system="S", human="Q", gpt="A")},
        {"messages": [{"role": "system", "content": "S"}, _user("Q"), _bot("A")]},
    ),
    "sharegpt by other names": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "dialog", "system": "sys"},
            "tags": {
                "role_tag": "who",
                "content_tag": "what",
                "user_tag": "U",
                "assistant_tag": "A",
            },
        },
        {"dialog": [{"who": "U", "what": "Q"}, {"who": "A", "what": "R"}], "sys": "S"},
        {"messages": [_user("Q"), _bot("R")], "system": "S"},
    ),
    "sharegpt with a function": (
        {"formatting": "sharegpt"},
        {
            "conversations": _says(
                human="Q",
                function_call='<think>hm</think>{"name": "sum", "arguments": {"a": [1, 2]}}',
                observation='{"s": 3}',
                gpt="3",
            ),
            "tools": [SUM],
        },
        {
            "messages": [
                _user("Q"),
                _bot("", tool_calls=CALL, reasoning_content="hm"),
                {"role": "tool", "content": '{"s": 3}'},
                _bot("3"),
            ],
            "tools": [SUM_TOOL],
        },
    ),
    "sharegpt ranking": (
        {"formatting": "sharegpt", "ranking": True},
        {
            "conversations": _says(human="Q"),
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {"messages": [_user("Q")], "chosen": [_bot("good")], "rejected": [_bot("bad")]},
    ),
    "openai": (
        {"formatting": "openai"},
        {
            "messages": [
                {"role": "developer", "content": "S"},
                _user([_text("Q")]),
                _bot(None, refusal=None, tool_calls=[WRITTEN_CALL]),
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "tool", "content": "three"},
                _bot("3", weight=0),
            ],
            "tools": [SUM_TOOL],
        },
        {
            "messages": [
                {"role": "system", "content": "S"},
                _user([_text("Q")]),
                _bot("", tool_calls=[{"id": "c1", **CALL[0]}]),
                {"role": "tool", "content": "3", "tool_call_id": "c1"},
                {"role": "tool", "content": "three"},
                _bot("3", weight=0),
            ],
            "tools": [SUM_TOOL],
        },
    ),
    "openai, answers that are not learnt": (
        {"formatting": "openai"},
        {"messages": [_user("a"), _bot("b", loss=False), _user("c"), _bot("d", reasoning="e")]},
        {
            "messages": [
                _user("a"),
                _bot("b", weight=0),
                _user("c"),
                _bot("d", reasoning_content="e"),
            ]
        },
    ),
    "prompt, completion and label": (
        {"formatting": "auto"},
        {"prompt": [_user("Q")], "completion": [_bot("A")], "label": "true"},
        {"messages": [_user("Q"), _bot("A")], "label": True},
    ),
    "pair with a prompt": (
        {"formatting": "auto"},
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"messages": [_user("Q")], "chosen": [_bot("good")], "rejected": [_bot("bad")]},
    ),
    "pair of conversations": (
        {"formatting": "auto"},
        {
            "chosen": [_user("a"), _bot("b"), _user("c"), _bot("good")],
            "rejected": [_user("a"), _bot("b"), _user("c"), _bot("bad")],
        },
        {
            "messages": [_user("a"), _bot("b"), _user("c")],
            "chosen": [_bot("good")],
            "rejected": [_bot("bad")],
        },
    ),
    "pair of conversations that part early": (
        {"formatting": "auto"},
        {
            "prompt": "a",
            "chosen": [_user("a"), _bot("b"), _user("c"), _bot("d")],
            "rejected": [_user("a"), _bot("x")],
        },
        {
            "messages": [_user("a")],
            "chosen": [_bot("b"), _user("c"), _bot("d")],
            "rejected": [_bot("x")],
        },
    ),
    "pair of equal conversations": (
        {"formatting": "auto"},
        {"chosen": [_user("a"), _bot("b")], "rejected": [_user("a"), _bot("b")]},
        {"messages": [_user("a")], "chosen": [_bot("b")], "rejected": [_bot("b")]},
    ),
    "text by another name": (
        {"formatting": "text", "columns": {"text": "body"}},
        {"body": "Once"},
        {"text": "Once"},
    ),
    "auto: alpaca, with the rendered text that Stanford's file has": (
        {},
        {"instruction": "Q", "input": "", "output": "A", "text": "Below is ..."},
        {"messages": [_user("Q"), _bot("A")]},
    ),
    "a picture in the text": (
        {"formatting": "sharegpt"},
        {
            "conversations": _says(human="<image>What is <image>?", gpt="An <image>."),
            "images": ["a.png", "b.png"],
        },
        {
            "messages": [_user([IMAGE, _text("What is "), IMAGE, _text("?")]), _bot("An <image>.")],
            "images": ["a.png", "b.png"],
        },
    ),
    "a placeholder in a row without pictures is text": (
        {"formatting": "alpaca"},
        {"instruction": "What is <image> in HTML?", "output": "Nothing."},
        {"messages": [_user("What is <image> in HTML?"), _bot("Nothing.")]},
    ),
    "pictures and videos without places": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "image": "a.png", "videos": ["v.gif"]},
        {
            "messages": [_user([IMAGE, VIDEO, _text("Q")]), _bot("A")],
            "images": ["a.png"],
            "videos": ["v.gif"],
        },
    ),
    "parts with files": (
        {"formatting": "openai"},
        {
            "messages": [
                _user([URL, _text("<image>?"), IMAGE, {**VIDEO, "video": "v.gif"}]),
                _bot("A"),
            ],
            "images": ["b.png"],
        },
        {
            "messages": [_user([IMAGE, _text("<image>?"), IMAGE, VIDEO]), _bot("A")],
            "images": ["a.png", "b.png"],
            "videos": ["v.gif"],
        },
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_rows_become_samples(name):
    options, row, sample = GOLDENS[name]
    before = copy.deepcopy(row)
    assert make_converter(**{"formatting": "auto", **options})(row, "f:1") == sample
    assert row == before, "rows are read again and again"


def test_fields_that_are_not_read_are_listed_once():
    row = {"messages": [_user("a", seen=False), _bot("b", refusal=None, masked=0)]}
    convert = make_converter("openai")
    with pytest.warns(UserWarning, match="have the fields masked, which are left out") as found:
        for number in range(2):
            assert convert(row, f"f:{number}") == {"messages": [_user("a"), _bot("b")]}
    assert len(found) == 2  # there are two: the user's and the assistant's


# name -> (options, row, what the message says)
BAD = {
    "an output that is no text": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": {"a": 1}},
        "'output' is {'a': 1}.*Write text",
    ),
    "no output": ({"formatting": "alpaca"}, {"instruction": "Q"}, "'output' is missing"),
    "a ranking that nobody announced": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "chosen": "good"},
        "ranking: true",
    ),
    "no question": (
        {"formatting": "alpaca"},
        {"instruction": "", "output": "A"},
        "'instruction' and 'input' are empty",
    ),
    "a label that is none": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "kto_tag": "good"},
        "'kto_tag' is 'good'. Write true or false",
    ),
    "out of turn": (
        {"formatting": "sharegpt"},
        {"conversations": [*_says(human="Q"), *_says(human="Q", gpt="A"), *_says(gpt="B")]},
        "message 1 of 'conversations' is of the user. Write one of the assistant",
    ),
    "no answer at the end": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q")},
        "the last of 1 messages .* is of the user. Write the assistant's",
    ),
    "a ranking with an answer before the answers": (
        {"formatting": "sharegpt", "ranking": True},
        {
            "conversations": _says(human="Q", gpt="A"),
            "chosen": _says(gpt="a")[0],
            "rejected": _says(gpt="b")[0],
        },
        "the last of 2 messages .* Write the user's or a tool's",
    ),
    "an unknown speaker": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "user", "value": "Q"}]},
        "message 0 .* has the from 'user'. Write one of human, gpt, observation, function_call",
    ),
    "an empty conversation": (
        {"formatting": "sharegpt"},
        {"conversations": []},
        "'conversations' is \\[\\]. Write a list of messages",
    ),
    "a call that is no JSON": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", function_call="sum(1, 2)")},
        "message 1 .* calls a function by 'sum\\(1, 2\\)'",
    ),
    "an unknown part": (
        {"formatting": "openai"},
        {"messages": [_user([{"type": "input_audio"}]), _bot("A")]},
        "has the part {'type': 'input_audio'}",
    ),
    "fewer places than pictures": (
        {"formatting": "alpaca"},
        {"instruction": "<image>", "output": "A", "images": ["a.png", "b.png"]},
        "1 places for images and 2 names",
    ),
    "conversations with other questions": (
        {"formatting": "auto"},
        {"chosen": [_user("a"), _bot("b")], "rejected": [_user("x"), _bot("b")]},
        "differ first in message 0, of the user",
    ),
    "nothing known": ({}, {"a": "b", "c": "d"}, "seen were a, c. Write one of conversations"),
    "two formats": (
        {},
        {"instruction": "Q", "output": "A", "messages": [_user("Q"), _bot("A")]},
        "several formats, messages, instruction; seen were instruction, messages, output",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name):
    options, row, message = BAD[name]
    with pytest.raises(DataError, match=message) as caught:
        make_converter(**{"formatting": "auto", **options})(row, "rows.jsonl:7")
    text = str(caught.value)
    assert text.startswith("rows.jsonl:7: ")
    assert " Write " in text and text.endswith(".")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formatting": "alpace"}, "'alpace'. One of auto, alpaca, sharegpt"),
        ({"formatting": "alpaca", "columns": {"messages": "m"}}, "'messages'. One of prompt"),
        ({"formatting": "sharegpt", "tags": {"role": "m"}}, "'role'. One of role_tag"),
        ({"tags": {"role_tag": "m"}}, "require a formatting"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_converter(**{"formatting": "auto", **options})
