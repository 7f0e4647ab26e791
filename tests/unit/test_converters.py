"""Rows of each format against the samples that they are to become.

The alpaca and sharegpt rows are those of LLaMA-Factory's own tests and example files in kind.
"""

import copy

import pytest

from stageline.data.rows.converters import make_converter


def _user(text, **fields):
    return {"role": "user", "content": text, **fields}


def _bot(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def _says(**pairs):
    return [{"from": who, "value": text} for who, text in pairs.items()]


SUM = {"name": "sum", "parameters": {"type": "object"}}
SUM_TOOL = {"type": "function", "function": SUM}
CALL = [{"type": "function", "function": {"name": "sum", "arguments": {"a": [1, 2]}}}]

# name -> (options, row, sample)
GOLDENS = {
    "alpaca": (
        {"formatting": "alpaca"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"messages": [_user("Add.\n1 2"), _bot("3")]},
    ),
    "alpaca without input": (
        {"formatting": "alpaca"},
        {"instruction": "Hi", "input": "", "output": "Ho"},
        {"messages": [_user("Hi"), _bot("Ho")]},
    ),
    "alpaca, input alone": (
        {"formatting": "alpaca"},
        {"instruction": None, "input": "Hi", "output": "Ho"},
        {"messages": [_user("Hi"), _bot("Ho")]},
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
    "alpaca by other names": (
        {"formatting": "alpaca", "columns": {"prompt": "q", "response": "a"}},
        {"q": "Hi", "a": "Ho", "input": "not named, so not there"},
        {"messages": [_user("Hi"), _bot("Ho")]},
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
    "alpaca ranking with messages": (
        {"formatting": "alpaca", "ranking": True},
        {
            "instruction": "Q",
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"role": "assistant", "content": "bad"},
        },
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
        {
            "dialog": [{"who": "U", "what": "Q"}, {"who": "A", "what": "R"}],
            "sys": "S",
        },
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
    "sharegpt kto": (
        {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}},
        {"messages": _says(human="Q", gpt="A"), "label": 1},
        {"messages": [_user("Q"), _bot("A")], "label": True},
    ),
    "openai": (
        {"formatting": "openai"},
        {
            "messages": [
                {"role": "developer", "content": "S"},
                _user([{"type": "text", "text": "Q"}]),
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "sum", "arguments": '{"a": [1, 2]}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "tool", "content": "three"},
                _bot("3", weight=0),
            ],
            "tools": [SUM_TOOL],
        },
        {
            "messages": [
                {"role": "system", "content": "S"},
                _user([{"type": "text", "text": "Q"}]),
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
    "masks under other names": (
        {"formatting": "openai"},
        {
            "messages": [
                _user("a", trainable=False),
                _bot("b", trainable=False),
                _user("c"),
                _bot("d", training=True),
                _user("e"),
                _bot("f", loss_mask=0),
            ]
        },
        {
            "messages": [
                _user("a"),
                _bot("b", weight=0),
                _user("c"),
                _bot("d"),
                _user("e"),
                _bot("f", weight=0),
            ]
        },
    ),
    "a mask for all messages": (
        {"formatting": "sharegpt"},
        {
            "conversations": _says(human="a", gpt="b") + _says(human="c", gpt="d"),
            "loss_mask": [0, 0, 0, 1],
        },
        {"messages": [_user("a"), _bot("b", weight=0), _user("c"), _bot("d")]},
    ),
    "prompt and completion": (
        {"formatting": "openai"},
        {"prompt": "Q", "completion": "A"},
        {"messages": [_user("Q"), _bot("A")]},
    ),
    "prompt, completion and label": (
        {"formatting": "auto"},
        {"prompt": [_user("Q")], "completion": [_bot("A")], "label": "true"},
        {"messages": [_user("Q"), _bot("A")], "label": True},
    ),
    "messages and label": (
        {"formatting": "auto"},
        {"messages": [_user("Q"), _bot("A")], "label": False},
        {"messages": [_user("Q"), _bot("A")], "label": False},
    ),
    "messages and another label": (
        {"formatting": "auto"},
        {"messages": [_user("Q"), _bot("A")], "label": "cats"},
        {"messages": [_user("Q"), _bot("A")]},
    ),
    "pair with a prompt": (
        {"formatting": "auto"},
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"messages": [_user("Q")], "chosen": [_bot("good")], "rejected": [_bot("bad")]},
    ),
    "pair with messages": (
        {"formatting": "auto"},
        {"messages": [_user("Q")], "chosen": _bot("good"), "rejected": [_bot("bad")]},
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
    "text": ({"formatting": "text"}, {"text": "Once"}, {"text": "Once"}),
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
    "auto: sharegpt": (
        {},
        {"conversations": _says(human="Q", gpt="A")},
        {"messages": [_user("Q"), _bot("A")]},
    ),
    "auto: conversations with roles": (
        {},
        {"conversations": [_user("Q"), _bot("A")]},
        {"messages": [_user("Q"), _bot("A")]},
    ),
    "auto: text": ({}, {"text": "Once", "url": "x"}, {"text": "Once"}),
    "auto: question and answer": (
        {},
        {"question": "Q", "answer": "A", "level": 3},
        {"question": "Q", "answer": "A", "level": 3},
    ),
    "auto: other names": (
        {"columns": {"messages": "dialog"}},
        {"dialog": _says(human="Q", gpt="A")},
        {"messages": [_user("Q"), _bot("A")]},
    ),
    "a picture in the text": (
        {"formatting": "sharegpt"},
        {
            "conversations": _says(human="<image>What is <image>?", gpt="An <image>."),
            "images": ["a.png", "b.png"],
        },
        {
            "messages": [
                _user(
                    [
                        {"type": "image"},
                        {"type": "text", "text": "What is "},
                        {"type": "image"},
                        {"type": "text", "text": "?"},
                    ]
                ),
                _bot("An <image>."),
            ],
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
            "messages": [
                _user([{"type": "image"}, {"type": "video"}, {"type": "text", "text": "Q"}]),
                _bot("A"),
            ],
            "images": ["a.png"],
            "videos": ["v.gif"],
        },
    ),
    "a video": (
        {"formatting": "sharegpt", "columns": {"messages": "conversations", "videos": "clips"}},
        {"conversations": _says(human="<video>Q", gpt="A"), "clips": [["1.png", "2.png"]]},
        {
            "messages": [_user([{"type": "video"}, {"type": "text", "text": "Q"}]), _bot("A")],
            "videos": [["1.png", "2.png"]],
        },
    ),
    "parts with files": (
        {"formatting": "openai"},
        {
            "messages": [
                _user(
                    [
                        {"type": "image_url", "image_url": {"url": "a.png"}},
                        {"type": "text", "text": "<image>?"},
                        {"type": "image"},
                        {"type": "video", "video": "v.gif"},
                    ]
                ),
                _bot("A"),
            ],
            "images": ["b.png"],
        },
        {
            "messages": [
                _user(
                    [
                        {"type": "image"},
                        {"type": "text", "text": "<image>?"},
                        {"type": "image"},
                        {"type": "video"},
                    ]
                ),
                _bot("A"),
            ],
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
    assert len(found) == 2  # those of the user, and those of the assistant
