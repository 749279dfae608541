"""What the tests with real faults share: the cluster, the load, its oracle, and the moment of a request to strike at."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from pdserve.config import MIB, EngineConfig, RouterConfig
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import generate_all, request
from testkit.load import Load, Outcome
from testkit.processes import ProcessCluster, State

APART = common_pb2.PLACEMENT_DISAGGREGATED
TOGETHER = common_pb2.PLACEMENT_COLOCATED
AUTO = common_pb2.PLACEMENT_AUTO
DECODE = common_pb2.ROLE_DECODE
ROUTER_LOST_S = 4.0
WORKER = {"heartbeat_interval_s": 0.1, "router_lost_s": ROUTER_LOST_S}  # workers tell their counts so often
LOST_S = 3.0  # instead of 5: half of the tests wait for it
ROUTER = RouterConfig(heartbeat_lost_s=LOST_S)
BOUND_S = 40.0  # for anything that takes a few seconds on an idle machine
PLAIN_IDS = 256
TRIES = 5


def tiny(**changes: Any) -> EngineConfig:
    """Batch-invariant, so that an output depends neither on its company nor on where it was computed.

    256 blocks a worker: a load of 24 requests needs more than both decode workers have, so some of them queue.
    """
    fields: dict[str, Any] = {
        "model": "tiny",
        "dtype": "float32",
        "batch_invariant": True,
        "kv_cache_memory": 4 * MIB,
        "max_num_batched_tokens": 16,
        "threads": 1,
        "enable_prefix_caching": False,  # the same prompts again and again: their prefill is to take its time
    }
    return EngineConfig(**(fields | changes))


def two_pairs(**changes: Any) -> ProcessCluster:
    return ProcessCluster(tiny(**changes), prefill=2, decode=2, router=ROUTER, worker=WORKER)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(PLAIN_IDS) for _ in range(length)]


def sampling(i: int, max_tokens: int) -> dict[str, Any]:
    """Half greedy, half seeded with every filter in use."""
    common = {"max_tokens": max_tokens, "ignore_eos": True}
    if i % 2 == 0:
        return {"temperature": 0.0, **common}
    return {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 1000 + i, **common}


def messages(
    count: int, placement: int = APART, *, prompt_tokens: int = 600, max_tokens: int = 64, seed: int = 0
) -> list[inference_pb2.GenerateRequest]:
    """The same requests for the same arguments; their prompts vary in length by a third."""
    rng = random.Random(seed)
    lengths = [rng.randrange(prompt_tokens * 2 // 3, prompt_tokens + 1) for _ in range(count)]
    return [request(prompt(n, seed + i), placement, **sampling(i, max_tokens)) for i, n in enumerate(lengths)]


def oracle(cluster: ProcessCluster, asked: Sequence[inference_pb2.GenerateRequest]) -> list[list[int]]:
    """What the requests come to undisturbed, each computed on one worker."""
    copies = []
    for message in asked:
        copy = inference_pb2.GenerateRequest()
        copy.CopyFrom(message)
        copy.placement = TOGETHER
        copies.append(copy)
    return [answer.ids for answer in generate_all(cluster.grpc, copies)]


class Phase(Enum):
    """Where the requests are when a fault strikes."""

    QUEUED = "queued"
    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODING = "decoding"


class Over(Exception):
    """All requests had ended before the moment to strike at was seen."""


@contextmanager
def load_in(
    phase: Phase, cluster: ProcessCluster, asked: Sequence[inference_pb2.GenerateRequest]
) -> Iterator[tuple[Load, list[str]]]:
    """A load with requests in `phase`, and the workers that are held. It is sent again if it was over before that was seen,
    as it may be on a machine that stands still for a moment."""
    for _ in range(TRIES):
        with Load(cluster.grpc, asked) as load:
            try:
                held = wait_phase(cluster, load, phase)
            except Over:
                continue
            yield load, held
            return
    raise AssertionError(f"{phase} was over each of {TRIES} times before it was seen")


def wait_phase(cluster: ProcessCluster, load: Load, phase: Phase) -> list[str]:
    """Until requests of the load are in `phase`; some of the others may be further or less far. Raises `Over`.

    Handoff is held: the decode workers named in the answer stand still, tokens 0 have come from prefill, and no KV
    of theirs was committed since. The caller lets them go within the time after which they count as lost.
    """
    if phase is Phase.QUEUED:
        wait_seen(cluster, load, lambda state: state.queued_requests > 0 and placed(state))
    elif phase is Phase.PREFILL:
        wait_seen(cluster, load, lends)
    elif phase is Phase.DECODING:
        load.until(lambda outcomes: sum(len(o.answer.ids) >= 5 for o in outcomes) >= 4, BOUND_S)
    else:
        return hold_handoff(cluster, load)
    return []


def wait_seen(cluster: ProcessCluster, load: Load, predicate: Callable[[State], bool]) -> None:
    def seen(state: State) -> bool:
        over = all(outcome.done for outcome in load.outcomes)
        if over and not predicate(state):
            raise Over
        return predicate(state)

    cluster.wait_state(seen, BOUND_S)


def lends(state: State) -> bool:
    return any(w.load.leases_held for w in state.workers)


def hold_handoff(cluster: ProcessCluster, load: Load) -> list[str]:
    wait_seen(cluster, load, lends)
    decoders = [name for name in cluster.worker_names if name.startswith("decode")]
    for name in decoders:
        cluster.processes[name].pause()
    time.sleep(0.05)  # what they had sent before reaches the client
    before = sum(len(o.answer.ids) == 1 for o in load.outcomes)
    try:
        load.until(lambda outcomes: sum(len(o.answer.ids) == 1 for o in outcomes) > before, LOST_S)
    except TimeoutError:
        for name in decoders:
            cluster.processes[name].resume()
        raise Over from None
    return decoders


def placed(state: State) -> bool:
    return any(w.requests_placed for w in state.workers)


def assert_equal_or_retryable(outcomes: Sequence[Outcome], expected: Sequence[Sequence[int]]) -> int:
    """Never a wrong token: a failed stream is a prefix of the right one, and says that it may be tried again.

    Returns how many succeeded.
    """
    for i, (outcome, right) in enumerate(zip(outcomes, expected, strict=True)):
        if outcome.ok:
            assert outcome.answer.ids == right, f"request {i} of {outcome.answer.report}"
        else:
            assert outcome.answer.ids == right[: len(outcome.answer.ids)], f"request {i} before {outcome.details}"
            assert outcome.retryable, f"request {i}: {outcome.status} {outcome.reason!r}: {outcome.details}"
    return sum(outcome.ok for outcome in outcomes)


def assert_all_equal(outcomes: Sequence[Outcome], expected: Sequence[Sequence[int]]) -> None:
    """No request failed, no token differs from the undisturbed run."""
    failed = [(i, str(o.status), o.reason, o.details) for i, o in enumerate(outcomes) if not o.ok]
    assert not failed, failed
    assert_equal_or_retryable(outcomes, expected)


def assert_serves(cluster: ProcessCluster, asked: Sequence[inference_pb2.GenerateRequest], expected: list[list[int]]) -> None:
    """The next requests are answered as ever, with KV moving between the pools, and leave nothing behind."""
    answers = generate_all(cluster.grpc, asked)
    assert [answer.ids for answer in answers] == expected
    assert all(answer.report.kv_bytes for answer in answers if answer.report.placement == APART)
    cluster.assert_empty()


class Service:
    """A cluster that the tests of a module share, and a load with what it comes to undisturbed."""

    def __init__(self, cluster: ProcessCluster, load: Sequence[inference_pb2.GenerateRequest]) -> None:
        self.cluster = cluster
        self.load = list(load)
        self.expected = oracle(cluster, self.load)

    def assert_healed(self) -> None:
        """Whole again, nothing left from the fault, and the next requests are served."""
        self.cluster.heal()
        self.cluster.assert_empty(BOUND_S)
        assert_serves(self.cluster, self.load[:4], self.expected[:4])
