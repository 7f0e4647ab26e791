"""Replicas behind one engine's interface: who gets what, what comes back, and failures.

The engines say what the tests have them say; test_replica_link.py has the links alone.
"""

import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import serve_replicas
from stageline.distributed.causes import is_lost_connection
from stageline.errors import UserError
from stageline.inference.decoding.request import (
    EngineError,
    Failed,
    Request,
    Sampling,
    Scored,
    ScoreRequest,
)
from stageline.inference.replicas.link import Link
from stageline.inference.replicas.plain import as_plain
from stageline.inference.replicas.remote_engine import RemoteEngine
from stageline.inference.replicas.router import ReplicaRouter
from stageline.serving.metrics import Metrics
from stageline.testing.told_engine import (
    Heard,
    ToldEngine,
    ask,
    end,
    piece,
    remote,
    running,
    wait_until,
)

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


# -- what comes back over a link -------------------------------------------------------------


def test_a_request_its_picture_and_its_events_pass():
    far, heard, errors = ToldEngine(), Heard(), []
    pixels = torch.rand(1, 3, 300, 300)  # above 1 MB
    prompt = {"input_ids": torch.arange(4)[None], "pixel_values": pixels}
    sampling = Sampling(logprobs=2, stop=("é",))
    with remote(far, errors) as near, running(ToldEngine(), near) as (router, raised):
        router.submit(ask("first"), heard.listener("first"))
        router.submit(Request("k", prompt, sampling), heard.listener("k"))
        wait_until(lambda: "k" in far.requests)
        came = far.requests["k"]
        assert came.sampling == sampling
        assert torch.equal(came.prompt["pixel_values"], pixels)
        events = [piece("k", "é"), piece("k", "è"), end("k")]
        for event in events:
            far.say(event)
        wait_until(lambda: heard.has_ended("k"))
        assert heard["k"] == events
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
    assert router.max_length == 90
    assert not raised and not errors, "all stopped in order"


STEPS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ppppecf")), max_size=40)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_each_request_hears_its_own_events_in_order(steps):
    """Pieces, ends, failures and cancels of six requests on three replicas, in any order."""
    engines, heard, errors = [ToldEngine() for _ in range(3)], Heard(), []
    wanted = {str(number): [] for number in range(6)}
    with (
        remote(engines[1], errors) as second,
        remote(engines[2], errors, number=2) as third,
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
            else:
                homes[key].say(event)
        for key in set(wanted) - over:
            wanted[key].append(as_plain(end(key)))
            homes[key].say(end(key))
        wait_until(lambda: all(map(heard.has_ended, wanted)))
        assert {key: list(map(as_plain, events)) for key, events in heard.items()} == wanted
        router.submit(ask("more"), heard.listener("more"))
        assert sorted(router.stats().num_given) == [2, 2, 3], "no load was left behind"
    assert not raised and not errors


# -- failures --------------------------------------------------------------------------------


def test_one_that_breaks_down_ends_all_and_each_request_hears_of_it():
    engines, heard, errors = [ToldEngine() for _ in range(3)], Heard(), []
    with (
        remote(engines[2], errors, number=2) as third,
        running(*engines[:2], third) as (router, raised),
    ):
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
    assert not errors, "the other process was told to stop"


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
    far, heard, errors = ToldEngine(), Heard(), []
    with remote(far, errors) as near, running(ToldEngine(), near) as (router, raised):
        for key in "01":
            router.submit(ask(key), heard.listener(key))
        wait_until(lambda: "1" in far.requests)
        far.break_down(ValueError("far away"))
        wait_until(lambda: raised and heard.has_ended("0") and heard.has_ended("1"))
        wait_until(lambda: errors)
        assert [str(error) for error in errors] == ["far away"], "its own rank tells the cause"


def test_a_remote_engine_alone_tells_its_requests_that_it_is_gone():
    heard, (ours, theirs) = Heard(), socket.socketpair()
    lost = RemoteEngine(Link(ours), name="replica 1", max_length=9, stats=ToldEngine().stats())
    lost.submit(ask("a"), heard.listener("a"))
    theirs.close()
    with pytest.raises(ConnectionError):
        lost.run()
    assert "replica 1 is gone" in str(heard["a"][0].error)
    with pytest.raises(EngineError, match="replica 1 is gone"):
        lost.submit(ask("b"), heard.listener("b"))


def test_without_the_server_the_others_end():
    far, errors = ToldEngine(), []
    with remote(far, errors) as near:
        near._link.close()
        wait_until(lambda: errors)
    assert is_lost_connection(errors[0]) and "first replica" in str(errors[0])


def test_several_machines_are_refused(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    serve_replicas.check_one_machine(1)
    with pytest.raises(UserError, match="--num-replicas 4 came with a server on 2 machines"):
        serve_replicas.check_one_machine(4)
