"""Results of searches that were never run: simple formulas of a cluster with a known answer, and single points by hand."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass, replace

import msgspec

from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.result import Figures, GoodputResult, LayoutResult, Point

META: dict[str, object] = {
    "cluster": {"model": {"name": "SmolLM2-135M-Instruct", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}},
    "hardware": {"cpu": "a CPU", "cores": 16, "load_average": 0.4},
    "pdserve": "0.9.0",
    "commit": {"id": "0123456789ab", "dirty": True},
    "seed": 7,
    "mean_prompt_tokens": 1024,
}
FIGURES = Figures(0.2, 0.4, 0.02, 0.03, 0.02, 0.06, 128.0, 23e6, 0.004)


def layout(prefill: int, decode: int, chunk: int = 512, seqs: int = 64) -> Layout:
    return Layout(prefill, decode, chunk, seqs)


def measured(at: Layout, value: float, low: float, high: float, settled: bool = True) -> LayoutResult:
    return LayoutResult(at, value, low, high, settled)


def point(at: Layout, rate: float, attainment: float, requests: int = 400, refused: str = "", **figures: float) -> Point:
    attained = round(attainment * requests)
    half = 1.96 * math.sqrt(max(attainment * (1 - attainment), 0.005) / requests)
    made = replace(FIGURES, output_tokens_per_s=rate * 128, **figures)
    return Point(at, rate, requests, attained, max(0, attainment - half), min(1, attainment + half), 30.0, made, refused)


def result(
    *layouts: LayoutResult, points: tuple[Point, ...] = (), complete: bool = True, slo: Slo | None = None
) -> GoodputResult:
    workload: dict[str, object] = {"source": {"kind": "random", "prompt": 1024, "output": 128}}
    return GoodputResult(slo or Slo(1.0, 0.05), 0.9, workload, layouts, points, complete, dict(META))


@dataclass(frozen=True)
class Machine:
    """Times of one worker in seconds. They are those of a small model on a CPU."""

    prompt_s: float = 0.12
    step_s: float = 0.010
    sequence_s: float = 0.0006
    output_tokens: int = 128
    interference: float = 1.0
    exposed_s: float = 0.006
    kv_bytes: float = 23e6


def goodput(machine: Machine, at: Layout, slo: Slo) -> float:
    """Return the largest rate at which the median times of `figures` are well within the targets."""
    low, high = 0.0, 1000.0
    for _ in range(20):
        middle = (low + high) / 2
        found = figures(machine, at, middle)
        meets = found.ttft_p99_s <= (slo.ttft_s or math.inf) and found.tpot_p99_s <= (slo.tpot_s or math.inf)
        low, high = (middle, high) if meets else (low, middle)
    return low if low > 0.01 else 0.0


def figures(machine: Machine, at: Layout, rate: float) -> Figures:
    """Return what is measured at a rate: M/D/1 for prompts, Little's law for decodes, prompts delay decodes beside them."""
    gaps = machine.output_tokens - 1
    each = rate / at.decode
    chunks = 1024 / at.chunk_tokens
    prompt_s = machine.prompt_s * (1 + 0.02 * chunks)
    if at.disaggregated:
        load, delay, lost = rate / at.prefill * prompt_s, 0.0, 0.0
        service = prompt_s
    else:
        delay = prompt_s * machine.interference
        service = prompt_s + chunks * machine.step_s
        load, lost = each * service, each * delay
    step = machine.step_s
    for _ in range(30):
        step = machine.step_s + machine.sequence_s * min(at.max_num_seqs, each * gaps * step / max(0.05, 1 - lost))
    tpot = min(5.0, step / max(0.05, 1 - lost))
    wait = service * min(load, 0.995) / (2 * (1 - min(load, 0.995)))
    ttft = service + wait
    longest = step + (delay / chunks if delay else machine.exposed_s)
    bounds = [step * (0.8 + 0.1 * k) for k in range(5)] + [longest * (0.9 + 0.1 * k) for k in range(4)]
    counts = [2000, 6000, 4000, 900, 100, 60, 40, 10, 2]
    return Figures(
        ttft_p50_s=ttft,
        ttft_p99_s=service + wait * 4.6,
        tpot_p50_s=tpot,
        tpot_p99_s=tpot * 1.25,
        itl_p50_s=step,
        itl_p99_s=longest,
        output_tokens_per_s=rate * machine.output_tokens,
        kv_bytes_per_request=machine.kv_bytes if at.disaggregated else 0.0,
        exposed_transfer_p50_s=machine.exposed_s if at.disaggregated else 0.0,
        prefill_busy_share=min(1.0, load) if at.disaggregated else None,
        decode_busy_share=min(1.0, 0.3 + load / 2),
        itl_histogram=tuple(zip(sorted(bounds), counts, strict=True)),
    )


def searched(machine: Machine, layouts: list[Layout], slo: Slo, width: float = 0.05) -> GoodputResult:
    """Return the result of a search over the layouts: five rates around the goodput of each."""
    found, points = [], []
    for at in layouts:
        best = goodput(machine, at, slo)
        found.append(measured(at, best, best * (1 - width / 2), best * (1 + width / 2)))
        for share in (0.5, 0.8, 0.95, 1.06, 1.3) if best else (1.0,):
            rate = best * share or 0.5
            attainment = 1 / (1 + math.exp(18 * (share - 1.12))) if best else 0.0
            made = point(at, rate, attainment)
            points.append(replace(made, figures=figures(machine, at, rate)))
    return result(*found, points=tuple(points), slo=slo)


@functools.cache
def usual(width: float = 0.05) -> GoodputResult:
    """Return a search over four workers: three splits, and two chunks of the colocated baseline."""
    layouts = [layout(1, 3), layout(2, 2), layout(3, 1), layout(0, 4, 256), layout(0, 4, 512)]
    return searched(Machine(), layouts, Slo(1.0, 0.03), width)


def degrees() -> GoodputResult:
    """Return a search over degrees on four cores: gangs pay for prefill, cost much colocated, and nobody knows for decode."""
    sizes = {
        layout(0, 4): (8.0, 0.05),
        Layout(0, 2, 512, 64, 2, 2): (5.0, 0.05),
        layout(2, 2): (8.4, 0.05),
        Layout(1, 2, 512, 64, 2, 1): (12.0, 0.05),
        Layout(2, 1, 512, 64, 1, 2): (12.2, 0.4),
    }
    found = [measured(at, best, best * (1 - width / 2), best * (1 + width / 2)) for at, (best, width) in sizes.items()]
    points = tuple(
        point(at, best * share, 0.95 if share < 1 else 0.5) for at, (best, _) in sizes.items() for share in (0.9, 1.1)
    )
    return replace(result(*found, points=points), device="core")


def example() -> GoodputResult:
    """Return the result of the picture in docs/benchmarking.md."""
    layouts = [layout(1, 3), layout(2, 2), layout(3, 1), layout(0, 4, 256), layout(0, 4, 512)]
    found = searched(Machine(), layouts, Slo(1.2, 0.024))
    workload: dict[str, object] = {"kind": "example by formulas, not a measurement", "prompt": 1024, "output": 128}
    return replace(found, workload=workload, meta={"mean_prompt_tokens": 1024})


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(example()))
