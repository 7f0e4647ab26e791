"""Replicas behind one engine's interface: who gets what, links to other processes, and failures.

The engines are told by the tests what to say; links are pairs of sockets of this process.
"""

import contextlib
import itertools
import os
import queue
import socket
import stat
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import serve_replicas
from stageline.distributed.causes import is_lost_connection
from stageline.errors import MemoryFull, UserError
from stageline.inference.decoding.engine_stats import EngineStats
from stageline.inference.decoding.request import (
    EngineError,
    Failed,
    Finished,
    Piece,
    Request,
    Sampling,
    Scored,
    ScoreRequest,
    TokenLogprob,
)
from stageline.inference.replicas import meeting
from stageline.inference.replicas.host import host_engine
from stageline.inference.replicas.link import Link
from stageline.inference.replicas.plain import as_plain, of_plain
from stageline.inference.replicas.remote_engine import RemoteEngine
from stageline.inference.replicas.router import ReplicaRouter
from stageline.serving.metrics import Metrics

PATIENCE = 20.0


class ToldEngine:
    """An engine that says what the test has it say, in the thread that runs it."""

    processor, model_name, max_length = None, "told", 100

    def __init__(self):
        self.requests, self.listeners, self.cancelled = {}, {}, []
        self.refusal = self.fault = None
        self._jobs = queue.SimpleQueue()

    def submit(self, request, listener):
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.key] = request
        self.listeners[request.key] = listener

    def say(self, event):
        self._jobs.put(lambda: self.listeners[event.key](event))

    def cancel(self, key):
        self.cancelled.append(key)
        self.say(end(key, "cancelled"))

    def stop(self):
        self._jobs.put(None)

    def break_down(self, error):
        self.fault = error
        self._jobs.put(None)

    def run(self):
        while (job := self._jobs.get()) is not None:
            job()
        if self.fault is not None:
            raise self.fault

    def prepare(self):
        pass

    def stats(self):
        open_ones = len(self.requests)
        return EngineStats(open_ones, open_ones, 4, 10, 20, 1, 5, None, self.fault is None, (1.5,))


def ask(key, length=3, **sampling):
    ids = torch.arange(length)[None]
    return Request(key, {"input_ids": ids}, Sampling(**sampling))


def piece(key, text):
    return Piece(key, text, (len(text),), (TokenLogprob(7, -0.25, ((7, -0.25), (8, -1e30))),))


def end(key, reason="stop"):
    return Finished(key, reason, 3, 2, "a text", (1, 2), stopped_by="." if reason == "stop" else 4)


def wait_until(is_so):
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.001)


class Heard(dict):
    """key -> the events that its listener got."""

    def listener(self, key):
        self[key] = []
        return self[key].append

    def has_ended(self, key):
        return bool(self[key]) and not isinstance(self[key][-1], Piece)


@contextlib.contextmanager
def remote(engine, number=1):
    """`engine` as another process would run it, behind a link; its thread's error comes out."""
    ours, theirs = map(Link, socket.socketpair())
    errors = []

    def host():
        try:
            host_engine(engine, theirs)
        except Exception as error:
            errors.append(error)
            theirs.close()

    thread = threading.Thread(target=host)
    thread.start()
    found = RemoteEngine(ours, name=f"replica {number}", max_length=90, stats=ToldEngine().stats())
    found.errors = errors
    try:
        yield found
    finally:
        ours.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextlib.contextmanager
def running(*engines):
    """A router that runs; gives it and a list that gets what its `run` raised."""
    router, raised = ReplicaRouter(engines), []

    def run():
        try:
            router.run()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield router, raised
    finally:
        router.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


# -- who gets what ---------------------------------------------------------------------------


def test_the_replica_with_the_least_rows_gets_the_next_request():
    engines, heard = [ToldEngine() for _ in range(3)], Heard()
    with running(*engines) as (router, _):
        for number in range(7):
            router.submit(ask(f"{number}"), heard.listener(f"{number}"))
        given = [" ".join(sorted(one.requests)) for one in engines]
        assert given == ["0 3 6", "1 4", "2 5"]
        for key in "25":
            engines[2].say(end(key))
        wait_until(lambda: heard.has_ended("2") and heard.has_ended("5"))
        for key in ("7", "8"):
            router.submit(ask(key), heard.listener(key))
        assert {"7", "8"} <= set(engines[2].requests)
        assert router.stats().num_given == (3, 2, 4)


def test_of_equal_rows_the_fewest_tokens_count():
    engines, heard = [ToldEngine() for _ in range(2)], Heard()
    with running(*engines) as (router, _):
        router.submit(ask("long", 60, max_new_tokens=9), heard.listener("long"))
        router.submit(ask("short", 5, max_new_tokens=9), heard.listener("short"))
        router.submit(ask("next"), heard.listener("next"))
        assert "next" in engines[1].requests


def test_a_request_that_is_refused_leaves_no_load():
    engines, heard = [ToldEngine() for _ in range(2)], Heard()
    engines[0].refusal = UserError("too long")
    with running(*engines) as (router, _):
        with pytest.raises(UserError, match="too long"):
            router.submit(ask("a"), heard.listener("a"))
        engines[0].refusal = None
        router.submit(ask("a"), heard.listener("a"))  # the key is free again
        router.submit(ask("b"), heard.listener("b"))
        with pytest.raises(UserError, match="'b' runs already"):
            router.submit(ask("b"), heard.listener("b"))
        assert [len(one.requests) for one in engines] == [1, 1]


def test_a_listener_that_raises_ends_its_own_request_alone():
    engines, heard = [ToldEngine() for _ in range(2)], Heard()

    def bad(event):
        raise RuntimeError("nobody listens")

    with running(*engines) as (router, raised):
        router.submit(ask("bad"), bad)
        router.submit(ask("good"), heard.listener("good"))
        engines[0].say(piece("bad", "x"))
        wait_until(lambda: engines[0].cancelled == ["bad"])
        engines[1].say(end("good"))
        wait_until(lambda: heard.has_ended("good"))
        router.submit(ask("later"), heard.listener("later"))
        assert "later" in engines[0].requests, "its place is free"
    assert not raised


def test_figures_are_sums_and_each_replicas_own():
    engines = [ToldEngine(), ToldEngine()]
    router = ReplicaRouter(engines)
    router.submit(ask("a"), lambda event: None)
    stats = router.stats()
    assert (stats.running, stats.max_running, stats.completion_tokens) == (1, 8, 40)
    assert (stats.max_cache_cells, stats.stage_seconds) == (None, (1.5, 1.5))
    assert router.max_length == 100
    text = Metrics(router.stats).text().decode()
    assert "stageline_engine_running 1.0" in text
    assert 'stageline_replica_running{replica="0"} 1.0' in text
    assert 'stageline_replica_running{replica="1"} 0.0' in text
    assert 'stageline_replica_requests_total{replica="0"} 1.0' in text
    engines[1].fault = RuntimeError()
    assert not router.stats().is_healthy
    text = Metrics(router.stats).text().decode()
    assert 'stageline_replica_healthy{replica="1"} 0.0' in text
    assert "stageline_engine_healthy 0.0" in text
    assert "replica" not in Metrics(engines[0].stats).text().decode()


# -- over a link -----------------------------------------------------------------------------

EVERYTHING = Sampling(
    max_new_tokens=5, temperature=0.1 + 0.2, top_k=3, top_p=1 / 3, min_p=0.01,
    repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=2.0,
    logit_bias=((3, -100.0), (4, 1.5)), seed=2**64 - 1, stop=("\n", "é\ud800"),
    stop_token_ids=(), logprobs=2,
)  # fmt: skip
EVENTS = [
    Piece("k", "é\n", (1, 2), (TokenLogprob(1, -float("inf"), ((1, -1 / 3), (2, -2.5))),)),
    Finished("k", "stop", 3, 2, "text", (1, 2), stopped_by="é", logprobs=()),
    Finished("k", "length", 3, 2, "", (), stopped_by=None),
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


def test_a_request_its_picture_and_its_events_pass():
    far, heard = ToldEngine(), Heard()
    pixels = torch.rand(1, 3, 300, 300)
    prompt = {"input_ids": torch.arange(4)[None], "pixel_values": pixels}
    with remote(far) as near, running(near_first(near), near) as (router, raised):
        router.submit(ask("first"), heard.listener("first"))
        router.submit(Request("k", prompt, EVERYTHING), heard.listener("k"))
        wait_until(lambda: "k" in far.requests)
        came = far.requests["k"]
        assert came.sampling == EVERYTHING
        assert torch.equal(came.prompt["pixel_values"], pixels)
        for event in EVENTS[:2]:
            far.say(event)
        wait_until(lambda: heard.has_ended("k"))
        assert heard["k"] == EVENTS[:2]
        wait_until(lambda: near.stats().running == 1)
        far.refusal = UserError("too long, on purpose")
        router.submit(ask("refused"), heard.listener("refused"))
        wait_until(lambda: heard.has_ended("refused"))
        [failed] = heard["refused"]
        assert type(failed.error) is UserError and str(failed.error) == "too long, on purpose"
        far.refusal = None
        router.submit(ScoreRequest("scored", prompt, 2), heard.listener("scored"))
        wait_until(lambda: "scored" in far.requests)
        assert far.requests["scored"].num_targets == 2
        far.say(Scored("scored", (-0.5, -1 / 3), is_greedy=True))
        wait_until(lambda: heard["scored"])
        assert heard["scored"] == [Scored("scored", (-0.5, -1 / 3), is_greedy=True)]
        router.submit(ask("cancelled"), heard.listener("cancelled"))
        router.cancel("cancelled")
        wait_until(lambda: heard.has_ended("cancelled"))
        assert heard["cancelled"] == [end("cancelled", "cancelled")]
    assert not raised and not near.errors, "all stopped in order"


def near_first(near):
    """An engine of this process to stand before a remote one."""
    assert near.max_length == 90
    return ToldEngine()


STEPS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ppppecf")), max_size=40)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_each_request_hears_its_own_events_in_order(steps):
    """Pieces, ends, failures and cancels of six requests on three replicas, in any order."""
    engines, heard = [ToldEngine() for _ in range(3)], Heard()
    wanted = {str(number): [] for number in range(6)}
    with (
        remote(engines[1]) as second,
        remote(engines[2], 2) as third,
        running(engines[0], second, third) as (router, raised),
    ):
        for key in wanted:
            router.submit(ask(key), heard.listener(key))
        homes = {key: engines[int(key) % 3] for key in wanted}
        wait_until(lambda: all(key in homes[key].listeners for key in wanted))
        over = set()
        for place, (number, kind) in enumerate(steps):
            key = str(number)
            if key in over:
                continue
            event = {
                "p": piece(key, f"text {place}"),
                "e": end(key),
                "f": Failed(key, EngineError(f"fault {place}")),
                "c": end(key, "cancelled"),
            }[kind]
            wanted[key].append(as_plain(event))
            over |= {key} if kind != "p" else set()
            if kind == "c":
                router.cancel(key)
                # what is said behind a cancel comes behind it: here nothing more is said
            else:
                homes[key].say(event)
        for key in set(wanted) - over:
            wanted[key].append(as_plain(end(key)))
            homes[key].say(end(key))
        wait_until(lambda: all(map(heard.has_ended, wanted)))
        assert {key: list(map(as_plain, events)) for key, events in heard.items()} == wanted
        router.submit(ask("more"), heard.listener("more"))
        assert sorted(router.stats().num_given) == [2, 2, 3], "no load was left behind"
    assert not raised


# -- failures --------------------------------------------------------------------------------


def test_one_that_breaks_down_ends_all_and_each_request_hears_of_it():
    engines, heard = [ToldEngine() for _ in range(3)], Heard()
    with remote(engines[2], 2) as third, running(*engines[:2], third) as (router, raised):
        for key in "012":
            router.submit(ask(key), heard.listener(key))
        engines[0].say(piece("0", "so far"))
        wait_until(lambda: heard["0"])
        engines[1].break_down(ValueError("on purpose"))
        wait_until(lambda: raised)
        assert str(raised[0]) == "on purpose"
        for key in "012":
            assert isinstance(heard[key][-1], Failed) and heard.has_ended(key)
            assert "on purpose" in str(heard[key][-1].error)
        assert len(heard["0"]) == 2
        assert not router.stats().is_healthy
        with pytest.raises(EngineError):
            router.submit(ask("3"), heard.listener("3"))
    assert not third.errors, "the other process was told to stop"


def test_a_process_that_is_gone_is_named():
    engines, heard = [ToldEngine(), ToldEngine()], Heard()
    ours, theirs = socket.socketpair()
    lost = RemoteEngine(
        Link(ours), name="replica 1 (rank 2)", max_length=None, stats=engines[1].stats()
    )
    with running(engines[0], lost) as (router, raised):
        for key in "01":
            router.submit(ask(key), heard.listener(key))
        theirs.close()  # as the kernel does for who was killed
        wait_until(lambda: raised)
        assert is_lost_connection(raised[0]), "another rank may know the cause"
        assert "replica 1 (rank 2)" in str(raised[0])
        assert all(isinstance(heard[key][-1], Failed) for key in "01")
        assert not router.stats().is_healthy


def test_an_engine_that_breaks_down_far_away_is_known_before_its_process_ends():
    far, heard = ToldEngine(), Heard()
    with remote(far) as near, running(ToldEngine(), near) as (router, raised):
        for key in "01":
            router.submit(ask(key), heard.listener(key))
        wait_until(lambda: "1" in far.requests)
        far.break_down(ValueError("far away"))
        wait_until(lambda: raised and heard.has_ended("0") and heard.has_ended("1"))
        wait_until(lambda: near.errors)
        assert [str(error) for error in near.errors] == ["far away"], "its own rank tells the cause"


def test_without_the_server_the_others_end():
    far = ToldEngine()
    with remote(far) as near:
        near._link.close()
        wait_until(lambda: near.errors)
    assert is_lost_connection(near.errors[0]) and "first replica" in str(near.errors[0])


# -- the meeting -----------------------------------------------------------------------------


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


def test_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    serve_replicas.check_one_machine(1)
    with pytest.raises(UserError, match="--num-replicas 4 came with a server on 2 machines"):
        serve_replicas.check_one_machine(4)
