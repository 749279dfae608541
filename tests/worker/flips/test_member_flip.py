"""A member that drains in order to take the other role: when it is over, and what is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvtransfer.api import KvRegion, Region
from pdserve.config import WorkerConfig
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import InvalidRequest, ReplicaLost
from pdserve.core.ids import Handle, Incarnation
from pdserve.core.kv_layout import KvSpec
from pdserve.core.worker import LINK_VERSIONS, PEER_VERSIONS, VersionRange, WorkerLoad
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.worker.engine_thread import EngineView
from pdserve.worker.host import Host, KvDamage
from pdserve.worker.member import DRAIN_LOOK_S, LinkMember
from pdserve.worker.messages import Command, EngineSnapshot, SetBudget, StepEvents
from sim.faults.oracle import CARD, MAX_MODEL_LEN, TOKENIZER
from sim.faults.worker import LAYOUT
from sim.world.clock import SimLoop, Timeline
from sim.world.server import FakeServer

DECODE, PREFILL = common_pb2.ROLE_DECODE, common_pb2.ROLE_PREFILL
LIMIT_S = 20.0


class StubRole:
    """A role that has as much work as the test says."""

    leases_held = 0
    damage = KvDamage()

    def __init__(self) -> None:
        self.idle = True
        self.stubborn = False
        self.dropped = 0

    def on_command(self, message: link_pb2.RouterMessage) -> None:
        raise AssertionError(message)

    def on_step(self, events: StepEvents) -> None: ...

    def on_link_lost(self) -> None:
        self.dropped += 1
        self.idle = self.idle or not self.stubborn

    drop_all = on_link_lost

    def on_tick(self) -> None: ...

    async def close(self) -> None: ...


class StubTransfer:
    """A transfer thread with as many reads that have not stopped as the test says."""

    num_unstopped = 0


class Bench:
    """A prefill worker's member on virtual time, with an engine that only notes its commands."""

    def __init__(self, *, obstacle: str = "") -> None:
        self.timeline = Timeline()
        self.loop = SimLoop(self.timeline, "loop")
        self.commands: list[Command] = []
        self.view = EngineView(snapshot(), self.commands.append, step_timeout_s=60.0, prefix_caching=True)
        self.role, self.transfer = StubRole(), StubTransfer()
        config = WorkerConfig("w", "router:1", drain_timeout_s=LIMIT_S, flip_obstacle=obstacle)
        self.member = LinkMember(config, PREFILL, self.view)
        self.member.start(self._host(config), lambda host: self.role)
        self.ended: asyncio.Task[Any] = self.loop.create_task(self.member.drained())

    def _host(self, config: WorkerConfig) -> Host:
        return Host(
            config=config,
            card=CARD,
            kv_spec=KvSpec((LAYOUT,)),
            regions=(KvRegion.of(LAYOUT, Region(1 << 20, 16, LAYOUT.block_bytes)),),
            tokenizer=TOKENIZER,
            max_model_len=MAX_MODEL_LEN,
            incarnation=Incarnation(7),
            transport="nixl",
            transfer=cast(Any, self.transfer),
            agent_metadata=b"",
            address="w:1",
            server=cast(Any, FakeServer()),
            submit=self.view.submit,
            send=self.member.link.send,
            seq_ids=self.view.seq_ids,
        )

    def run(self, seconds: float) -> None:
        self.timeline.run(self.ended.done, until_s=self.timeline.now_s + seconds)

    def serves_on(self) -> bool:
        """Tell whether the member has not drained, and end the wait for it."""
        self.run(1.0)
        served = not self.ended.done()
        self.ended.cancel()
        self.run(1.0)
        return served


def snapshot(taken: int = 0, **counts: int) -> EngineSnapshot:
    held, quarantined = counts.get("held", 0), counts.get("quarantined", 0)
    blocks = BlockCounts(16, 16 - held - quarantined, 0, held, quarantined)
    return EngineSnapshot(WorkerLoad(blocks, running_sequences=counts.get("running", 0)), taken)


def test_an_idle_worker_flips_at_once_and_names_the_role():
    bench = Bench()
    bench.member.flip(DECODE)
    bench.run(1.0)
    assert bench.ended.result() == DECODE


def test_a_drained_worker_names_no_role():
    bench = Bench()
    bench.member.drain()
    bench.run(1.0)
    assert bench.ended.result() is None


LEFT: dict[str, tuple[Callable[[Bench], None], Callable[[Bench], None]]] = {
    "a request": (lambda b: setattr(b.role, "idle", False), lambda b: setattr(b.role, "idle", True)),
    "an own read": (lambda b: setattr(b.transfer, "num_unstopped", 1), lambda b: setattr(b.transfer, "num_unstopped", 0)),
    "a held block": (
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot(held=1))),
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot())),
    ),
    "a quarantined block": (
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot(quarantined=1))),
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot())),
    ),
    "a sequence": (
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot(running=1))),
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot())),
    ),
    "a command that the engine has not taken": (
        lambda b: b.view.submit(SetBudget(64)),
        lambda b: b.view.on_step(StepEvents(snapshot=snapshot(taken=1))),
    ),
}


@pytest.mark.parametrize("what", LEFT)
def test_nothing_may_be_left_when_a_flip_is_over(what):
    bench = Bench()
    leave, take = LEFT[what]
    leave(bench)
    bench.member.flip(DECODE)
    bench.run(LIMIT_S / 2)
    assert not bench.ended.done(), what
    take(bench)
    bench.run(1.0)
    assert bench.ended.result() == DECODE
    assert bench.role.dropped == 0


def test_a_flip_that_takes_too_long_drops_its_requests_and_goes_on():
    bench = Bench()
    bench.role.idle = False
    bench.member.flip(DECODE)
    bench.run(LIMIT_S + 2)
    assert bench.role.dropped == 1
    assert bench.ended.result() == DECODE


def test_a_read_that_does_not_stop_ends_the_process_instead_of_the_flip():
    bench = Bench()
    bench.transfer.num_unstopped = 1
    bench.member.flip(DECODE)
    bench.run(60.0)
    with pytest.raises(ReplicaLost, match="something is left"):
        bench.ended.result()


@pytest.mark.parametrize("what", LEFT)
def test_a_drain_that_takes_too_long_ends_with_what_is_left(what):
    """Whatever is left: it never hangs."""
    bench = Bench()
    LEFT[what][0](bench)
    bench.member.drain()
    bench.run(LIMIT_S / 2)
    assert not bench.ended.done(), what
    bench.run(LIMIT_S)
    assert bench.ended.result() is None
    assert bench.role.dropped == 0


def test_a_worker_that_dials_while_it_drains_says_so_in_its_hello():
    """The router may have restarted, so it knows nothing of the drain."""
    bench = Bench()
    assert not bench.member._hello().draining
    bench.member.drain()
    hello = bench.member._hello()
    assert hello.draining
    assert VersionRange(hello.oldest_link_version, hello.link_version) == LINK_VERSIONS
    assert VersionRange(hello.oldest_peer_version, hello.peer_version) == PEER_VERSIONS
    bench.run(1.0)
    assert bench.ended.done()


def test_a_drain_ends_a_flip():
    bench = Bench()
    bench.role.idle = False
    bench.member.flip(DECODE)
    bench.run(1.0)
    bench.member.drain()
    bench.role.idle = True
    bench.run(1.0)
    assert bench.ended.result() is None


def test_a_flip_does_not_end_a_drain():
    bench = Bench()
    bench.member.drain()
    with pytest.raises(InvalidRequest, match="about to end"):
        bench.member.flip(DECODE)
    bench.run(1.0)
    assert bench.ended.result() is None


def test_a_flip_is_asked_for_twice_and_made_once():
    bench = Bench()
    bench.member.flip(DECODE)
    bench.member.flip(DECODE)
    bench.run(1.0)
    assert bench.ended.result() == DECODE


@pytest.mark.parametrize("role", [PREFILL, common_pb2.ROLE_UNSPECIFIED])
def test_only_the_other_role_can_be_taken(role):
    bench = Bench()
    with pytest.raises(InvalidRequest, match="not the other role"):
        bench.member.flip(role)
    assert bench.serves_on()


def test_an_obstacle_prevents_the_flip_and_is_named():
    bench = Bench(obstacle="the pools differ")
    with pytest.raises(InvalidRequest, match="the pools differ"):
        bench.member.flip(DECODE)
    assert bench.serves_on()


def test_the_next_life_goes_on_with_the_engines_sequence_ids():
    """An id that is used twice would give a command's sequence to another request."""
    bench = Bench()
    assert bench.serves_on()
    hosts = [bench._host(WorkerConfig("w", "router:1")) for _ in range(2)]
    assert [host.next_seq_id(Handle(1)) for host in hosts] == [1, 2]
    assert hosts[0].counted is not hosts[1].counted
    assert hosts[0].ticket_secret != hosts[1].ticket_secret


def test_a_lender_stays_for_another_look_once_it_is_empty() -> None:
    """The commit that emptied it has not reached the router yet. A link that ended now would cost the request a replay."""
    bench = Bench()
    bench.role.idle = False
    bench.member.drain()
    bench.run(1.02)
    bench.role.idle = True
    emptied_s = bench.timeline.now_s
    bench.run(5.0)
    assert bench.ended.done()
    assert bench.timeline.now_s - emptied_s >= DRAIN_LOOK_S
