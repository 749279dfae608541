"""The claim about the link: KV transfer is negligible on a fast link, and below some speed disaggregation stops paying.

Measured: a request alone, disaggregated over a link of each speed, beside the same request on colocated workers. Modelled: the
slowest link with which two pools serve as many requests within tight targets as one pool (`pdserve.capacity.verdict`), for two
workers of one core with the rates of this machine, as measured in this run.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Final

from bench.claims.claim import Claim, Judgement, Table, Verdict, inside
from bench.claims.figures import Figures, MissingFigures
from bench.claims.measured.clusters import Side, both
from bench.claims.measured.throttle import NAME, RATE_FILE
from bench.claims.setup import Rounds, Setup
from bench.engine.floors import Machine
from bench.engine.floors import measure as measure_machine
from pdserve.capacity.devices import DeviceSpec
from pdserve.capacity.published import read_model
from pdserve.capacity.question import CapacityQuestion, CapacityShares
from pdserve.capacity.verdict import TwoPools
from pdserve.capacity.verdict import judge as judge_capacity
from pdserve.capacity.worker_speed import WorkerSpeed
from pdserve.config import TransferConfig
from testkit.client import generate_all

MB_S: Final = (8, 32, 128, 512, 2048)
"""The speeds of the link, MB/s: from 64 Mbit/s to 16 Gbit/s."""
PROMPT: Final = 512
OUTPUT: Final = 32
MARGIN: Final = 1.05
TPOT_S: Final = 0.02  # a target that one prompt beside a stream misses on this machine
TTFT_S: Final = 2.0
SHARES: Final = CapacityShares(0.85, 0.8, 1.0)
"""The shares of the machine's rates that the engine reaches in `make bench-engine`. The link is taken at its full speed."""


def measure(setup: Setup, rounds: Rounds) -> Figures:
    """Serve one request at a time over links of all speeds in turns, and on colocated workers."""
    found = Figures()
    model(setup, measure_machine(1, clock=time.thread_time), found)
    with tempfile.TemporaryDirectory(prefix="pdserve-claim-") as folder:
        rate_file = Path(folder) / "bytes_s"
        rate_file.write_text("0", encoding="ascii")
        worker = {"transfer": TransferConfig(transport=NAME)}
        with both(setup, env={RATE_FILE: str(rate_file)}, worker=worker) as (apart, together):
            for side in (apart, together):
                _request_s(side, 0)
            for number in rounds.of(7):
                found.add("colocated s", _request_s(together, number))
                for speed in MB_S:
                    rate_file.write_text(str(speed * 10**6), encoding="ascii")
                    found.add(f"{speed} MB/s s", _request_s(apart, number))
    return found


def _request_s(side: Side, seed: int) -> float:
    (answer,) = generate_all(side.cluster.grpc, [side.message(PROMPT, OUTPUT, seed)])
    return answer.arrivals_s[-1]


def model(setup: Setup, machine: Machine, found: Figures) -> None:
    """Count the modelled break-even of two workers with the machine's rates, if there is one."""
    config = json.loads((setup.directory / "config.json").read_text(encoding="utf-8"))
    published = read_model(setup.card.name, config)
    peaks = dict.fromkeys(("bfloat16", "float32"), machine.bf16_flops_s)
    core = DeviceSpec("core", "one core", 2**34, machine.read_bytes_s, peaks, "measured in this run")
    question = CapacityQuestion(
        published, core, gpus=2, isl=PROMPT, osl=2 * OUTPUT, ttft_s=TTFT_S, tpot_s=TPOT_S, tp=1, shares=SHARES
    )
    worker = WorkerSpeed(question, question.degrees(1))
    verdict = judge_capacity(TwoPools(worker, worker), 1e9)
    if verdict.break_even_bytes_per_s is not None:
        found.counts["modelled break-even MB/s"] = verdict.break_even_bytes_per_s / 1e6


def judge(found: Figures) -> Judgement:
    """Confirm where the transfer hides on the fastest link and does not on the slowest."""
    ratios = {speed: found.ratio(f"{speed} MB/s s", "colocated s") for speed in MB_S}
    fast, slow = inside(ratios[MB_S[-1]], 0, MARGIN), inside(ratios[MB_S[0]], MARGIN)
    verdict = fast if fast is slow else Verdict.DEPENDS
    hidden = [speed for speed in MB_S if ratios[speed].high <= MARGIN]
    where = f"from {min(hidden)} MB/s on" if hidden else f"not even at {MB_S[-1]:,} MB/s"
    slowest = f"{ratios[MB_S[0]]} times as long at {MB_S[0]} MB/s"
    why = f"Here a request alone takes at most 5 % longer than on colocated workers {where}, and {slowest}."
    return Judgement(verdict, f"{why} {_modelled(found)}")


def _modelled(found: Figures) -> str:
    try:
        where = f"over links from {found.count('modelled break-even MB/s'):,.0f} MB/s on"
    except MissingFigures:
        where = "over no link"
    target = f"within {TPOT_S * 1e3:.0f} ms a token"
    return (
        f"Modelled, not measured: {target}, a prefill and a decode worker serve more requests than two colocated ones {where}."
    )


def table(found: Figures) -> Table:
    """Return the time of the request by the speed of the link."""
    rows = [(f"disaggregated, {speed:,} MB/s", f"{speed} MB/s s") for speed in MB_S]
    return Table(
        (f"{PROMPT} prompt and {OUTPUT} output tokens, alone", "whole request ms", "times colocated (95 %)"),
        (
            ("colocated", f"{found.median('colocated s') * 1e3:,.0f}", "1"),
            *((name, f"{found.median(key) * 1e3:,.0f}", str(found.ratio(key, "colocated s"))) for name, key in rows),
        ),
    )


CLAIM: Final = Claim(
    name="link-speed",
    says="KV transfer is negligible on a fast link, and below some speed of the link disaggregation stops paying.",
    source="DistServe: Zhong et al., OSDI 2024; Splitwise: Patel et al., ISCA 2024",
    rule="a request takes at most 1.05 times the colocated time over the fastest link, and more over the slowest.",
    minutes=1.5,
    value=2,
    measure=measure,
    judge=judge,
    table=table,
    timing="time on the wall at the client, two workers of one thread each",
)
