"""Observations from two readings: nothing negative or huge comes out, whatever restarts and whatever a worker says."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.cluster.scaling.report import reading_of
from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.slo import ClassDemand, DemandCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot
from pdserve.planner.observations import Missed, Observations
from pdserve.planner.observe import ClusterReading, WorkerReading, observe
from router.grpc.cluster_state import cluster_state_to_wire

SHARES = {"utilisation", "kv_used", "cached_share", "prompt_share", "prefill_share", "ttft_met", "tpot_met"}
IDLE = WorkerLoad(BlockCounts(100, 100, 0, 0, 0))


def worker(name: str, role: Role = Role.PREFILL, incarnation: int = 1, **load: object) -> WorkerReading:
    hello = WorkerHello(WorkerId(name), role, Incarnation(incarnation), "h:1", "m", 16, 100, 64, 8, "bfloat16", 8)
    return WorkerReading(hello, replace(IDLE, **load), ready=True, draining=False)  # type: ignore[arg-type]


def reading(at_s: float, *workers: WorkerReading, router: int = 1, **demand: object) -> ClusterReading:
    return ClusterReading(at_s, router, 0, DemandCounts(**demand), workers)  # type: ignore[arg-type]


def numbers(observed: Observations) -> Iterator[tuple[str, float | None]]:
    for name, value in asdict(observed).items():
        yield from value.items() if isinstance(value, dict) else [(name, value)]


def test_rates_and_shares_of_an_interval() -> None:
    before = reading(
        10.0,
        worker("p0", computed_prompt_tokens=100, prompt_busy_s=1.0, uptime_s=5.0, prefix_queried_tokens=10),
        worker("d0", Role.DECODE, output_tokens=10, decode_busy_s=1.0, uptime_s=7.0),
        uptime_s=100.0, requests=5, prompt_tokens=50, output_tokens=5, refused=1,
        classes=(ClassDemand("chat", 2, 2),),
    )  # fmt: skip
    load = {"prompt_tokens_per_s": 50.0, "max_num_batched_tokens": 25, "queued_tokens": 40}
    decodes = {"decode_step_s": 0.02, "running_sequences": 6, "blocks": BlockCounts(100, 40, 0, 50, 10)}
    after = reading(
        20.0,
        worker("p0", computed_prompt_tokens=400, prompt_busy_s=6.0, uptime_s=15.0, prefix_queried_tokens=410,
               prefix_hit_tokens=100, **load),  # type: ignore[arg-type]
        worker("d0", Role.DECODE, output_tokens=210, decode_busy_s=5.0, prompt_busy_s=0.5, uptime_s=17.0, **decodes),
        uptime_s=110.0, requests=25, prompt_tokens=450, output_tokens=205, refused=6, queued_prompt_tokens=7,
        longest_wait_s=1.5, classes=(ClassDemand("chat", 11, 3),),
    )  # fmt: skip
    seen = observe(before, after)
    assert (seen.now_s, seen.interval_s) == (20.0, 10.0)
    demand = seen.demand
    assert (demand.requests_per_s, demand.prompt_tokens_per_s, demand.output_tokens_per_s) == (2.5, 40.0, 20.0)
    assert (demand.queued_requests, demand.queued_prompt_tokens, demand.longest_wait_s) == (0, 7, 1.5)
    assert (seen.ttft_met, seen.tpot_met) == (0.9, None)
    prefill, decode = seen.prefill, seen.decode
    assert (prefill.ready, prefill.coming, prefill.leaving) == (1, 0, 0)
    assert (prefill.tokens_per_s, prefill.busy_tokens_per_s, prefill.utilisation) == (30.0, 60.0, 0.5)
    assert (prefill.step_s, prefill.queued_tokens, prefill.cached_share) == (0.5, 40.0, 0.25)
    assert (decode.tokens_per_s, decode.utilisation, decode.step_s) == (20.0, 0.45, 0.02)
    assert decode.busy_tokens_per_s == pytest.approx(200 / 4.5)
    assert (decode.sequences, decode.max_sequences, decode.kv_used, decode.cached_share) == (6.0, 8.0, 0.6, None)


def test_sequences_that_an_operator_took_away_are_no_room() -> None:
    """`pdserve set-budget` lowered one worker from 8 sequences to 4. The other one does not say, or says nonsense."""
    lowered = worker("d0", Role.DECODE, running_sequences=4, max_num_seqs=4)
    for said in (0, 8, 99):
        pool = observe(None, reading(1.0, lowered, worker("d1", Role.DECODE, max_num_seqs=said))).decode
        assert (pool.sequences, pool.max_sequences) == (2.0, 6.0)


def test_the_misses_of_other_classes_say_nothing_about_the_class_for_which_pools_are_sized() -> None:
    """Chats meet their target; one voice request in twenty of all misses a target that no size reaches."""
    before = reading(1.0, uptime_s=1.0, classes=(ClassDemand("chat", ttft_met=5),))
    classes = (ClassDemand("chat", 100, 0, 90, 10), ClassDemand("voice", 0, 5))
    after = reading(11.0, uptime_s=11.0, ttft_met=95, ttft_missed=5, classes=classes)
    chat, voice = (observe(before, after, slo_class=name) for name in ("chat", "voice"))
    assert (chat.ttft_met, chat.tpot_met, voice.ttft_met, voice.tpot_met) == (1.0, 0.9, 0.0, None)
    assert observe(before, after, slo_class="batch").ttft_met is None
    assert observe(before, after).ttft_met == 0.95
    assert observe(None, after, slo_class="chat").ttft_met is None


def test_ended_missed_and_refused_requests_of_a_class_and_of_all() -> None:
    """Voice has no target for TPOT, and a class that comes within the interval counts from 0."""
    old = ClassDemand("chat", 10, 2, 9, 3, late_by_queue=2, slow_by_steps=3, refused=4, first_gap_s=2.0, first_gaps=12)
    chat = ClassDemand(
        "chat", 20, 7, 19, 6, late_by_queue=3, late_by_prefill=3, late_by_failure=1, slow_by_steps=4, slow_by_transfer=1,
        slow_by_failure=1, refused=6, first_gap_s=5.0, first_gaps=18,
    )  # fmt: skip
    voice = ClassDemand("voice", 1, 2, late_by_prefill_queue=1, late_by_colocated=1, refused=1, first_gap_s=1.0, first_gaps=2)
    before, after = (reading(at, uptime_s=at, classes=classes) for at, classes in ((1.0, (old,)), (11.0, (chat, voice))))
    of_chat, of_all, nobody = (observe(before, after, slo_class=name) for name in ("chat", None, "batch"))
    assert (of_chat.ended, of_chat.refused, of_chat.first_gap_s) == (15.0, 2.0, 0.5)
    assert of_chat.missed == Missed(queue=1, prefill=3, transfer=1, steps=1, failure=2)
    assert (of_all.ended, of_all.refused, of_all.first_gap_s) == (18.0, 3.0, 0.5)
    assert of_all.missed == replace(of_chat.missed, prefill_queue=1, colocated=1)
    assert (nobody.ended, nobody.refused, nobody.first_gap_s, nobody.missed) == (0.0, 0.0, None, Missed())
    for restarted in (replace(before, router_incarnation=2), None):
        seen = observe(restarted, after, slo_class="chat")
        assert (seen.ended, seen.refused, seen.first_gap_s, seen.missed) == (None, None, None, Missed())


def test_classes_with_one_target_each_are_counted_side_by_side() -> None:
    classes = (ClassDemand("first", ttft_met=3), ClassDemand("gaps", tpot_met=4))
    assert observe(reading(1.0, uptime_s=1.0), reading(2.0, uptime_s=2.0, classes=classes)).ended == 7.0


def decoder(name: str, incarnation: int = 1, **load: object) -> WorkerReading:
    return worker(name, Role.DECODE, incarnation, **{"decode_step_s": 0.9, "uptime_s": 11.0} | load)


def test_the_time_and_the_sequences_of_a_step_are_those_of_all_steps_of_workers_that_count_them() -> None:
    """(1) Two workers count. (2) One of them does not. (3) One is replaced, and one comes. (4) Nobody counts or decodes: the
    workers' own means of late are left."""
    old = [decoder("d0", uptime_s=1.0, output_tokens=100, decode_busy_s=5.0, decode_steps=50), decoder("d1", uptime_s=1.0)]
    d0 = decoder("d0", output_tokens=400, decode_busy_s=8.0, decode_steps=140, prompt_steps=10)
    d1 = decoder("d1", output_tokens=500, decode_busy_s=1.0, decode_steps=10)

    def seen(*new: WorkerReading) -> tuple[float | None, float | None]:
        pool = observe(reading(1.0, *old), reading(11.0, *new)).decode
        return pool.step_s, pool.step_sequences

    assert seen(d0, d1) == (pytest.approx(0.04), pytest.approx(800 / 110))
    assert seen(d0, replace(d1, load=replace(d1.load, decode_steps=0))) == (pytest.approx(3 / 90), 3.0)
    again = decoder("d1", 2, output_tokens=500, decode_busy_s=1.0, decode_steps=10)
    assert seen(d0, again, decoder("d2", decode_busy_s=9.0, decode_steps=1)) == (pytest.approx(3 / 90), 3.0)
    assert seen(*[replace(one, load=replace(one.load, decode_steps=0)) for one in (d0, d1)]) == (0.9, None)
    assert seen(decoder("d0", output_tokens=100, decode_busy_s=5.0, decode_steps=50)) == (0.9, None)
    prefill = observe(reading(1.0, worker("p0", uptime_s=1.0)), reading(11.0, worker("p0", uptime_s=11.0, decode_steps=9)))
    assert (prefill.prefill.step_s, prefill.prefill.step_sequences) == (None, None)


def test_where_prompts_were_computed_and_what_they_took() -> None:
    """Ten steps of the decode worker computed prompts in 1 s; ten steps that only decode would have taken 0.2 s. The other
    worker decodes nothing, so all of its step is the prompt's."""
    old = [worker(name, Role.DECODE, uptime_s=1.0) for name in ("d0", "d1")]
    new = [
        worker("d0", Role.DECODE, uptime_s=11.0, prompt_busy_s=1.0, prompt_steps=10, decode_step_s=0.02, running_sequences=4),
        worker("d1", Role.DECODE, uptime_s=11.0, prompt_busy_s=4.0, prompt_steps=10, decode_step_s=0.02),
    ]
    counts = {"placed_prompt_tokens": 500, "prefill_prompt_tokens": 100}
    seen = observe(reading(1.0, *old, uptime_s=1.0), reading(11.0, *new, uptime_s=11.0, **counts))
    assert (seen.demand.prefill_share, seen.decode.prompt_share) == (0.2, pytest.approx(0.24))
    assert observe(reading(1.0, uptime_s=1.0), reading(11.0, uptime_s=11.0)).demand.prefill_share is None


def test_the_first_reading_has_no_rates_and_still_counts_workers() -> None:
    seen = observe(None, reading(3.0, worker("p0", queued_tokens=5), uptime_s=9.0, requests=4))
    assert (seen.interval_s, seen.demand.requests_per_s, seen.prefill.tokens_per_s) == (0.0, None, None)
    assert (seen.prefill.ready, seen.prefill.queued_tokens, seen.decode.ready, seen.decode.kv_used) == (1, 5.0, 0, None)


@pytest.mark.parametrize("at_s", [1.0, 0.5, math.inf, math.nan])
def test_readings_without_an_interval_between_them_have_no_rates(at_s: float) -> None:
    old, new = worker("p0", uptime_s=1.0), worker("p0", uptime_s=2.0, computed_prompt_tokens=9)
    seen = observe(reading(1.0, old, uptime_s=1.0), reading(at_s, new, uptime_s=2.0, requests=5))
    assert (seen.interval_s, seen.demand.requests_per_s, seen.prefill.tokens_per_s) == (0.0, None, None)


def test_a_new_incarnation_is_left_out_and_the_others_count() -> None:
    old = [worker("p0", computed_prompt_tokens=10, uptime_s=1.0), worker("p1", computed_prompt_tokens=900, uptime_s=1.0)]
    new = [worker("p0", computed_prompt_tokens=30, uptime_s=2.0), worker("p1", Role.PREFILL, 2, uptime_s=2.0)]
    assert observe(reading(1.0, *old), reading(2.0, *new)).prefill.tokens_per_s == 20.0
    assert observe(reading(1.0, *old), reading(2.0, new[1])).prefill.tokens_per_s is None


def test_a_new_incarnation_that_has_computed_more_than_the_old_one_is_left_out_too() -> None:
    old, new = worker("p0", computed_prompt_tokens=5, uptime_s=1.0), worker("p0", Role.PREFILL, 2, uptime_s=9.0)
    new = replace(new, load=replace(new.load, computed_prompt_tokens=5000))
    assert observe(reading(1.0, old), reading(11.0, new)).prefill.tokens_per_s is None


def test_rates_are_over_the_workers_own_clock_and_no_engine_is_more_than_busy() -> None:
    """The reader waited for 10 s, and the worker's heartbeats are 5 s apart."""
    old = worker("d0", Role.DECODE, uptime_s=1.0)
    new = worker("d0", Role.DECODE, uptime_s=6.0, output_tokens=100, decode_busy_s=5.5)
    pool = observe(reading(1.0, old), reading(11.0, new)).decode
    assert (pool.tokens_per_s, pool.utilisation) == (20.0, 1.0)


def test_a_restarted_router_has_no_demand_yet_and_its_workers_have_rates() -> None:
    before = reading(1.0, worker("p0", uptime_s=1.0), router=1, uptime_s=50.0, requests=3)
    after = reading(11.0, worker("p0", uptime_s=11.0, computed_prompt_tokens=50), router=2, uptime_s=60.0, requests=9)
    seen = observe(before, after)
    assert (seen.demand.requests_per_s, seen.ttft_met, seen.prefill.tokens_per_s) == (None, None, 5.0)


def test_a_worker_whose_clock_stands_is_left_out() -> None:
    old, new = worker("p0", uptime_s=4.0), worker("p0", uptime_s=4.0, computed_prompt_tokens=10)
    assert observe(reading(1.0, old), reading(2.0, new)).prefill.tokens_per_s is None


def test_who_comes_and_who_leaves() -> None:
    """p2 becomes a decode worker, so it comes there and leaves nowhere; p3 ends."""
    loads = replace(worker("p1"), ready=False)
    leaves = [replace(worker(name), ready=False, draining=True) for name in ("p2", "p3")]
    members = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d7": Role.DECODE, "p2": Role.DECODE}
    seen = observe(None, reading(1.0, worker("p0"), loads, *leaves), {WorkerId(name): role for name, role in members.items()})
    assert (seen.prefill.ready, seen.prefill.coming, seen.prefill.leaving) == (1, 1, 1)
    assert (seen.decode.ready, seen.decode.coming, seen.decode.leaving) == (0, 2, 0)


EVERY = ClassDemand("chat", *range(1, len(fields(ClassDemand))))  # type: ignore[arg-type]
"""A value of its own in each field."""


def test_the_wire_carries_a_reading() -> None:
    one = worker("p0", computed_prompt_tokens=7, decode_steps=8, uptime_s=2.5)
    snapshot = WorkerSnapshot(one.hello, one.load, 0.5, 3)
    demand = DemandCounts(3.0, 1, 2, 3, 4, 5, 6.0, 7, 8, 9, 10, 12, 11, (EVERY, ClassDemand("x")))
    wire = cluster_state_to_wire(ClusterSnapshot(9, 4, 0, (snapshot,), demand=demand), 16)
    assert reading_of(wire, at_s=2.0) == ClusterReading(2.0, 9, 4, demand, (one,))


COUNTS = st.integers(-5, 1 << 40)
SECONDS = st.floats(0, 1e6) | st.sampled_from([math.nan, math.inf, -1.0])
LOADS = st.builds(
    WorkerLoad,
    blocks=st.lists(st.integers(0, 50), min_size=4, max_size=4).map(lambda n: BlockCounts(sum(n), *n)),
    queued_tokens=COUNTS,
    running_sequences=COUNTS,
    max_num_seqs=COUNTS,
    prefix_queried_tokens=COUNTS,
    prefix_hit_tokens=COUNTS,
    computed_prompt_tokens=COUNTS,
    output_tokens=COUNTS,
    prompt_tokens_per_s=SECONDS,
    max_num_batched_tokens=COUNTS,
    decode_step_s=SECONDS,
    prompt_busy_s=SECONDS,
    prompt_steps=COUNTS,
    decode_busy_s=SECONDS,
    decode_steps=COUNTS,
    uptime_s=SECONDS,
)
WORKERS = st.lists(
    st.builds(
        lambda name, role, incarnation, load, ready, draining: WorkerReading(
            worker(name, role, incarnation).hello, load, ready, draining
        ),
        st.sampled_from(["a", "b", "c"]), st.sampled_from(Role), st.integers(1, 2), LOADS, st.booleans(), st.booleans(),
    ),
    max_size=3,
    unique_by=lambda w: w.hello.worker_id,
)  # fmt: skip
CLASSES = st.builds(
    ClassDemand, st.sampled_from(["chat", "voice"]), ttft_met=COUNTS, ttft_missed=COUNTS, tpot_met=COUNTS, tpot_missed=COUNTS,
    late_by_queue=COUNTS, late_by_failure=COUNTS, slow_by_steps=COUNTS, slow_by_failure=COUNTS, refused=COUNTS,
    first_gap_s=SECONDS, first_gaps=COUNTS,
)  # fmt: skip
DEMANDS = st.builds(
    DemandCounts, uptime_s=SECONDS, requests=COUNTS, prompt_tokens=COUNTS, output_tokens=COUNTS, refused=COUNTS,
    ttft_met=COUNTS, ttft_missed=COUNTS, tpot_met=COUNTS, tpot_missed=COUNTS, longest_wait_s=SECONDS,
    placed_prompt_tokens=COUNTS, prefill_prompt_tokens=COUNTS,
    classes=st.lists(CLASSES, max_size=2, unique_by=lambda one: one.slo_class).map(tuple),
)  # fmt: skip
READINGS = st.builds(ClusterReading, SECONDS, st.integers(1, 2), st.integers(0, 9), DEMANDS, WORKERS.map(tuple))


@given(st.none() | READINGS, READINGS, st.dictionaries(st.sampled_from("abcd").map(WorkerId), st.sampled_from(Role)))
def test_whatever_is_told_nothing_negative_or_endless_comes_out(
    before: ClusterReading | None, after: ClusterReading, members: dict[WorkerId, Role]
) -> None:
    seen = observe(before, after, members)
    for name, value in numbers(seen):
        if value is not None and name != "now_s":
            assert 0.0 <= value < math.inf, name
            assert name not in SHARES or value <= 1.0, name
    if seen.interval_s == 0.0:
        assert seen.prefill.tokens_per_s is seen.decode.utilisation is seen.demand.requests_per_s is seen.ttft_met is None
    assert seen.prefill.ready + seen.decode.ready == sum(w.ready and not w.draining for w in after.workers)
    linked = {w.hello.worker_id: w for w in after.workers}
    twice = {name for name, w in linked.items() if not w.draining and members.get(name, w.hello.role) is not w.hello.role}
    counted = sum(pool.ready + pool.coming + pool.leaving for pool in (seen.prefill, seen.decode))
    assert counted == len(linked.keys() | members.keys()) + len(twice), "a worker that changes its role counts once"


@given(READINGS, READINGS, st.randoms(use_true_random=False))
def test_the_order_of_workers_changes_nothing(before: ClusterReading, after: ClusterReading, random: Random) -> None:
    mixed = [replace(one, workers=tuple(random.sample(one.workers, len(one.workers)))) for one in (before, after)]
    assert repr(observe(*mixed)) == repr(observe(before, after))
