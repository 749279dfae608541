"""How the transfer thread waits: blocked when idle, with back-off while a read is in flight."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from queue import Empty, Queue

from transfer_testing import FakePeer, Pool, new_incarnation

from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.thread import (
    POLL_MAX_S,
    POLL_MIN_S,
    Command,
    Connect,
    Connected,
    Event,
    Post,
    Reactor,
    ReadDone,
    ReadFailed,
    ReadId,
    Stop,
)

Step = Command | Callable[[], Command] | None


class Script(Queue[Command]):
    """Hands out its commands, None standing for a wait that timed out, a callable for what happens first; notes each
    wait's timeout."""

    def __init__(self, *commands: Step) -> None:
        self.commands = list(commands)
        self.waits_s: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Command:
        self.waits_s.append(timeout)
        command = self.commands.pop(0)
        if command is None:
            raise Empty
        return command() if callable(command) else command


def make(*commands: Step, polls_until_done: int = 0) -> tuple[Script, list[Event], Reactor]:
    fabric = FakeFabric()
    peer = FakePeer(fabric)
    PEERS.append(peer)  # its memory must outlive the read
    fabric.polls_until_done = polls_until_done
    post = Post(ReadId(1), peer.incarnation, peer.region, (1,), (2,), time.monotonic() + 60, POOL.region)
    script = Script(Connect(peer.incarnation, peer.metadata), post, *commands, Stop())
    events: list[Event] = []
    return script, events, Reactor(FakeTransport(fabric, new_incarnation(), [POOL.region]), script, events.append)


POOL = Pool()
PEERS: list[FakePeer] = []


def test_with_nothing_in_flight_it_blocks_without_timeout() -> None:
    script, events, reactor = make()
    reactor.run()
    assert script.waits_s == [None, None, None]
    assert isinstance(events[-1], ReadDone)


def test_a_read_in_flight_is_polled_ever_more_slowly() -> None:
    """Each wait is twice the last, up to the longest; once the read is done, it blocks again."""
    script, events, reactor = make(*[None] * 8, polls_until_done=8)
    reactor.run()
    waits_s = script.waits_s[2:-1]
    assert waits_s[0] == POLL_MIN_S
    assert waits_s[-1] == POLL_MAX_S
    assert all(later == min(2 * earlier, POLL_MAX_S) for earlier, later in itertools.pairwise(waits_s) if later)
    assert script.waits_s[-1] is None
    assert isinstance(events[-1], ReadDone)


def test_a_read_whose_deadline_has_passed_is_not_posted() -> None:
    script, events, reactor = make()
    post = script.commands[1]
    assert isinstance(post, Post)
    script.commands[1] = dataclasses.replace(post, deadline_s=0.0)
    reactor.run()
    failed = events[-1]
    assert isinstance(failed, ReadFailed)
    assert failed.stopped


def test_reads_that_a_broken_connection_has_ended_are_told_before_it_is_made_anew() -> None:
    """(1) A read is in flight, its peer dies; (2) `Connect` comes before the next poll."""

    def die() -> Command:
        PEERS[-1].kill()
        return connect

    script, events, reactor = make(die, polls_until_done=9)
    connect = script.commands[0]
    assert isinstance(connect, Connect)
    reactor.run()
    assert [type(event) for event in events[1:]] == [ReadFailed, Connected]
