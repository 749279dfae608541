"""The life of the router: it is killed only for a reason, started only when it is away, and never given up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.router import life
from pdserve.cluster.router.life import (
    Back,
    Effect,
    Kill,
    Lost,
    RouterLife,
    RouterPhase,
    RouterSeen,
    RouterSilence,
    RouterStart,
    Sight,
)

TICK_S = 0.5
LONGEST_S = Backoff().longest_s


@dataclass
class World:
    """A process that does what a script says, under the machine: each entry is what happens to it within one tick."""

    machine: RouterLife = field(default_factory=RouterLife)
    sight: Sight = Sight.SERVES
    now_s: float = 0.0
    told: list[Effect] = field(default_factory=list)
    kills_work: bool = True

    def tick(self, happens: str) -> list[Effect]:
        self.now_s += TICK_S
        runs = self.sight is not Sight.ENDED
        if happens == "dies" and runs:
            self.sight = Sight.ENDED
        elif happens == "hangs" and self.sight is Sight.SERVES:
            self.sight = Sight.SILENT
        elif happens == "ready" and self.sight is Sight.STARTS:
            self.sight = Sight.SERVES
        before = self.sight
        effects = self.machine.look(RouterSeen(self.sight, "status 1" if self.sight is Sight.ENDED else ""), self.now_s)
        for effect in effects:
            if isinstance(effect, Kill):
                assert before is not Sight.ENDED
                assert before is not Sight.SERVES or self.machine.phase is RouterPhase.AWAY
                self.sight = Sight.ENDED if self.kills_work else self.sight
            elif isinstance(effect, RouterStart):
                assert self.sight is Sight.ENDED, "two routers would fight for the ports"
                self.sight = Sight.STARTS
        self.told += effects
        return effects


@given(st.lists(st.sampled_from(["nothing", "dies", "hangs", "ready"]), max_size=200))
def test_a_router_is_never_given_up_and_never_doubled(script: list[str]) -> None:
    """Whatever happened: within the longest delay a router is started again, and a return is told once for each loss told."""
    world = World()
    for happens in script:
        world.tick(happens)
    for _ in range(int((LONGEST_S + life.START_LIMIT_S) / TICK_S) + 3):
        world.tick("ready")
        if world.sight is Sight.SERVES:
            break
    world.tick("nothing")
    if world.sight is Sight.SILENT:
        world.tick("nothing")
    for _ in range(int(LONGEST_S / TICK_S) + 3):
        world.tick("ready")
    assert world.sight is Sight.SERVES
    assert world.machine.phase is RouterPhase.SERVING
    delays = [effect.delay_s for effect in world.told if isinstance(effect, Lost)]
    assert all(0 < delay <= LONGEST_S for delay in delays)
    outer = [type(effect) for effect in world.told if isinstance(effect, (Lost, Back))]
    assert outer == [] or (outer[0] is Lost and outer[-1] is Back)
    assert (Back, Back) not in itertools.pairwise(outer)


@given(st.lists(st.sampled_from(["nothing", "ready"]), max_size=50))
def test_a_router_that_serves_is_left_alone(script: list[str]) -> None:
    world = World()
    assert [world.tick(happens) for happens in script] == [[]] * len(script)


def test_a_port_that_stays_taken_is_tried_for_ever_and_told_twice() -> None:
    """(1) The router dies. (2) Each start ends at once. (3) After an hour it is still tried, and was told twice: when it began,
    and when the delays were longest."""
    world = World()
    world.tick("dies")
    while world.now_s < 3600:
        world.tick("dies")
    assert sum(isinstance(effect, RouterStart) for effect in world.told[-30:]) > 10
    assert len([effect for effect in world.told if isinstance(effect, Lost)]) == 2
    while world.sight is not Sight.SERVES:
        world.tick("ready")
    assert isinstance(world.told[-1], Back)


def test_a_start_that_hangs_is_ended() -> None:
    world = World()
    world.tick("dies")
    while not any(isinstance(effect, Kill) for effect in world.told):
        world.tick("nothing")
        assert world.now_s < life.START_LIMIT_S + 10
    assert "not ready" in [effect.detail for effect in world.told if isinstance(effect, Lost)][-1]


def test_a_process_that_outlives_its_kill_is_killed_again_and_not_doubled() -> None:
    world = World(kills_work=False)
    world.tick("hangs")
    for _ in range(20):
        assert world.tick("nothing") == [Kill()]
    world.sight = Sight.ENDED
    assert world.tick("nothing") == [RouterStart()]


def test_the_table_is_total() -> None:
    assert set(life._TABLE) == {(phase, sight) for phase in RouterPhase for sight in Sight}


ASKED = st.tuples(st.booleans(), st.floats(0.0, 100.0))


@given(st.lists(ASKED, max_size=60))
def test_silence_is_three_waits_in_a_row_that_were_really_made(asked: list[tuple[bool, float]]) -> None:
    silence = RouterSilence()
    for answered, took_s in asked:
        silence.note(answered=answered, took_s=took_s)
    waited = [answered for answered, took_s in asked if answered or took_s <= silence.limit_s]
    assert silence.lasts == (len(waited) >= 3 and not any(waited[-3:]))


@pytest.mark.parametrize("pause_s", [60.0, 10.0])
def test_a_supervisor_that_stood_still_accuses_nobody(pause_s: float) -> None:
    silence = RouterSilence()
    for _ in range(100):
        silence.note(answered=False, took_s=pause_s)
    assert not silence.lasts


def test_a_hung_router_is_ended_within_ten_seconds() -> None:
    """The first probe begins at most one pause after it hung, and each lasts as long as both ways of asking."""
    assert life.PROBE_S + life.MOST_SILENT * (life.ASK_CLIENTS_S + life.ASK_ADMIN_S) <= 10.0
