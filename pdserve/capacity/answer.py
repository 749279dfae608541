"""The answer of capacity planning as plain data: `answer(question)` is the function that commands and benchmarks call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.capacity.devices import LinkSpec, links_of
from pdserve.capacity.placements import PlacementRate, colocated_rate, decode_rate, exposed_s, prefill_rate, transfer_s
from pdserve.capacity.question import CapacityQuestion
from pdserve.capacity.verdict import CapacityVerdict, judge
from pdserve.capacity.worker_speed import Memory, WorkerSpeed, e2e_s
from pdserve.core.errors import ConfigError

ONE_MACHINE: Final = 8
"""GPUs of one machine, between which all-reduces are fast."""
MOST_DEGREE: Final = 64
BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class KvRoom:
    """The room of one worker for KV."""

    context: int
    """Tokens of a user's context, as asked or isl + osl."""
    max_users: int
    """Users of one worker with this context."""
    users: int
    """Users of one worker, as asked (spread over all workers) or `max_users`."""
    max_context: int
    """The longest context that this many users of one worker can have, at most the model's positions. 0: they do not fit."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One point of the decode roofline, of one worker."""

    batch: int
    step_s: float
    tokens_per_s: float
    bound: str
    fits: bool
    """The KV of the batch fits into memory, with contexts of isl + osl."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of one prompt's KV over one link."""

    link: str
    bytes_per_s: float
    transfer_s: float
    exposed_s: float
    """The part for which a request waits after its first token."""
    pays: bool
    """Two pools with this link serve at least as much as one pool."""


@dataclass(frozen=True, slots=True)
class CapacityCost:
    """US dollars. The price may be an example."""

    per_gpu_hour: float
    source: str
    per_million_output_tokens: float | None
    output_tokens_per_dollar: float


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """All results. Rates are of one worker unless their names say otherwise; times are means."""

    tp: int
    workers: int
    kv_bytes_per_token: float
    """KV of the first token, stored once."""
    kv_bytes_per_request: float
    """KV of a prompt, as it crosses the link."""
    memory: Memory
    room: KvRoom
    steps: tuple[DecodeStep, ...]
    largest_batch: int
    """The largest batch within TPOT and memory, with the chosen link."""
    prefill_floor_s: float
    prefill: PlacementRate
    decode: PlacementRate
    colocated: PlacementRate
    link: LinkSpec
    transfers: tuple[Transfer, ...]
    e2e_alone_s: float
    """The time of a request that is alone: disaggregated, with its exposed transfer."""
    e2e_loaded_s: float | None
    """The mean time of a request at the goodput of the recommended layout. None: the layout serves nothing."""
    verdict: CapacityVerdict
    output_tokens_per_s: float
    """All workers together, at that goodput."""
    cost: CapacityCost | None


def answer(question: CapacityQuestion) -> CapacityAnswer:
    """Answer a question. Without a number of GPUs for a worker, take the one with the highest goodput."""
    if question.tp is not None:
        return _answer(question, question.tp)
    found = [_answer(question, tp) for tp in degrees(question)]
    best = max(found, key=lambda one: (one.verdict.requests_per_s, -one.tp))
    fitting = [one for one in found if one.room.max_users]
    return best if best.verdict.requests_per_s else fitting[0] if fitting else found[-1]


def degrees(question: CapacityQuestion) -> tuple[int, ...]:
    """Return the numbers of GPUs that a worker may have: powers of two that divide the heads, within one machine if that is
    enough.

    More than `ONE_MACHINE` GPUs are tried only where the model does not fit into fewer.
    """
    found: list[int] = []
    tp = 1
    while tp <= min(question.gpus, MOST_DEGREE) and question.model.heads % tp == 0:
        if tp > ONE_MACHINE and WorkerSpeed(question, found[-1]).users_at(question.isl + question.osl):
            break
        found.append(tp)
        tp *= 2
    return tuple(found)


def _answer(question: CapacityQuestion, tp: int) -> CapacityAnswer:
    worker, workers = WorkerSpeed(question, tp), question.gpus // tp
    link = question.link_of(tp)
    prefill, decode = prefill_rate(worker, link.bytes_per_s), decode_rate(worker, link.bytes_per_s)
    colocated = colocated_rate(worker)
    verdict = judge(worker, workers, link.bytes_per_s)
    tokens_per_s = verdict.requests_per_s * question.osl
    return CapacityAnswer(
        tp=tp,
        workers=workers,
        kv_bytes_per_token=worker.kv_bytes(1),
        kv_bytes_per_request=worker.kv_bytes(question.isl),
        memory=worker.memory,
        room=_room(worker, workers),
        steps=_steps(worker),
        largest_batch=int(decode.batch or 0),
        prefill_floor_s=worker.prefill_s(question.isl),
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        link=link,
        transfers=_transfers(worker, link, verdict.break_even_bytes_per_s),
        e2e_alone_s=_e2e_alone(worker, link),
        e2e_loaded_s=_e2e_loaded(question, verdict, prefill, decode, colocated),
        verdict=verdict,
        output_tokens_per_s=tokens_per_s,
        cost=_cost(question, tokens_per_s, workers * tp),
    )


def fits(weights_bytes: float, kv_bytes: float, gpus: int, memory_bytes: float) -> bool:
    """Tell whether weights and KV fit into the whole memory of this many GPUs, without any other content."""
    if gpus < 1:
        raise ConfigError(f"--gpus must be at least 1, got {gpus}")
    return weights_bytes + kv_bytes <= gpus * memory_bytes


def _room(worker: WorkerSpeed, workers: int) -> KvRoom:
    question = worker.question
    context = question.isl + question.osl if question.context is None else question.context
    most = worker.users_at(context)
    users = max(1, most) if question.users is None else -(-question.users // workers)
    return KvRoom(context, most, users, worker.max_context(users))


def _steps(worker: WorkerSpeed) -> tuple[DecodeStep, ...]:
    question = worker.question
    context, most = question.isl + question.osl // 2, worker.users_at(question.isl + question.osl)
    found = []
    for batch in BATCHES:
        step = worker.decode_s(batch, context)
        found.append(DecodeStep(batch, step, batch / step, worker.decode_bound(batch, context), batch <= most))
    return tuple(found)


def _transfers(worker: WorkerSpeed, chosen: LinkSpec, even: float | None) -> tuple[Transfer, ...]:
    known = links_of(worker.question.gpu, worker.tp)
    links = known if chosen.name in {one.name for one in known} else (chosen, *known)
    return tuple(
        Transfer(
            one.name,
            one.bytes_per_s,
            transfer_s(worker, one.bytes_per_s),
            exposed_s(worker, one.bytes_per_s),
            even is not None and one.bytes_per_s >= even,
        )
        for one in links
    )


def _e2e_alone(worker: WorkerSpeed, link: LinkSpec) -> float:
    question = worker.question
    step = worker.decode_s(1, question.isl + question.osl // 2)
    return e2e_s(worker.prefill_s(question.isl), step, question.osl) + exposed_s(worker, link.bytes_per_s)


def _e2e_loaded(
    question: CapacityQuestion,
    verdict: CapacityVerdict,
    prefill: PlacementRate,
    decode: PlacementRate,
    colocated: PlacementRate,
) -> float | None:
    if not verdict.requests_per_s:
        return None
    ttft, tpot = (prefill.ttft_s, decode.tpot_s) if verdict.disaggregate else (colocated.ttft_s, colocated.tpot_s)
    assert ttft is not None
    assert tpot is not None
    return e2e_s(ttft, tpot, question.osl)


def _cost(question: CapacityQuestion, tokens_per_s: float, gpus: int) -> CapacityCost | None:
    price = question.price
    if price is None:
        return None
    source = "--price-per-hour" if question.price_per_hour is not None else f"example: {question.gpu.price_source}"
    per_dollar = tokens_per_s * 3600 / (price * gpus)
    return CapacityCost(price, source, 1e6 / per_dollar if per_dollar else None, per_dollar)
