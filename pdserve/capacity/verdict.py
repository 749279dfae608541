"""One pool or two: the split of the workers, the slowest link with which two pools win, the bottleneck, and its remedies. Pure.

The goodput of P prefill and D decode workers is min(P * prefill rate, D * decode rate). Two pools are recommended where it
is more than `MARGIN` above that of the same GPUs colocated: a smaller gain is within the error of the model. Colocated workers
have the degrees of decode workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdserve.capacity.devices import MOST_LINK_BYTES
from pdserve.capacity.placements import PlacementRate, colocated_rate, decode_rate, prefill_rate
from pdserve.capacity.worker_speed import WorkerSpeed, last_true

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
    """The best two pools. None: the GPUs do not make a worker of each."""
    ideal_prefill_per_decode: float | None
    """Prefill workers for each decode worker at which both pools are full. None: one of the two pools serves nothing."""
    colocated_requests_per_s: float
    requests_per_s: float
    """Goodput of what is recommended."""
    break_even_bytes_per_s: float | None
    """Two pools serve less than one pool where a worker's link is slower. None: they do so with every link."""
    constraint: str
    lever: str


@dataclass(frozen=True, slots=True)
class TwoPools:
    """A prefill and a decode worker as they are in two pools. Both may be the same."""

    prefill: WorkerSpeed
    decode: WorkerSpeed

    @property
    def equal(self) -> bool:
        """Tell whether the workers of both pools have the same degrees."""
        return self.prefill.degrees == self.decode.degrees

    def rates(self, link_bytes_per_s: float) -> tuple[PlacementRate, PlacementRate]:
        """Return the rates of a prefill and of a decode worker."""
        return (
            prefill_rate(self.prefill, link_bytes_per_s),
            decode_rate(self.decode, link_bytes_per_s, self.prefill),
        )

    def split(self, link_bytes_per_s: float) -> CapacitySplit | None:
        """Return the best split of the GPUs with this link. None: they do not make a worker of each pool."""
        prefill, decode = (rate.requests_per_s for rate in self.rates(link_bytes_per_s))
        return best_split(self.decode.question.gpus, prefill, decode, self.prefill.gpus, self.decode.gpus)


def best_split(gpus: int, prefill: float, decode: float, prefill_gpus: int = 1, decode_gpus: int = 1) -> CapacitySplit | None:
    """Return the split with the highest goodput. None: the GPUs do not make one worker of each pool.

    prefill, decode: requests a second of one worker. prefill_gpus, decode_gpus: GPUs of one worker.
    """
    most = (gpus - decode_gpus) // prefill_gpus
    if most < 1:
        return None

    def beside(count: int) -> int:
        return (gpus - count * prefill_gpus) // decode_gpus

    # With more prefill workers their pool serves more and the other one less: the best is where the two cross.
    crossing = last_true(most, lambda count: count * prefill <= beside(count) * decode) if prefill + decode else most // 2
    near = {min(max(1, count), most) for count in (crossing, crossing + 1)}
    splits = [CapacitySplit(count, beside(count), min(count * prefill, beside(count) * decode)) for count in sorted(near)]
    return max(splits, key=lambda split: split.requests_per_s)


def judge(pools: TwoPools, link_bytes_per_s: float) -> CapacityVerdict:
    """Return the verdict for the question's GPUs as workers whose links have this rate."""
    worker, workers = pools.decode, pools.decode.question.gpus // pools.decode.gpus
    prefill, decode = pools.rates(link_bytes_per_s)
    colocated = colocated_rate(worker)
    together = workers * colocated.requests_per_s
    split = pools.split(link_bytes_per_s)
    apart = split.requests_per_s if split else 0.0
    even = break_even(pools, together)
    wins = apart > together * MARGIN
    constraint = _constraint(worker, prefill, decode, split) if wins or not together else colocated.bound
    both = prefill.requests_per_s > 0 and decode.requests_per_s > 0
    return CapacityVerdict(
        disaggregate=wins,
        reason=_reason(pools, split, together, even, link_bytes_per_s, constraint),
        split=split,
        ideal_prefill_per_decode=decode.requests_per_s / prefill.requests_per_s if both else None,
        colocated_requests_per_s=together,
        requests_per_s=apart if wins else together,
        break_even_bytes_per_s=even,
        constraint=constraint,
        lever=LEVERS[constraint],
    )


def goodput_apart(pools: TwoPools, link_bytes_per_s: float) -> float:
    """Return the goodput of the best two pools with this link, requests a second."""
    split = pools.split(link_bytes_per_s)
    return split.requests_per_s if split else 0.0


def break_even(pools: TwoPools, together: float) -> float | None:
    """Return the slowest link with which two pools serve at least `together` requests a second. None: no link is enough.

    A faster link never lowers the goodput of two pools, so the rate is bisected, on a logarithmic scale.
    """
    low, high = 0.0, math.log(MOST_LINK_BYTES)
    if not together or goodput_apart(pools, MOST_LINK_BYTES) < together:
        return None
    for _ in range(50):
        middle = (low + high) / 2
        if goodput_apart(pools, math.exp(middle)) < together:
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
    pools: TwoPools, split: CapacitySplit | None, together: float, even: float | None, link_bytes_per_s: float, bound: str
) -> str:
    question = pools.decode.question
    apart = split.requests_per_s if split else 0.0
    for one in (pools.decode, pools.prefill):
        if not one.memory.fits:
            need = one.memory.weights_bytes + one.memory.activation_bytes
            return f"the model does not fit: a worker needs {need / 1e9:.0f} GB and has {one.memory.usable_bytes / 1e9:.0f} GB"
    if not apart and not together:
        return f"no placement meets both targets ({_alone(pools)}); {bound} binds"
    if split is None:
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


def _alone(pools: TwoPools) -> str:
    """Return the times of a request that is alone."""
    question = pools.decode.question
    step = pools.decode.decode_s(1, question.isl + question.osl)
    return f"alone, a prompt takes {pools.prefill.prefill_s(question.isl):.3g} s and a token {step:.3g} s"
