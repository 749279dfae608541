"""One pool or two: the split of the workers, the slowest link with which two pools win, the bottleneck, and its remedies. Pure.

The goodput of P prefill and D decode workers is min(P * prefill rate, D * decode rate). Two pools are recommended where it
is more than `MARGIN` above that of the same workers colocated: a smaller gain is within the error of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdserve.capacity.devices import MOST_LINK_BYTES
from pdserve.capacity.placements import PlacementRate, colocated_rate, decode_rate, prefill_rate
from pdserve.capacity.worker_speed import WorkerSpeed

MARGIN: Final = 1.05
_MORE_GPUS: Final = "give workers more GPUs (--tensor-parallel-size; served with --engine vllm)"
LEVERS: Final = {
    "memory": f"store KV in fewer bits (--kv-cache-dtype), quantise weights (--quantization), {_MORE_GPUS}, "
    "or take GPUs with more memory",
    "bandwidth": f"read fewer bytes a step (--quantization, --kv-cache-dtype), {_MORE_GPUS}, take GPUs with "
    "faster memory, or allow a longer --tpot",
    "compute": f"add workers that compute prompts, {_MORE_GPUS}, compute in 8 bits (--quantization int8; fp8 is planned with, "
    "not served yet), or allow a longer --ttft",
    "link": "take a faster link (--link), or store KV in fewer bits (--kv-cache-dtype)",
}
"""What an operator can do about each binding constraint."""


@dataclass(frozen=True, slots=True)
class CapacitySplit:
    """A number of workers for each pool, and the requests a second that they serve within both targets."""

    prefill: int
    decode: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class CapacityVerdict:
    """The answer for all workers together."""

    disaggregate: bool
    reason: str
    split: CapacitySplit | None
    """The best two pools. None: there are fewer than two workers."""
    ideal_prefill_per_decode: float | None
    """Prefill workers for each decode worker at which both pools are full. None: one of the two pools serves nothing."""
    colocated_requests_per_s: float
    requests_per_s: float
    """Goodput of what is recommended."""
    break_even_bytes_per_s: float | None
    """Two pools serve less than one pool where a worker's link is slower. None: they do so with every link."""
    constraint: str
    lever: str


def best_split(workers: int, prefill: float, decode: float) -> CapacitySplit | None:
    """Return the split with the highest goodput. prefill, decode: requests a second of one worker. None: too few workers."""
    if workers < 2:
        return None
    ideal = workers * decode / (prefill + decode) if prefill + decode else workers / 2
    near = {min(max(1, count), workers - 1) for count in (math.floor(ideal), math.ceil(ideal))}
    splits = [CapacitySplit(count, workers - count, min(count * prefill, (workers - count) * decode)) for count in sorted(near)]
    return max(splits, key=lambda split: split.requests_per_s)


def judge(worker: WorkerSpeed, workers: int, link_bytes_per_s: float) -> CapacityVerdict:
    """Return the verdict for this many equal workers whose links have this rate."""
    prefill, decode = prefill_rate(worker, link_bytes_per_s), decode_rate(worker, link_bytes_per_s)
    colocated = colocated_rate(worker)
    together = workers * colocated.requests_per_s
    split = best_split(workers, prefill.requests_per_s, decode.requests_per_s)
    apart = split.requests_per_s if split else 0.0
    even = break_even(worker, workers, together)
    wins = apart > together * MARGIN
    constraint = _constraint(worker, prefill, decode, split) if wins or not together else colocated.bound
    both = prefill.requests_per_s > 0 and decode.requests_per_s > 0
    return CapacityVerdict(
        disaggregate=wins,
        reason=_reason(worker, workers, apart, together, even, link_bytes_per_s, constraint),
        split=split,
        ideal_prefill_per_decode=decode.requests_per_s / prefill.requests_per_s if both else None,
        colocated_requests_per_s=together,
        requests_per_s=apart if wins else together,
        break_even_bytes_per_s=even,
        constraint=constraint,
        lever=LEVERS[constraint],
    )


def goodput_apart(worker: WorkerSpeed, workers: int, link_bytes_per_s: float) -> float:
    """Return the goodput of the best two pools with this link, requests a second."""
    rates = prefill_rate(worker, link_bytes_per_s).requests_per_s, decode_rate(worker, link_bytes_per_s).requests_per_s
    split = best_split(workers, *rates)
    return split.requests_per_s if split else 0.0


def break_even(worker: WorkerSpeed, workers: int, together: float) -> float | None:
    """Return the slowest link with which two pools serve at least `together` requests a second. None: no link is enough.

    A faster link never lowers the goodput of two pools, so the rate is bisected, on a logarithmic scale.
    """
    low, high = 0.0, math.log(MOST_LINK_BYTES)
    if workers < 2 or not together or goodput_apart(worker, workers, MOST_LINK_BYTES) < together:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        if goodput_apart(worker, workers, math.exp(middle)) < together:
            low = middle
        else:
            high = middle
    return math.exp(high)


def _constraint(worker: WorkerSpeed, prefill: PlacementRate, decode: PlacementRate, split: CapacitySplit | None) -> str:
    """Return what binds the pool that serves less."""
    if not worker.memory.fits:
        return "memory"
    if not prefill.requests_per_s or not decode.requests_per_s or split is None:
        return prefill.bound if not prefill.requests_per_s else decode.bound
    less = prefill if split.prefill * prefill.requests_per_s <= split.decode * decode.requests_per_s else decode
    return less.bound


def _reason(
    worker: WorkerSpeed, workers: int, apart: float, together: float, even: float | None, link_bytes_per_s: float, bound: str
) -> str:
    question = worker.question
    if not worker.memory.fits:
        need = worker.memory.weights_bytes + worker.memory.activation_bytes
        return f"the model does not fit: a worker needs {need / 1e9:.0f} GB and has {worker.memory.usable_bytes / 1e9:.0f} GB"
    if not apart and not together:
        return f"no placement meets both targets ({_alone(worker)}); {bound} binds"
    if workers < 2:
        return "two pools need two workers, and these GPUs make one"
    if not together:
        return f"only two pools meet both targets: --tpot {question.tpot_s:g} s leaves no room for prompts beside decodes"
    gain = apart / together
    if gain > MARGIN:
        return f"two pools serve {gain:.2f} times as many requests within both targets"
    if even is not None and link_bytes_per_s < even:
        return f"the link is too slow: two pools need {even / 1e9:.3g} GB/s a worker and have {link_bytes_per_s / 1e9:.3g} GB/s"
    if gain > 1 / MARGIN:
        return (
            f"two pools serve {gain:.2f} times as many requests, which is within the error of this model; one pool is simpler"
        )
    return (
        f"two pools serve {gain:.2f} times as many requests: these workers split badly, or prompts disturb decodes too little"
    )


def _alone(worker: WorkerSpeed) -> str:
    """Return the times of a request that is alone."""
    question = worker.question
    step = worker.decode_s(1, question.isl + question.osl)
    return f"alone, a prompt takes {worker.prefill_s(question.isl):.3g} s and a token {step:.3g} s"
