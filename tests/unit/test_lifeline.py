"""The connection between machines: who is lost, who said goodbye, and who is only stopped."""

import json
import os
import queue
import signal
import socket
import time
from dataclasses import asdict

import pytest

from stageline.distributed import machines
from stageline.distributed.machines import Machine

FIRST = Machine(index=0, count=2, host="a", first_rank=0, num_ranks=2)
SECOND = Machine(index=1, count=2, host="b", first_rank=2, num_ranks=2)
SECONDS = 30.0


@pytest.fixture
def lost(monkeypatch):
    """What the hub was told of lost machines; nobody leaves before a test says so."""
    monkeypatch.setattr(machines, "_connections", [])
    yield queue.Queue()
    for connection in machines._connections:
        connection.close()


def open_hub(lost, *, lost_after=30.0):
    return machines.open_hub(
        FIRST, lost_after=lost_after, on_lost=lambda machine, why: lost.put((machine, why))
    )


def connect(invitation, *, token=None):
    told = json.loads(invitation)
    connection = socket.create_connection(("127.0.0.1", told["port"]))
    hello = {"token": token or told["token"], "machine": asdict(SECOND)}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection


def test_a_connection_that_closes_is_a_lost_machine(lost):
    connect(open_hub(lost)).close()
    assert lost.get(timeout=SECONDS) == (SECOND, "its connection was closed")


def test_one_that_says_goodbye_is_none(lost):
    invitation = open_hub(lost)
    good = connect(invitation)
    good.sendall(machines.BYE)
    good.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.5)


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\n", b"[1]\n", b"\xff\xfe\n"])
def test_a_stranger_is_none_either(lost, hello):
    invitation = open_hub(lost)
    stranger = socket.create_connection(("127.0.0.1", json.loads(invitation)["port"]))
    stranger.sendall(hello)
    stranger.close()
    connect(invitation, token="guessed").close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.5)


def test_the_other_machine_notices_the_end_of_the_first(lost):
    server = socket.create_server(("127.0.0.1", 0))
    told = {"port": server.getsockname()[1], "token": "t", "machine": asdict(FIRST)}
    machines.reach_hub(
        SECOND,
        "127.0.0.1",
        json.dumps(told),
        lost_after=30.0,
        on_lost=lambda machine, why: lost.put((machine, why)),
    )
    connection, _ = server.accept()
    hello = json.loads(connection.makefile("rb").readline())
    assert hello == {"token": "t", "machine": asdict(SECOND)}
    connection.close()
    assert lost.get(timeout=SECONDS) == (FIRST, "its connection was closed")


def _sleeping_child(invitation):
    pid = os.fork()
    if pid == 0:
        connection = connect(invitation)
        while True:
            time.sleep(100)
            connection.fileno()
    return pid


def test_a_stopped_process_is_not_lost_but_a_killed_one_is(lost):
    pid = _sleeping_child(open_hub(lost, lost_after=1.0))
    try:
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(queue.Empty):
            lost.get(timeout=3.0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert lost.get(timeout=SECONDS)[0] == SECOND


def test_a_machine_that_leaves_says_so_and_takes_nothing_for_a_loss(lost, monkeypatch):
    monkeypatch.setattr(machines, "_leaving", type(machines._leaving)())
    connection = connect(open_hub(lost))
    deadline = time.monotonic() + SECONDS
    while not machines._connections and time.monotonic() < deadline:
        time.sleep(0.01)
    machines.leave()
    assert connection.makefile("rb").readline() == machines.BYE
    connection.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.5)
