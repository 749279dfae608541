"""The rates of a pool's workers: equal ones share load evenly, and others are told apart."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Handle
from pdserve.core.roofline import START
from pdserve.core.slo import SloClass
from pdserve.core.worker import Role, WorkerLoad
from router.core import events as ev
from router.core.events import LinkId
from router.core.pools import DRIFT_SHARE, NOISE_SHARE, Rates

from ..core_peers import Peer, Stage

CHAT = SloClass("chat", ttft_s=5.0)


def test_the_load_before_is_of_ten_to_twenty_seconds_ago_by_the_workers_clock() -> None:
    stage = Stage()
    peer = stage.join("decode-0", Role.DECODE)
    worker = stage.core.registry.get(peer.link)
    assert worker is not None
    for uptime_s in range(1, 61):
        load = WorkerLoad(BlockCounts(16, 16, 0, 0, 0), uptime_s=float(uptime_s))
        stage.tell(ev.HeartbeatSeen(peer.link, load))
        span_s = load.uptime_s - worker.before.uptime_s
        assert 10.0 <= span_s < 20.0 or (worker.before is START and uptime_s < 20)


def told(rates: list[float]) -> Rates:
    found = Rates()
    for number, rate in enumerate(rates):
        found.note(LinkId(number), rate)
        found.settle()
        found.check_invariants({LinkId(n): r for n, r in enumerate(rates[: number + 1])})
    return found


wild = st.floats() | st.sampled_from([0.0, -1.0, 1e-9, 1e308, float("inf"), float("nan")]) | st.floats(1, 1e6)


@given(st.lists(wild, max_size=8))
def test_absurd_rates_are_unknown_and_the_mean_follows_the_others(rates: list[float]) -> None:
    found = told(rates)
    known = [rate for rate in rates if 0.0005 < rate <= 1e9]
    mean = sum(known) / len(known) if known else 0.0
    assert abs(mean - found.counted_mean) <= DRIFT_SHARE * found.counted_mean + 1e-3
    for rate in rates:
        counted = found.counted(rate)
        assert counted in (rate, found.counted_mean)
        assert 0 <= counted <= 1e9
    for number in range(len(rates)):
        found.note(LinkId(number), 0.0)
        found.settle()
    assert found.counted_mean == 0.0


@given(st.floats(10, 1e6), st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=8), st.floats(1.5, 100))
def test_noise_does_not_count_and_another_machine_does(speed: float, noise: list[float], factor: float) -> None:
    rates = [speed * (1 + part) for part in noise]
    found = told(rates)
    assert {found.counted(rate) for rate in [*rates, 0.0]} == {found.counted_mean}
    other = found.counted_mean * factor
    assert found.counted(other) == other
    assert found.counted(found.counted_mean / factor) == pytest.approx(found.counted_mean / factor)
    assert NOISE_SHARE > DRIFT_SHARE


def beat(stage: Stage, peer: Peer, rate: float) -> None:
    counts = BlockCounts(16, 16, 0, 0, 0)
    last = Handle(max(peer.past, default=0))
    stage.tell(ev.HeartbeatSeen(peer.link, WorkerLoad(counts, last_handle=last, prompt_tokens_per_s=rate)))


@settings(max_examples=25, deadline=None)
@given(
    speed=st.sampled_from([50.0, 10_000.0, 3e5]),
    noise=st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=5),
    known=st.integers(0, 5),
    policy=st.sampled_from(["prefix_aware", "least_loaded", "session_affinity", "goodput"]),
    together=st.integers(1, 3),
)
def test_equal_workers_share_prompts_evenly_whatever_they_measured(
    speed: float, noise: list[float], known: int, policy: str, together: int
) -> None:
    """Some workers have told a rate, and others have computed nothing. Prompts come one by one or a few at once."""
    stage = Stage(prefill_policy=policy, placement="disaggregated")
    decode = stage.join("d", Role.DECODE, num_blocks=1000, max_num_seqs=64)
    peers = [stage.join(f"p{n}", Role.PREFILL) for n in range(len(noise))]
    rounds = 4 * len(peers)
    for number in range(rounds):
        for n, peer in enumerate(peers):
            beat(stage, peer, speed * (1 + noise[n]) if n < known or number > rounds // 2 else 0.0)
        for one in range(together):
            stage.submit(f"r{number}-{one}", prompt_len=9, slo=CHAT)
        stage.deliver(decode, together)
        stage.run()
    counts = Counter({peer.link: len(peer.past) for peer in peers})
    assert sum(counts.values()) == rounds * together
    spread = max(counts.values()) - min(counts[peer.link] for peer in peers)
    unknown_last = policy == "goodput" and 0 < known < len(peers)  # it prefers a worker that is known to be in time
    assert spread <= 1 or unknown_last
    stage.assert_empty()


def test_all_workers_are_sorted_anew_when_the_mean_moves() -> None:
    """The queue of a worker without a rate is as long as the mean says."""
    stage = Stage(placement="disaggregated")
    decode = stage.join("d", Role.DECODE, num_blocks=1000, max_num_seqs=64)
    fast, slow, new = (stage.join(f"p{n}", Role.PREFILL) for n in range(3))
    for number in range(9):
        stage.submit(f"r{number}", prompt_len=9)
        stage.deliver(decode, 1)
    for rate in (1000.0, 200.0):
        beat(stage, fast, rate)
        beat(stage, slow, rate / 4)
        stage.core.check_invariants()
        stage.core.pools.refresh()
    pool = stage.core.pools.prefill
    assert pool.row(new.link).load == pytest.approx(27 / 125, rel=DRIFT_SHARE)
    stage.run()
    stage.assert_empty()


@given(st.lists(st.floats(100, 200), min_size=2, max_size=6), st.sets(st.integers(0, 5)))
def test_a_check_between_events_moves_no_mean(rates: list[float], checked: set[int]) -> None:
    """A recording does not tell of checks. If one moved the mean, its replay could order the workers differently."""
    means = []
    for asked in (checked, set[int]()):
        stage = Stage(placement="disaggregated")
        peer = stage.join("p", Role.PREFILL)
        for number, rate in enumerate(rates):
            beat(stage, peer, rate)
            if number in asked:
                stage.core.check_invariants()
        stage.core.pools.refresh()
        means.append(stage.core.pools.prefill.row(peer.link).counted_tokens_per_s)
    assert means[0] == means[1]


def test_a_machine_that_is_four_times_as_fast_gets_the_longer_queue() -> None:
    """16 prompts come at once: the queues end at about the same time."""
    stage = Stage(placement="disaggregated", prefill_policy="least_loaded")
    decode = stage.join("d", Role.DECODE, num_blocks=1000, max_num_seqs=64)
    fast, slow = (stage.join(f"p{n}", Role.PREFILL) for n in range(2))
    beat(stage, fast, 400.0)
    beat(stage, slow, 100.0)
    for number in range(15):
        stage.submit(f"r{number}", prompt_len=9)
        stage.deliver(decode, 1)
    assert 11 <= len(fast.past) <= 13
    stage.run()
    stage.assert_empty()
