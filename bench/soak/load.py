"""The load of a soak: random requests in a closed loop. Each answer is compared with the answer of the same request
undisturbed.

A client behaves as clients should: it tries again when the error asks for it, a bounded number of times. Some clients leave in
the middle of their answer, and some set a deadline that may pass.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Final

import grpc

from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from testkit.client import generate_all, request
from testkit.load import Outcome, attempt

CASES: Final = 64
MAX_PROMPT_TOKENS: Final = 900
MAX_OUTPUT_TOKENS: Final = 160
PLAIN_IDS: Final = 256  # token ids that every model has
PLACEMENTS: Final = (common_pb2.PLACEMENT_AUTO, common_pb2.PLACEMENT_DISAGGREGATED, common_pb2.PLACEMENT_COLOCATED)
TRIES: Final = 40  # with the pause below they last longer than a router takes to start again and probe its workers
PAUSE_S: Final = 0.5
END_TIMEOUT_S: Final = 180.0
HANGS_AFTER_S: Final = 110.0  # just below the client's own time limit
MAX_VIOLATIONS: Final = 50  # this many are kept as text; all are counted


class Manner(Enum):
    """One way in which a client behaves. The value is its frequency in percent."""

    STAYS = 75
    LEAVES = 15
    HURRIES = 10  # sets a deadline that may pass


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and the tokens of its undisturbed run."""

    message: inference_pb2.GenerateRequest
    expected: tuple[int, ...] = ()


def random_cases(rng: random.Random, count: int = CASES) -> list[inference_pb2.GenerateRequest]:
    """Return random requests, half greedy and half seeded. Prompts and outputs have all lengths, short lengths more often."""
    asked = []
    for i in range(count):
        prompt = [rng.randrange(PLAIN_IDS) for _ in range(_length(rng, MAX_PROMPT_TOKENS))]
        sampling: dict[str, Any] = {"max_tokens": _length(rng, MAX_OUTPUT_TOKENS), "ignore_eos": rng.random() < 0.7}
        if i % 2:
            sampling |= {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": rng.randrange(1 << 31)}
        else:
            sampling["temperature"] = 0.0
        asked.append(request(prompt, common_pb2.PLACEMENT_COLOCATED, **sampling))
    return asked


def _length(rng: random.Random, most: int) -> int:
    return max(1, round(most * rng.random() ** 2))


def with_oracle(address: str, asked: Sequence[inference_pb2.GenerateRequest]) -> list[Case]:
    """Run each request colocated and undisturbed, and return it with the tokens that it gave."""
    answers = generate_all(address, asked, concurrency=16)
    return [Case(message, tuple(answer.ids)) for message, answer in zip(asked, answers, strict=True)]


@dataclass(slots=True)
class Tally:
    """Counts of how the requests have ended."""

    ok: int = 0
    recovered: int = 0
    """Requests that succeeded after a retry or rebind within the cluster."""
    tried_again: int = 0
    """Requests that succeeded after their client tried again, as the error asked."""
    left: int = 0
    """Requests that their client left."""
    late: int = 0
    """Requests that passed the deadline that they had set."""
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Tries that failed, by reason; a later try may have succeeded."""
    given_up: Counter[str] = field(default_factory=Counter)
    """Requests whose client had no tries left, by the reason of the last try."""
    violations: list[str] = field(default_factory=list)
    num_violations: int = 0
    ttft_s: list[tuple[float, float]] = field(default_factory=list)
    """(time since the start, TTFT) of each success, both in seconds."""

    @property
    def total(self) -> int:
        """Number of requests that have ended without a violation."""
        return self.ok + self.left + self.late + self.given_up.total()

    def violated(self, what: str) -> None:
        """Count a violation. Its text is kept as long as fewer than 50 are."""
        self.num_violations += 1
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(what)


class Clients:
    """Runs `count` clients at once on a separate thread, from entering until `stop`."""

    def __init__(self, address: str, cases: Sequence[Case], *, count: int, seed: int) -> None:
        self.tally = Tally()
        self._address = address
        self._cases = cases
        self._count = count
        self._seed = seed
        self._stopping = False
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)

    def __enter__(self) -> Clients:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no new requests, and wait up to 180 s for running requests. A request that has not ended by then is a
        violation.
        """
        self._stopping = True
        self._thread.join(END_TIMEOUT_S)
        if self._thread.is_alive():
            self.tally.violated(f"requests had not ended {END_TIMEOUT_S:.0f} s after the last was sent")

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except BaseException as exc:  # noqa: BLE001 - the report shows it
            self.tally.violated(f"the clients died: {exc!r}")

    async def _all(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel, asyncio.TaskGroup() as group:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for i in range(self._count):
                group.create_task(self._client(stub, random.Random(self._seed * 1000 + i)))

    async def _client(self, stub: inference_pb2_grpc.InferenceStub, rng: random.Random) -> None:
        manners = list(Manner)
        while not self._stopping:
            case = rng.choice(self._cases)
            (manner,) = rng.choices(manners, [m.value for m in manners])
            message = inference_pb2.GenerateRequest()
            message.CopyFrom(case.message)
            message.placement = rng.choice(PLACEMENTS)
            if manner is Manner.HURRIES:
                message.deadline_s = rng.uniform(0.05, 2.0)
            patience_s = rng.uniform(0.0, 1.5) if manner is Manner.LEAVES else None
            await self._ask(stub, Case(message, case.expected), patience_s)

    async def _ask(self, stub: inference_pb2_grpc.InferenceStub, case: Case, patience_s: float | None) -> None:
        """Send one request, and send it again as its client may."""
        for number in range(TRIES):
            outcome = Outcome()
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(patience_s):
                    await attempt(stub, case.message, outcome)
            except TimeoutError:
                pass  # the client left
            except AssertionError as exc:
                self.tally.violated(f"a broken stream: {exc}")
                return
            if not self._judge(case, outcome, number, time.monotonic() - began_s):
                return
            await asyncio.sleep(PAUSE_S)
        self.tally.given_up[outcome.reason or "connection"] += 1

    def _judge(self, case: Case, outcome: Outcome, number: int, took_s: float) -> bool:
        """Count the outcome of one try. Return whether the client tries again."""
        tally, ids = self.tally, tuple(outcome.answer.ids)
        right = case.expected if outcome.ok else case.expected[: len(ids)]
        tally.tokens += len(ids)
        if ids != right:
            tally.violated(f"wrong tokens after {len(_common(ids, right))} of {len(right)}: {outcome.answer.report}")
            return False
        if not outcome.done:
            tally.left += 1
            return False
        if outcome.ok:
            self._succeeded(outcome, number)
            return False
        reason = outcome.reason or "connection"
        if took_s > HANGS_AFTER_S:
            tally.violated(f"a request hung for {took_s:.0f} s: {outcome.status} {outcome.details}")
            return False
        if reason == "deadline_exceeded" and case.message.HasField("deadline_s"):
            tally.late += 1
            return False
        tally.failures[reason] += 1
        if not outcome.retryable:
            tally.violated(f"{outcome.status} {outcome.reason!r}: {outcome.details}")
            return False
        return True

    def _succeeded(self, outcome: Outcome, number: int) -> None:
        report = outcome.answer.report
        self.tally.ok += 1
        self.tally.tried_again += number > 0
        self.tally.recovered += report.attempts > 1 or report.binds > report.attempts
        if outcome.answer.arrivals_s:
            self.tally.ttft_s.append((time.monotonic() - self._began_s, outcome.answer.arrivals_s[0]))


def _common(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the longest prefix that both sequences share."""
    same = []
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        same.append(a)
    return same
