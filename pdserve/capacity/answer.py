"""The answer of capacity planning as plain data: `answer(question)` is the function that commands and benchmarks call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.capacity.devices import LinkSpec, links_of
from pdserve.capacity.placements import PlacementRate, colocated_rate, exposed_s, transfer_s
from pdserve.capacity.question import MOST_DEGREE, CapacityQuestion
from pdserve.capacity.verdict import CapacityVerdict, TwoPools, judge
from pdserve.capacity.worker_speed import Memory, WorkerSpeed, e2e_s
from pdserve.core.errors import ConfigError
from pdserve.core.shards import Degrees

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
    """The sequences that run at a time, in all lanes together."""
    step_s: float
    links_s: float
    """The part of `step_s` between GPUs: all-reduces, and the passes between stages."""
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

    degrees: Degrees
    """The degrees of a worker that decodes, or does both."""
    prefill_degrees: Degrees
    workers: int
    """The workers with `degrees` that the GPUs make."""
    kv_bytes_per_token: float
    """KV of the first token, stored once."""
    kv_bytes_per_request: float
    """KV of a prompt, as it crosses the link."""
    memory: Memory
    prefill_memory: Memory
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
    best = max(found, key=lambda one: (one.verdict.requests_per_s, -one.degrees.tensor))
    fitting = [one for one in found if one.room.max_users]
    return best if best.verdict.requests_per_s else fitting[0] if fitting else found[-1]


def degrees(question: CapacityQuestion) -> tuple[int, ...]:
    """Return the GPUs that a stage of a worker may have: powers of two that divide the model and the nodes, within one node if
    that is enough.

    More GPUs than those of a node are tried only where the model does not fit into fewer. Raises `ConfigError` where no number
    works.
    """
    found: list[int] = []
    tp = 1
    while tp <= MOST_DEGREE and (degrees := question.degrees(tp)).ranks <= question.gpus and question.model.heads % tp == 0:
        over = tp > question.gpus_per_node and found
        if over and WorkerSpeed(question, question.degrees(found[-1])).users_at(question.isl + question.osl):
            break
        if question.model.shares_evenly(degrees) and question.fills_nodes(degrees):
            found.append(tp)
        tp *= 2
    if not found:
        raise ConfigError(
            f"--pipeline-parallel-size (--pp) {question.pp} makes no workers of the {question.gpus} GPUs (--gpus) that fill "
            f"nodes of {question.gpus_per_node} (--gpus-per-node) evenly: lower it, or name --tensor-parallel-size"
        )
    return tuple(found)


def _answer(question: CapacityQuestion, tp: int) -> CapacityAnswer:
    worker = WorkerSpeed(question, question.degrees(tp))
    degrees = question.prefill_degrees(tp)
    pools = TwoPools(worker if degrees == worker.degrees else WorkerSpeed(question, degrees), worker)
    workers = question.gpus // worker.gpus
    link = question.link_of(min(pools.prefill.gpus, worker.gpus))
    prefill, decode = pools.rates(link.bytes_per_s)
    colocated = colocated_rate(worker)
    verdict = judge(pools, link.bytes_per_s)
    tokens_per_s = verdict.requests_per_s * question.osl
    return CapacityAnswer(
        degrees=worker.degrees,
        prefill_degrees=degrees,
        workers=workers,
        kv_bytes_per_token=worker.kv_bytes(1),
        kv_bytes_per_request=worker.kv_bytes(question.isl),
        memory=worker.memory,
        prefill_memory=pools.prefill.memory,
        room=_room(worker, workers),
        steps=_steps(worker),
        largest_batch=int(decode.batch or 0),
        prefill_floor_s=pools.prefill.prefill_s(question.isl),
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        link=link,
        transfers=_transfers(pools, link, verdict.break_even_bytes_per_s),
        e2e_alone_s=_e2e_alone(pools, link),
        e2e_loaded_s=_e2e_loaded(question, verdict, prefill, decode, colocated),
        verdict=verdict,
        output_tokens_per_s=tokens_per_s,
        cost=_cost(question, tokens_per_s, _gpus_used(pools, verdict)),
    )


def _gpus_used(pools: TwoPools, verdict: CapacityVerdict) -> int:
    """Return the GPUs of the recommended workers, in whole workers of the question's GPUs."""
    if verdict.disaggregate and verdict.split and not pools.equal:
        return verdict.split.prefill * pools.prefill.gpus + verdict.split.decode * pools.decode.gpus
    return pools.decode.question.gpus // pools.decode.gpus * pools.decode.gpus


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
        lane = worker.lane(batch)
        step = worker.decode_s(lane, context)
        bound = worker.decode_bound(lane, context)
        found.append(DecodeStep(batch, step, worker.links_s(lane), batch / step, bound, batch <= most))
    return tuple(found)


def _transfers(pools: TwoPools, chosen: LinkSpec, even: float | None) -> tuple[Transfer, ...]:
    lender = pools.prefill
    known = links_of(lender.question.gpu, min(lender.gpus, pools.decode.gpus))
    links = known if chosen.name in {one.name for one in known} else (chosen, *known)
    return tuple(
        Transfer(
            one.name,
            one.bytes_per_s,
            transfer_s(lender, one.bytes_per_s),
            exposed_s(lender, one.bytes_per_s),
            even is not None and one.bytes_per_s >= even,
        )
        for one in links
    )


def _e2e_alone(pools: TwoPools, link: LinkSpec) -> float:
    question = pools.decode.question
    step = pools.decode.decode_s(1, question.isl + question.osl // 2)
    first = pools.prefill.prefill_s(question.isl)
    return e2e_s(first, step, question.osl) + exposed_s(pools.prefill, link.bytes_per_s)


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
