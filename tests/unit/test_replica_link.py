"""Links between replicas: values and tensors as they were, no waiting, a private place to meet."""

import itertools
import os
import socket
import stat
import threading

import pytest
import torch

from stageline.errors import MemoryFull, UserError
from stageline.inference.decoding.grammar import Grammar
from stageline.inference.decoding.request import (
    EngineError,
    Failed,
    Finished,
    Piece,
    Sampling,
    Scored,
    TokenLogprob,
)
from stageline.inference.replicas import meeting
from stageline.inference.replicas.link import Link
from stageline.inference.replicas.plain import as_plain, of_plain
from stageline.testing.told_engine import PATIENCE, ToldEngine

EVERYTHING = Sampling(
    max_new_tokens=5, temperature=0.1 + 0.2, top_k=3, top_p=1 / 3, min_p=0.01,
    repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=2.0,
    logit_bias=((3, -100.0), (4, 1.5)), seed=2**64 - 1, stop=("\n", "é\ud800"),
    stop_token_ids=(), logprobs=2, grammar=Grammar("regex", "a+"),
)  # fmt: skip
EVENTS = [
    Piece("k", "é\n", (1, 2), (TokenLogprob(1, -float("inf"), ((1, -1 / 3), (2, -2.5))),)),
    Finished("k", "stop", 3, 2, "text", (1, 2), stopped_by="é", logprobs=()),
    Finished("k", "length", 3, 2, "", (), stopped_by=None),
    Scored("k", (-0.5, -1.0), True, (((1, -0.5),), ((2, -0.25), (3, -1.5)))),
]


@pytest.mark.parametrize("value", [EVERYTHING, *EVENTS], ids=lambda value: type(value).__name__)
def test_values_come_back_as_they_were(value):
    link, other = map(Link, socket.socketpair())
    link.send({"value": as_plain(value)})
    link.close()
    [(message, tensors)] = other.messages()
    assert of_plain(message["value"]) == value and not tensors


def test_what_is_unknown_is_not_sent():
    with pytest.raises(TypeError, match="EngineStats can't be sent"):
        as_plain((ToldEngine().stats(),))
    with pytest.raises(KeyError):
        of_plain({"@": "EngineStats"})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UserError("too long"), UserError),
        (MemoryFull("none left"), MemoryFull),
        (EngineError("lost"), EngineError),
        (KeyError("x"), EngineError),
    ],
)
def test_errors_keep_what_a_server_tells_apart(error, kind):
    found = of_plain(as_plain(Failed("k", error)))
    assert (found.key, type(found.error)) == ("k", kind) and str(error) in str(found.error)


def test_tensors_of_all_kinds_pass_beside_the_text():
    generator = torch.Generator().manual_seed(0)
    sent = {
        "input_ids": torch.arange(5)[None],
        "pixel_values": torch.rand(4, 3, 160, 160, generator=generator),  # above 1 MB
        "turned": torch.rand(3, 5, generator=generator).T,
        "half": torch.rand(7, generator=generator).bfloat16(),
        "mask": torch.tensor([[True, False]]),
        "one": torch.tensor(3),
        "none": torch.empty(0, 4, dtype=torch.int32),
    }
    link, other = map(Link, socket.socketpair())
    for number in range(2):
        link.send({"number": number}, sent)
    found = list(itertools.islice(other.messages(), 2))
    link.close()
    assert [message for message, _ in found] == [{"number": 0}, {"number": 1}]
    for _, tensors in found:
        assert list(tensors) == list(sent)
        for name, one in tensors.items():
            assert one.dtype == sent[name].dtype and torch.equal(one, sent[name]), name


def test_sending_does_not_wait_for_the_reader():
    link, other = map(Link, socket.socketpair())
    big = torch.arange(2**20)
    for number in range(4):  # 32 MB, far more than sockets hold
        link.send({"number": number}, {"big": big})
    assert not link.flush(0.05), "it is not written yet"
    seen = threading.Event()

    def read():
        for message, tensors in other.messages():
            assert torch.equal(tensors["big"], big)
            if message["number"] == 3:
                seen.set()

    threading.Thread(target=read, daemon=True).start()
    assert seen.wait(PATIENCE) and link.flush(PATIENCE)
    link.close()


def test_a_message_that_is_cut_off_is_not_read():
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.sendall(b'{"number": 1}\n{"tensors": [["a", "int64", [3]]]}\n12345678{"num')
    theirs.close()
    assert [message for message, _ in link.messages()] == [{"number": 1}]


def test_replicas_meet_where_nobody_else_may_enter():
    links = {}
    with meeting.meeting_place() as place:
        folder = os.path.dirname(place.path)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for number in (2, 1):
            links[number] = meeting.join_meeting(place.path, number)
        found = place.wait_for(2, PATIENCE)
        assert sorted(found) == [1, 2]
        for number, link in found.items():
            links[number].send({"from": number})
            assert next(link.messages()) == ({"from": number}, {})
        with pytest.raises(ConnectionError, match="0 of 1 other replicas came within 0.05 s"):
            place.wait_for(1, 0.05)
    assert not os.path.exists(folder)


def test_a_long_temporary_folder_is_no_hindrance(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting.tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    (tmp_path / ("x" * 120)).mkdir()
    with meeting.meeting_place() as place:
        meeting.join_meeting(place.path, 1).close()
    assert not list((tmp_path / ("x" * 120)).iterdir())
