"""Utilisation of a worker: shares of its peaks, and nothing where something is unknown."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given

from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.roofline import START, Utilisation, utilisation
from pdserve.core.worker import Role, WorkerHello, WorkerLoad

HELLO = WorkerHello(
    WorkerId("p"), Role.PREFILL, Incarnation(1), "h:1", "m", 16, 10, 64, 4, "bfloat16", 8, peak_flops_per_s=1e12,
    peak_bytes_per_s=1e10,
)  # fmt: skip


def test_shares_of_the_peaks_while_steps_run() -> None:
    load = replace(START, prompt_busy_s=2.0, decode_busy_s=3.0, prompt_flops=1e12, decode_read_bytes=2.4e10, uptime_s=10.0)
    assert utilisation(HELLO, START, load) == Utilisation(0.5, 0.5, 0.8)
    assert utilisation(HELLO, replace(load, prompt_flops=0.5e12, prompt_busy_s=1.0, uptime_s=8.0), load).mfu == 0.5


def test_an_engine_is_not_more_than_busy_when_a_step_ends_late() -> None:
    assert utilisation(HELLO, START, replace(START, decode_busy_s=10.5, uptime_s=10.0)).busy == 1.0


def test_what_is_unknown_is_none() -> None:
    load = replace(START, prompt_busy_s=2.0, prompt_flops=1e12, uptime_s=10.0)
    assert utilisation(replace(HELLO, peak_flops_per_s=0.0), START, load) == Utilisation(0.2)
    assert utilisation(HELLO, load, load) == Utilisation()
    assert utilisation(HELLO, START, replace(load, prompt_flops=0.0)) == Utilisation(0.2), "nobody counted operations"


NUMBERS = st.floats(-1e9, 1e18) | st.sampled_from([math.nan, math.inf])
LOADS = st.builds(
    lambda *n: replace(
        START, prompt_busy_s=n[0], decode_busy_s=n[1], prompt_flops=n[2], decode_read_bytes=n[3], uptime_s=n[4]
    ),
    NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS,
)  # fmt: skip


@given(LOADS, LOADS)
def test_no_share_is_negative_or_endless(old: WorkerLoad, new: WorkerLoad) -> None:
    found = utilisation(HELLO, old, new)
    for share in (found.busy, found.mfu, found.mbu):
        assert share is None or 0.0 <= share < math.inf
    assert found.busy is None or found.busy <= 1.0
