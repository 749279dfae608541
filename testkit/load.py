"""Many requests at once, in a thread of their own, so that a test can cause faults while they run and see how far they are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import grpc

from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from testkit.client import Answer, collect

FINISH_TIMEOUT_S: Final = 120.0
RETRYABLE: Final = frozenset({"overloaded", "lease_gone", "transfer_failed", "replica_lost", "unavailable"})
"""The reasons after which a client may send the same request again."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request so far. `answer` grows while the request streams."""

    answer: Answer = field(default_factory=Answer)
    done: bool = False
    status: grpc.StatusCode | None = None
    """The gRPC status of the failure. None: the request has not failed."""
    reason: str = ""
    """The router's name of the failure. Empty: the connection itself broke."""
    details: str = ""

    @property
    def ok(self) -> bool:
        """The request has finished without a failure."""
        return self.done and self.status is None

    @property
    def retryable(self) -> bool:
        """The client is told to try again: by the router's reason or, if the router died, by gRPC itself."""
        if self.reason:
            return self.reason in RETRYABLE
        return self.status is grpc.StatusCode.UNAVAILABLE


class Load:
    """Sends `messages` when it is entered, at most `concurrency` at a time. Leaving it cancels what still runs."""

    def __init__(self, address: str, messages: Sequence[inference_pb2.GenerateRequest], concurrency: int = 64) -> None:
        self.outcomes = [Outcome() for _ in messages]
        self._address = address
        self._messages = messages
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._error: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(FINISH_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def until(self, predicate: Callable[[list[Outcome]], bool], timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait until the predicate of the growing outcomes holds. Raises TimeoutError with the outcomes so far."""
        end_s = time.monotonic() + timeout_s
        while not predicate(self.outcomes):
            if time.monotonic() > end_s:
                raise TimeoutError(f"not reached within {timeout_s} s: {self.outcomes}")
            time.sleep(0.002)

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> list[Outcome]:
        """Wait for all requests, and return their outcomes. Raises TimeoutError naming those that hang, and any error of the
        client itself."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            hanging = [(i, len(o.answer.ids)) for i, o in enumerate(self.outcomes) if not o.done]
            raise TimeoutError(f"{len(hanging)} requests have not ended within {timeout_s} s: {hanging}")
        if self._error is not None:
            raise self._error
        return self.outcomes

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._all())
        except BaseException as exc:  # noqa: BLE001 - `finish` raises it
            self._error = exc

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _all(self) -> None:
        gate = asyncio.Semaphore(self._concurrency)
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def one(message: inference_pb2.GenerateRequest, outcome: Outcome) -> None:
                async with gate:
                    await attempt(stub, message, outcome)

            async with asyncio.TaskGroup() as group:
                for message, outcome in zip(self._messages, self.outcomes, strict=True):
                    group.create_task(one(message, outcome))


async def attempt(stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest, outcome: Outcome) -> None:
    """Run one request into `outcome`, also when it fails. Raises AssertionError when a token is lost or comes twice."""
    try:
        await collect(stub, message, outcome.answer)
    except grpc.aio.AioRpcError as exc:
        outcome.status, outcome.details, outcome.reason = exc.code(), exc.details() or "", reason_of(exc)
    outcome.done = True


def reason_of(error: Any) -> str:
    """Return the router's name for the reason of a failed call. It is empty when the failure did not come from a router."""
    return str(dict(error.trailing_metadata() or ()).get(REASON_METADATA, ""))
