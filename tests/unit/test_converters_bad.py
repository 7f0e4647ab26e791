"""Rows that no format takes, and options that there are not: what the errors say."""

import pytest

from stageline.data.rows.converters import make_converter
from stageline.errors import DataError, UserError


def _user(text):
    return {"role": "user", "content": text}


def _bot(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def _says(**pairs):
    return [{"from": who, "value": text} for who, text in pairs.items()]


# name -> (options, row, what the message says)
BAD = {
    "an output that is no text": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": {"a": 1}},
        "'output' is {'a': 1}.*Text was expected",
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
    "a bad history": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "history": [["a"]]},
        "'history' has \\['a'\\]",
    ),
    "a ranking without the rejected answer": (
        {"formatting": "alpaca", "ranking": True},
        {"instruction": "Q", "chosen": "good"},
        "'rejected' is missing",
    ),
    "a weight between": (
        {"formatting": "sharegpt"},
        {"conversations": [*_says(human="Q"), {"from": "gpt", "value": "A", "weight": 0.5}]},
        "has the weight 0.5. 0 or 1 was expected",
    ),
    "a mask of unknown meaning": (
        {"formatting": "sharegpt"},
        {"conversations": [*_says(human="Q"), {"from": "gpt", "value": "A", "mask": 0}]},
        "has the mask 0. A weight or loss_mask of 0 or 1 was expected",
    ),
    "half a surrogate pair in a call": (
        {"formatting": "sharegpt"},
        {
            "conversations": _says(
                human="Q", function_call=r'{"name": "f", "arguments": {"a": "\ud800"}}'
            )
        },
        "calls a function by .*JSON such as",
    ),
    "half a surrogate pair in the arguments of a call": (
        {"formatting": "sharegpt"},
        {
            "conversations": _says(
                human="Q", function_call=r'{"name": "f", "arguments": "{\"a\": \"\\ud800\"}"}'
            )
        },
        "calls 'f' with .*JSON such as",
    ),
    "a NUL in tools": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", gpt="A"), "tools": r'[{"name": "f\u0000"}]'},
        "'tools'.*JSON of one",
    ),
    "a mask of a row": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", gpt="A"), "mask": "User"},
        "the row has the mask 'User'",
    ),
    "a mask of another length": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", gpt="A"), "loss_mask": [1]},
        "'loss_mask' has 1 values for 2 messages",
    ),
    "a question to learn": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", gpt="A"), "trainable": [True, True]},
        "has the trainable True and is no answer",
    ),
    "masks that contradict": (
        {"formatting": "openai"},
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "A", "weight": 1, "loss_mask": 0},
            ]
        },
        "has weight 1 and loss_mask 0. The same was expected",
    ),
    "a label that is none": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "kto_tag": "good"},
        "'kto_tag' is 'good'. true or false was expected",
    ),
    "a label of 2": (
        {"formatting": "auto"},
        {"prompt": "Q", "completion": "A", "label": 2},
        "'label' is 2",
    ),
    "a label that is missing": (
        {"formatting": "alpaca", "columns": {"prompt": "q", "response": "a", "kto_tag": "good"}},
        {"q": "Q", "a": "A"},
        "'good' is missing",
    ),
    "out of turn": (
        {"formatting": "sharegpt"},
        {"conversations": [*_says(human="Q"), *_says(human="Q", gpt="A"), *_says(gpt="B")]},
        "message 1 of 'conversations' is of the user. One of assistant was expected",
    ),
    "the assistant first": (
        {"formatting": "sharegpt"},
        {"conversations": _says(gpt="A", human="Q")},
        "message 0 .* is of the assistant. One of user or tool was",
    ),
    "no answer at the end": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q")},
        "the last of 1 messages .* is of the user. The assistant's was",
    ),
    "a ranking with an answer before the answers": (
        {"formatting": "sharegpt", "ranking": True},
        {
            "conversations": _says(human="Q", gpt="A"),
            "chosen": _says(gpt="a")[0],
            "rejected": _says(gpt="b")[0],
        },
        "the last of 2 messages .* The user's or a tool's was",
    ),
    "an unknown speaker": (
        {"formatting": "sharegpt"},
        {"conversations": [{"from": "user", "value": "Q"}]},
        "message 0 .* has the from 'user'. One of human, gpt, observation, function_call, system",
    ),
    "a system message in the middle": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", system="S", gpt="A")},
        "message 1 .* is of the system",
    ),
    "two system messages": (
        {"formatting": "sharegpt"},
        {"conversations": _says(system="S", human="Q", gpt="A"), "system": "T"},
        "one system message",
    ),
    "an empty conversation": (
        {"formatting": "sharegpt"},
        {"conversations": []},
        "'conversations' is \\[\\]. A list of at least one message",
    ),
    "a call that is no JSON": (
        {"formatting": "sharegpt"},
        {"conversations": _says(human="Q", function_call="sum(1, 2)")},
        "message 1 .* calls a function by 'sum\\(1, 2\\)'",
    ),
    "arguments that are no object": (
        {"formatting": "openai"},
        {
            "messages": [
                _user("Q"),
                _bot("", tool_calls=[{"function": {"name": "sum", "arguments": "[1"}}]),
            ]
        },
        "calls 'sum' with '\\[1'",
    ),
    "tools that are no JSON": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "tools": "sum"},
        "'tools' is 'sum'",
    ),
    "a message without text": (
        {"formatting": "openai"},
        {"messages": [_user(None), _bot("A")]},
        "the content of message 0 of 'messages' is missing",
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
    "more places than pictures": (
        {"formatting": "alpaca"},
        {"instruction": "<image>", "output": "A", "images": []},
        "1 places for images and 0 names",
    ),
    "pictures that are no names": (
        {"formatting": "alpaca"},
        {"instruction": "Q", "output": "A", "images": [{"bytes": "x"}]},
        "the images are .* A file name or a list of them",
    ),
    "a pair with two prompts": (
        {"formatting": "openai"},
        {"prompt": "Q", "messages": [_user("Q")], "chosen": "a", "rejected": "b"},
        "both 'messages' and 'prompt'.*messages.*null",
    ),
    "texts without a prompt": (
        {"formatting": "auto"},
        {"chosen": "a", "rejected": "b"},
        "there is no prompt",
    ),
    "conversations with other questions": (
        {"formatting": "auto"},
        {"chosen": [_user("a"), _bot("b")], "rejected": [_user("x"), _bot("b")]},
        "differ first in message 0, of the user",
    ),
    "conversations with another prompt beside them": (
        {"formatting": "auto"},
        {
            "prompt": "z",
            "chosen": [_user("a"), _bot("b")],
            "rejected": [_user("a"), _bot("c")],
        },
        "the prompt is 'z'.*another one, 'a'",
    ),
    "a text that is none": ({"formatting": "text"}, {"text": ["a"]}, "'text' is \\['a'\\]"),
    "no row": ({"formatting": "text"}, ["a"], "the row is \\['a'\\]"),
    "nothing known": ({}, {"a": "b", "c": "d"}, "seen were a, c. One of conversations"),
    "two formats": (
        {},
        {"instruction": "Q", "output": "A", "messages": [_user("Q"), _bot("A")]},
        "several formats, messages, instruction; seen were instruction, messages, output",
    ),
    "messages of no known kind": (
        {},
        {"messages": [{"speaker": "a", "text": "b"}]},
        "messages in 'messages' that begin with {'speaker'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named(name):
    options, row, message = BAD[name]
    with pytest.raises(DataError, match=message) as caught:
        make_converter(**{"formatting": "auto", **options})(row, "rows.jsonl:7")
    text = str(caught.value)
    assert text.startswith("rows.jsonl:7: ")
    assert " expected, because " in text and text.endswith(".")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"formatting": "alpace"}, "'alpace'. One of auto, alpaca, sharegpt"),
        ({"formatting": "alpaca", "columns": {"messages": "m"}}, "'messages'. One of prompt"),
        ({"formatting": "alpaca", "columns": {"audios": "m"}}, "'audios'"),
        ({"columns": {"answers": "m"}}, "'answers'"),
        ({"formatting": "sharegpt", "tags": {"role": "m"}}, "'role'. One of role_tag"),
        ({"tags": {"role_tag": "m"}}, "without a formatting"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make_converter(**{"formatting": "auto", **options})
