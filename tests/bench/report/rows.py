"""Rows of runs: any that may be, and realistic ones."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from pdserve_bench.row import STOPPED, BenchRow, Served

TIME = st.floats(0, 1e6, allow_nan=False, width=64)
MAYBE_TIME = st.none() | TIME
WORDS = st.sampled_from(["", "voice", "ünï\n", "a,b"])
COUNT = st.integers(0, 1 << 40)


@st.composite
def rows(draw: st.DrawFn, number: int = 0) -> BenchRow:
    """Return any row: in order, late, failed, cut off, or warming up."""
    sent_s = draw(TIME)
    gaps = draw(st.lists(st.floats(0, 1), max_size=5))
    times = [sent_s + sum(gaps[: at + 1]) for at in range(len(gaps))]
    served = Served(
        *(draw(WORDS), draw(st.sampled_from(["", "disaggregated", "colocated"])), draw(WORDS), draw(WORDS)),
        *(draw(MAYBE_TIME) for _ in range(4)),
        *(draw(st.none() | COUNT) for _ in range(3)),
    )
    return BenchRow(
        number=number,
        planned_s=draw(TIME),
        sent_s=sent_s,
        ended_s=(times[-1] if times else sent_s) + draw(st.floats(0, 1)),
        prompt_tokens=draw(COUNT),
        output_tokens=draw(st.integers(len(times), 9)),
        arrivals=tuple((at, draw(st.integers(1, 3))) for at in times),
        warm_up=draw(st.booleans()),
        slo_class=draw(WORDS),
        session=draw(WORDS),
        error=draw(st.sampled_from(["", "", "", "timeout", "overloaded", "predecessor_failed", STOPPED])),
        served=served,
    )


@st.composite
def runs(draw: st.DrawFn, most: int = 12) -> tuple[BenchRow, ...]:
    """Return the rows of a run, in any order."""
    return tuple(draw(rows(number)) for number in range(draw(st.integers(0, most))))


def plausible(count: int, seed: int, slow: float = 1.0) -> tuple[BenchRow, ...]:
    """Return a run of Poisson arrivals; `slow` multiplies all times of the server."""
    rng = random.Random(seed)
    made, now_s = [], 0.0
    for number in range(count):
        now_s += rng.expovariate(10)
        first_s = now_s + slow * rng.uniform(0.05, 0.2)
        times = [first_s]
        for _ in range(7):
            times.append(times[-1] + slow * rng.uniform(0.01, 0.03))
        served = Served(placement="disaggregated", queue_s=0.01 * slow, kv_bytes=1000, attempts=1)
        made.append(
            BenchRow(
                number,
                now_s,
                now_s,
                times[-1],
                100,
                8,
                arrivals=tuple((at, 1) for at in times),
                served=served,
                slo_class="chat",
            )
        )
    return tuple(made)
