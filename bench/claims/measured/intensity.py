"""The claim about arithmetic intensity: prefill is bound by compute, and decode by memory bandwidth. It draws the roofline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from bench.claims.claim import Claim, Judgement, Table, inside, percent, together
from bench.claims.figures import Figures
from bench.claims.measured.intensity_plot import Mark, plot
from bench.claims.measured.steps import Steps
from bench.claims.setup import Rounds, Setup
from bench.engine.floors import measure as measure_machine
from bench.engine.peers.cases import CONTEXT, Case
from bench.engine.roofline import BF16, work_of
from bench.ratios import Ratio

CASES: Final = (
    Case("prefill of 512", 1, 512, 0),
    Case("prefill of 2,048", 1, 2048, 0),
    *(Case(f"decode of {batch}", batch, 1, CONTEXT) for batch in (1, 8, 32, 64)),
)
ROOFS: Final = ("bytes/s", "operations/s")


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Count bytes and operations of each step, and measure steps and the machine's best rates in turns."""
    steps, found = Steps(setup.runner(64 * (CONTEXT + 16))), Figures()
    for case in CASES:
        work = work_of(case, setup.card, BF16)
        found.counts |= {f"{case.name} bytes": work.read_bytes, f"{case.name} operations": work.flops}
    for _ in rounds.of(5):
        machine = measure_machine(1, clock=time.thread_time)
        found.add("bytes/s", machine.read_bytes_s)
        found.add("operations/s", machine.bf16_flops_s)
        for case in CASES:
            took_s = steps.decode_s(case.batch, case.cached + 1) if case.cached else steps.prefill_s(case.tokens)
            found.add(f"{case.name} s", took_s)
    return found


def intensity(found: Figures, case: Case) -> float:
    """Return the operations for each byte of a step."""
    return found.count(f"{case.name} operations") / found.count(f"{case.name} bytes")


def judge(found: Figures) -> Judgement:
    """Confirm where all prompts lie right of the ridge of the roofline, and all decode steps left of it."""
    ridge = found.ratio("operations/s", "bytes/s")
    verdicts, left, right = [], [], []
    for case in CASES:
        found.median(f"{case.name} s")
        at = intensity(found, case)
        over = Ratio(at / ridge.median, at / ridge.high, at / ridge.low)
        verdicts.append(inside(over, 0, 1) if case.cached else inside(over, 1))
        (right if over.median > 1 else left).append(case.name)
    names = ", ".join(left) or "none", ", ".join(right) or "none"
    where = f"left of it (bound by memory): {names[0]}; right of it (bound by compute): {names[1]}"
    return Judgement(together(verdicts), f"Here the ridge is at {ridge} operations a byte; {where}.")


def table(found: Figures) -> Table:
    """Return the intensity of each step, its rate, and the share of its roof."""
    read, peak = (found.median(name) for name in ROOFS)
    rows = []
    for case in CASES:
        took_s, at = found.median(f"{case.name} s"), intensity(found, case)
        rate = found.count(f"{case.name} operations") / took_s
        rows.append(
            (case.name, f"{at:,.0f}" if at >= 10 else f"{at:.1f}", f"{rate / 1e9:,.0f}", percent(rate / min(peak, at * read)))
        )
    title = f"step (memory {read / 1e9:.0f} GB/s, products {peak / 1e9:,.0f} GFLOP/s)"
    return Table((title, "operations a byte", "GFLOP/s", "of its roof"), tuple(rows))


def draw(found: Figures, path: str) -> None:
    """Draw the roofline for light pages, and into a second file for dark pages. It needs matplotlib."""
    marks = []
    for case in CASES:
        rate = found.count(f"{case.name} operations") / found.median(f"{case.name} s")
        marks.append(Mark(case.name, intensity(found, case), rate, not case.cached))
    plot(Path(path), *(found.median(name) for name in ROOFS), marks)


CLAIM: Final = Claim(
    name="intensity",
    says="Prefill is bound by compute and decode by memory bandwidth.",
    source="the roofline: Williams, Waterman and Patterson, CACM 2009; told of LLMs by Splitwise (ISCA 2024) and many others",
    rule="operations a byte of all prompts lie above the ridge of the roofline, and those of all decode steps below it.",
    minutes=0.9,
    value=3,
    measure=measure,
    judge=judge,
    table=table,
    image="roofline",
    draw=draw,
)
