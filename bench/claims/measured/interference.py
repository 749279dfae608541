"""The claim about disaggregation: long prompts no longer disturb the streams of others."""

from __future__ import annotations

from typing import Final

from bench.claims.claim import Claim, Judgement, Table, inside
from bench.claims.figures import Figures
from bench.claims.measured.clusters import Side, both, gaps_s
from bench.claims.setup import Rounds, Setup
from bench.engine.chunks import percentile
from testkit.client import generate_all
from testkit.load import Load

STREAMS: Final = 4
STREAM_PROMPT: Final = 64
LONG_PROMPT: Final = 1024
SIDES: Final = ("disaggregated", "colocated")


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Serve streams beside long prompts on both clusters in turns. The first round warms up and is not counted."""
    found = Figures()
    output, prompts = setup.size(192, 48), setup.size(6, 2)
    with both(setup) as sides:
        for side in sides:
            _serve(side, 16, 1, Figures())
        for _ in rounds.of(7):
            for side in sides:
                _serve(side, output, prompts, found)
    return found


def _serve(side: Side, output: int, prompts: int, found: Figures) -> None:
    streams = [side.message(STREAM_PROMPT, output, seed) for seed in range(2 * STREAMS)]
    long = [side.message(LONG_PROMPT, 2, 100 + seed) for seed in range(prompts)]
    with Load(side.cluster.grpc, long, concurrency=2) as load:
        answers = generate_all(side.cluster.grpc, streams, STREAMS)
        outcomes = load.finish()
    assert all(one.ok for one in outcomes), "a long prompt failed"
    gaps = gaps_s(answers)
    found.add(f"{side.name} ITL p50 s", percentile(gaps, 50))
    found.add(f"{side.name} ITL p99 s", percentile(gaps, 99))
    ttfts = sorted(one.answer.arrivals_s[0] for one in outcomes)
    found.add(f"{side.name} TTFT s", percentile(ttfts, 50))


def judge(found: Figures) -> Judgement:
    """Confirm where the tail of the streams' gaps is shorter when disaggregated, beyond the interval."""
    tail = found.ratio("colocated ITL p99 s", "disaggregated ITL p99 s")
    ttft = found.ratio("disaggregated TTFT s", "colocated TTFT s")
    why = f"Here the 99th percentile of the gaps is {tail} times shorter, and the long prompts' TTFT {ttft} times as long."
    return Judgement(inside(tail, 1.05), why)


def table(found: Figures) -> Table:
    """Return the gaps of the streams and the time of the long prompts on both clusters."""
    rows = tuple(
        (
            {"disaggregated": "disaggregated 1P+1D", "colocated": "2 colocated"}[name],
            f"{found.median(f'{name} ITL p50 s') * 1e3:.1f}",
            f"{found.median(f'{name} ITL p99 s') * 1e3:.0f}",
            f"{found.median(f'{name} TTFT s'):.2f}",
        )
        for name in SIDES
    )
    header = (f"{STREAMS} streams beside 2 prompts of {LONG_PROMPT:,}", "ITL p50 ms", "ITL p99 ms", "TTFT of the prompts p50 s")
    return Table(header, rows)


CLAIM: Final = Claim(
    name="interference",
    says="Disaggregation shortens the tail of the time between tokens under mixed load.",
    source="DistServe: Zhong et al., OSDI 2024; Splitwise: Patel et al., ISCA 2024",
    rule="the 99th percentile of the gaps of colocated workers is over 1.05 times that of 1P+1D, with the interval.",
    minutes=2.5,
    value=3,
    measure=measure,
    judge=judge,
    table=table,
    timing="time on the wall at the client, two workers of one thread each",
)
