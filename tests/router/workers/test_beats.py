"""Beats pass beside a link, whatever the loops of both ends do."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pdserve.rpc.beats import KEY_BYTES, Beats
from router.core import events as ev
from router.workers.beat_port import BeatPort
from router.workers.link import LinkThread

WAIT_S = 30.0
KEY = bytes(range(KEY_BYTES))


@contextmanager
def listening(vouches: Callable[[], bool] = lambda: True, host: str = "127.0.0.1") -> Iterator[tuple[BeatPort, int]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        number = probe.getsockname()[1]
    port = BeatPort(vouches)
    port.open(host, number)
    try:
        yield port, number
    finally:
        port.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "beat port"]


def asked(to: socket.socket, data: bytes) -> bytes:
    to.settimeout(WAIT_S)
    to.send(data)
    return to.recv(100)


def close(beats: Beats) -> None:
    beats.close()
    beats._thread.join(WAIT_S)
    assert not beats._thread.is_alive()


def is_answered(beats: Beats) -> None:
    """Return once beats are answered, which the test's timeout bounds."""
    pause = threading.Event()
    while not beats.answers:
        pause.wait(0.005)
    close(beats)


@contextmanager
def sender(number: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.connect(("127.0.0.1", number))
        yield made


def test_only_keys_of_links_are_heard_and_answered() -> None:
    with listening() as (port, number), sender(number) as stranger:
        port.add(KEY, ev.LinkId(7))
        for wrong in (b"", bytes(KEY_BYTES), KEY[:-1], KEY + b"x", bytes(5000)):
            stranger.send(wrong)
        assert asked(stranger, KEY) == KEY  # it came after all of those, and its answer is the first
        assert port.take() == {ev.LinkId(7)}
        assert port.take() == set()
        port.discard(KEY)
        port.add(bytes(KEY_BYTES), ev.LinkId(8))
        stranger.send(KEY)
        assert asked(stranger, bytes(KEY_BYTES)) == bytes(KEY_BYTES)
        assert port.take() == {ev.LinkId(8)}


def test_nobody_answers_for_loops_that_hang() -> None:
    turns = [False]
    looks = queue.Queue[bool]()

    def vouches() -> bool:
        looked = turns[0]
        looks.put(looked)
        return looked

    with listening(vouches) as (port, number), sender(number) as worker:
        port.add(KEY, ev.LinkId(1))
        port.add(KEY[::-1], ev.LinkId(2))
        worker.send(KEY)
        assert not looks.get(timeout=WAIT_S)
        assert port.take() == set()
        turns[0] = True
        assert asked(worker, KEY[::-1]) == KEY[::-1]  # the first answer


def test_a_port_that_is_taken_costs_beats_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))
        port = BeatPort(lambda: True)
        port.open("127.0.0.1", other.getsockname()[1])
        port.close()
    assert "workers' streams alone show that they live" in caplog.text


@pytest.mark.timeout(60)
def test_beats_are_answered_while_all_loops_of_both_ends_stand_still() -> None:
    """(1) A link has a key. (2) The loop of the router's links is blocked, and the main loop as well, on which the worker's end
    lives here too. (3) The worker's beats are answered all the same."""

    async def story() -> None:
        links = LinkThread("")
        port = await links.start(lambda event: None, "127.0.0.1", 0)
        links._beats.add(KEY, ev.LinkId(1))
        gate = threading.Event()
        beats = Beats(f"127.0.0.1:{port}", KEY, 0.01)
        try:
            assert links._loop is not None
            links._loop.call_soon_threadsafe(gate.wait, WAIT_S)
            pause = threading.Event()
            while beats.answers < 5:  # bounded by the test's timeout
                pause.wait(0.01)
            assert links.take_alive() == (1,)
        finally:
            gate.set()
            close(beats)
            await links.close()
        assert not [thread for thread in threading.enumerate() if thread.name in ("beats", "beat port")]

    asyncio.run(story())


def test_a_worker_whose_loop_hangs_beats_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as (port, number):
        port.add(KEY, ev.LinkId(1))
        monkeypatch.setattr("pdserve.rpc.beats.STUCK_S", -1.0)
        hangs = Beats(f"127.0.0.1:{number}", KEY, 0.001)
        with sender(number) as other:
            port.add(KEY[::-1], ev.LinkId(2))
            for _ in range(20):
                assert asked(other, KEY[::-1]) == KEY[::-1]
        close(hangs)
        assert (port.take(), hangs.answers) == ({ev.LinkId(2)}, 0)


def test_an_address_without_a_name_costs_beats_and_nothing_else() -> None:
    close(Beats("no.such.host.invalid:1", KEY, 0.01))


@pytest.mark.timeout(60)
def test_an_answer_from_another_address_of_the_router_counts() -> None:
    """The kernel chooses the address from which a socket on all addresses answers."""
    with listening(host="0.0.0.0") as (port, number):
        port.add(KEY, ev.LinkId(1))
        is_answered(Beats(f"127.0.0.5:{number}", KEY, 0.01))


@pytest.mark.timeout(60)
def test_beats_reach_the_router_at_whichever_address_of_its_name_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, 0)) for host in ("127.0.0.2", "127.0.0.1")]
    with listening() as (port, number):
        port.add(KEY, ev.LinkId(1))
        here = [(*ways, (host, number)) for *ways, (host, _) in found]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: here)
        is_answered(Beats(f"router:{number}", KEY, 0.01))


@pytest.mark.timeout(60)
def test_a_resolver_that_does_not_answer_holds_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop closes the beats while their thread waits for a name, and goes on. The thread ends when the resolver answers."""
    asked, answers = threading.Event(), threading.Event()

    def getaddrinfo(*args: object, **more: object) -> list[object]:
        asked.set()
        assert answers.wait(WAIT_S)
        return []

    def join(*args: object) -> None:
        raise AssertionError("the loop waits for a thread")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(threading.Thread, "join", join)
    beats = Beats("router:1", KEY, 0.01)
    assert asked.wait(WAIT_S)
    beats.close()
    monkeypatch.undo()
    assert beats._thread.is_alive()
    answers.set()
    close(beats)


def test_a_router_that_answers_no_beat_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with sender(1) as nobody:
        beats = Beats(f"127.0.0.1:{nobody.getsockname()[1]}", KEY, 10.0)
        for _ in range(3):
            beats.turned()
        beats.answers += 1
        for _ in range(4):
            beats.turned()
        assert "has answered no beat" not in caplog.text
        for _ in range(5):
            beats.turned()
        close(beats)
    assert caplog.text.count("has answered no beat") == 1
