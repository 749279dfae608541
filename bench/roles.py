"""The cost of each role's limits on a simulated cluster: the measurements behind the defaults of prefill and decode workers.

`python -m bench.roles [--seconds S]` finds the goodput of one prefill and one decode worker for variations of one limit at a
time, with the production core and schedulers and modelled steps (docs/design/0033). The same seed gives the same figures on
every machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from rich.console import Console
from rich.table import Table

from pdserve.config import ROLE_LIMITS, RoleLimits
from pdserve.core.slo import SloClass
from pdserve.core.worker import Role
from pdserve_bench.workload.request import Lognormal
from pdserve_bench.workload.traces import BLOCK_TOKENS
from sim.perf.cluster import ClusterSpec, calm_router, simulate
from sim.perf.costs import CostModel
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorkerShape

ATTAINMENT: Final = 0.9
STEP: Final = 1.25
"""The factor between the rates that are tried first, until the goodput is between two of them."""
HALVINGS: Final = 3
"""The halvings of that interval: the last one is 3 % wide."""
SIGMA: Final = 0.8
MOST: Final = 4
"""The longest prompt and answer, in times of the mean."""
SEED: Final = 5
CORE: Final = CostModel(
    "smollm2_core", prompt_base_s=3e-3, prompt_token_s=0.33e-3, prompt_pair_s=22e-9, decode_base_s=6.8e-3, decode_s=0.6e-3,
    context_token_s=0.6e-6, kv_bytes_per_token=23_040, kv_tokens=11_648, transfer_bytes_s=2e9,
)  # fmt: skip
"""SmolLM2-135M in bfloat16 on one core of an AMD EPYC, from the steps of docs/benchmarks.md; the KV of 256 MiB."""
H100: Final = CostModel(
    "llama8b_h100", prompt_base_s=2e-3, prompt_token_s=23.5e-6, prompt_pair_s=1e-9, decode_base_s=6.3e-3, decode_s=20e-6,
    context_token_s=39e-9, kv_bytes_per_token=131_072, kv_tokens=400_000, transfer_bytes_s=25e9,
)  # fmt: skip
"""The shape of Llama-3.1-8B on an H100, from "On a GPU" of docs/benchmarks.md: 40,775 tokens a second of prompts of 2,048, and
145, 1,042, 3,277 and 6,583 tokens a second of 1, 8, 32 and 128 sequences at 2,048 positions."""


@dataclass(frozen=True, slots=True)
class RoleCase:
    """A device with the requests that load one of the roles. `cached` of the prompts begin as one of the last `alive` prompts.
    near_per_s: a rate near the goodput, from where the search begins."""

    title: str
    device: str
    costs: CostModel
    prompt_tokens: int
    output_tokens: int
    targets: SloClass
    near_per_s: float
    loads: Role
    """The role that binds: its limits are varied."""
    cached: float = 0.5
    alive: int = 8


ON_CORE: Final = SloClass("default", ttft_s=2.0, tpot_s=0.05)
ON_GPU: Final = SloClass("default", ttft_s=1.0, tpot_s=0.03)
CASES: Final = (
    RoleCase("SmolLM2-135M, a core for each worker, 600 + 60 tokens", "cpu", CORE, 600, 60, ON_CORE, 6.0, Role.PREFILL),
    RoleCase(
        "SmolLM2-135M, a core for each worker, 60 + 120 tokens", "cpu", CORE, 60, 120, ON_CORE, 10.0, Role.DECODE, cached=0.0
    ),
    RoleCase("Llama-3.1-8B, an H100 for each worker, 3,000 + 300 tokens", "cuda", H100, 3000, 300, ON_GPU, 16.0, Role.PREFILL),
    RoleCase(
        "Llama-3.1-8B, an H100 for each worker, 300 + 500 tokens", "cuda", H100, 300, 500, ON_GPU, 30.0, Role.DECODE, cached=0.0
    ),
)


@dataclass(frozen=True, slots=True)
class Variation:
    """The limits of both roles, and the factors of their KV pools."""

    name: str
    prefill: RoleLimits
    decode: RoleLimits
    kv: tuple[float, float] = (1.0, 1.0)


def variations_of(case: RoleCase) -> Iterator[Variation]:
    """Yield the defaults, and then variations of one limit at a time."""
    prefill, decode = (ROLE_LIMITS[case.device][role.value] for role in (Role.PREFILL, Role.DECODE))
    base = Variation("defaults", prefill, decode)
    yield base
    for factor in (0.25, 0.5, 2, 4) if case.loads is Role.PREFILL else ():
        tokens = int(prefill.max_num_batched_tokens * factor)
        yield replace(base, name=f"prefill chunk {tokens:,}", prefill=prefill._replace(max_num_batched_tokens=tokens))
    for factor in (0.5, 4) if case.loads is Role.PREFILL else ():
        tokens = int(decode.max_num_batched_tokens * factor)
        yield replace(base, name=f"decode chunk {tokens:,}", decode=decode._replace(max_num_batched_tokens=tokens))
    for factor in (0.25, 0.5, 2, 4) if case.loads is Role.DECODE else ():
        seqs = int(decode.max_num_seqs * factor)
        yield replace(
            base, name=f"decode sequences {seqs:,}", decode=RoleLimits(seqs, max(decode.max_num_batched_tokens, seqs))
        )
    for share in (0.25, 0.5, 1.5, 1.75):
        yield replace(base, name=f"KV {share:.3g} : {2 - share:.3g}", kv=(share, 2 - share))


def requests_of(case: RoleCase, rate_per_s: float, seconds: float) -> list[TraceRequest]:
    """Return requests of Poisson arrivals. The same numbers of every rate have the same lengths."""
    random, at_s, blocks = Random(SEED), 0.0, 0
    prompts, outputs = (
        Lognormal(mean=mean, sigma=SIGMA, most=MOST * mean) for mean in (case.prompt_tokens, case.output_tokens)
    )
    found: list[TraceRequest] = []
    while (at_s := at_s + random.expovariate(rate_per_s)) < seconds:
        prompt, output = prompts.draw(random), outputs.draw(random)
        own = range(blocks, blocks + math.ceil(prompt / BLOCK_TOKENS))
        blocks = own.stop
        older = random.choice(found[-case.alive :]).blocks if found and random.random() < case.cached else ()
        same = older[: prompt // BLOCK_TOKENS]
        found.append(TraceRequest(at_s, prompt, output, (*same, *own[len(same) :])))
    return found


def attained(case: RoleCase, variation: Variation, rate_per_s: float, seconds: float) -> float:
    """Return the share of the requests that meets both targets."""
    longest = MOST * (case.prompt_tokens + case.output_tokens)
    shapes = [
        PerfWorkerShape(case.costs, *limits, max_model_len=longest, kv_tokens=int(case.costs.kv_tokens * share))
        for limits, share in zip((variation.prefill, variation.decode), variation.kv, strict=True)
    ]
    spec = ClusterSpec(
        shapes[:1], shapes[1:], calm_router(), block_size=16, judged_by={"default": case.targets}, seed=SEED,
        max_tokens=MOST * case.output_tokens,
    )  # fmt: skip
    served = simulate(spec, requests_of(case, rate_per_s, seconds)).served
    return sum(one.attained for one in served) / len(served)


def goodput_of(case: RoleCase, variation: Variation, near_per_s: float, seconds: float) -> float:
    """Return the highest rate, in requests a second, at which `ATTAINMENT` of the requests meet both targets."""

    def keeps(rate_per_s: float) -> bool:
        return attained(case, variation, rate_per_s, seconds) >= ATTAINMENT

    low = high = near_per_s
    if keeps(near_per_s):
        while keeps(high := high * STEP):
            low = high
    else:
        while not keeps(low := low / STEP):
            high = low
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def main() -> None:
    """Print a table for each device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="the time of each run, of the simulated clock")
    args = parser.parse_args()
    console = Console()
    for case in CASES:
        table = Table("", "goodput 1/s", "of the defaults", title=case.title)
        base = 0.0  # requests a second
        for variation in variations_of(case):
            with console.status(f"{case.title}: {variation.name}"):
                goodput = goodput_of(case, variation, base or case.near_per_s, args.seconds)
            base = base or goodput
            table.add_row(variation.name, f"{goodput:.2f}", f"{goodput / base:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
