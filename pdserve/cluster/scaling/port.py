"""The actuator's connection to the router: one poll at a time, each with a bound, and the term that the router gave.

A router that has started anew gives a new term. A router that gave another actuator a later term ends this one for good.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import grpc

from pdserve.client import AdminClient, CallFailed, PrintedStream
from pdserve.cluster.scaling.report import ROLES
from pdserve.cluster.scaling.wanted import Order
from pdserve.core.errors import ErrorCode
from pdserve.core.worker import Role
from pdserve.rpc.v1 import inference_pb2, scaling_pb2

CALL_TIMEOUT_S: Final = 2.0  # a router answers in milliseconds; a hung one must not hold back the supervision of the workers
log = logging.getLogger(__name__)


class Replaced(Exception):
    """Another actuator has a later term. The message names it."""


class PlanRefused(Exception):
    """The router refused a step. `stale`: the step was made for a membership that has changed meanwhile."""

    def __init__(self, message: str, *, stale: bool) -> None:
        super().__init__(message)
        self.stale = stale


class Unanswered(Exception):
    """The answer to a step was lost, so the worker may have been told or not."""


@dataclass(frozen=True, slots=True)
class Poll:
    """The answer of the router. `new_router`: it counts orders from the beginning."""

    state: inference_pb2.GetClusterStateResponse
    order: Order | None
    new_router: bool


class RouterPort:
    """The router as the actuator uses it, over gRPC. It connects again by itself."""

    def __init__(self, address: str, cluster_token: str, actuator: str) -> None:
        """`actuator` names this process for operators."""
        self._client = AdminClient(address, cluster_token)
        self._actuator = actuator
        self._router = 0  # the incarnation of the router that gave the term
        self._term = 0

    def poll(self, report: scaling_pb2.ScalingReport) -> Poll | None:
        """Report, and ask for the state and the last order. None: the router does not answer now. Raises `Replaced`."""
        try:
            state = self._client.cluster_state(CALL_TIMEOUT_S)
            new_router = not self._term or state.router_incarnation != self._router
            term = 0 if new_router else self._term
            request = scaling_pb2.ActuateRequest(actuator=self._actuator, term=term, report=report)
            answer = self._client.actuate(request, CALL_TIMEOUT_S)
        except CallFailed as exc:
            self._check_replaced(exc)
            return None
        self._router, self._term = state.router_incarnation, answer.term
        return Poll(state, _order(answer) if answer.HasField("order") else None, new_router)

    def drain(self, worker_id: str, incarnation: int) -> None:
        """Let a worker begin to drain. Raises `PlanRefused` and `Unanswered`."""
        fence = {"incarnation": incarnation, "term": self._term}
        # The sizes that were asked for say how many workers stay, so nothing is left to be confirmed.
        _begun(self._client.drain(worker_id, force=True, timeout_s=CALL_TIMEOUT_S, **fence))

    def flip(self, worker_id: str, incarnation: int, role: Role) -> None:
        """Let a worker begin to change its role. Raises `PlanRefused` and `Unanswered`."""
        fence = {"incarnation": incarnation, "term": self._term}
        _begun(self._client.flip(worker_id, ROLES[role], timeout_s=CALL_TIMEOUT_S, **fence))

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _check_replaced(self, exc: CallFailed) -> None:
        """Raise `Replaced` if the router that gave our term has given a later one. A new router knows no term of ours."""
        if exc.reason == ErrorCode.INVALID_REQUEST.value:
            log.error("the router refuses the report of the actuator, which is a bug: %s", exc)
        if exc.reason != ErrorCode.STALE_ORDER.value:
            return
        try:
            now = self._client.cluster_state(CALL_TIMEOUT_S)
        except CallFailed:
            return
        if now.router_incarnation == self._router:
            raise Replaced(str(exc)) from exc


def _order(answer: scaling_pb2.ActuateResponse) -> Order:
    sizes = answer.order.sizes
    return Order(
        answer.order.number,
        sizes.prefill if sizes.HasField("prefill") else None,
        sizes.decode if sizes.HasField("decode") else None,
        sizes.automatic,
    )


def _begun(call: PrintedStream[inference_pb2.DrainProgress]) -> None:
    """Wait for the first message of progress: the router has then told the worker. Raises `PlanRefused` and `Unanswered`."""
    try:
        next(iter(call))
    except CallFailed as exc:
        if exc.reason is None and exc.status is not grpc.StatusCode.UNIMPLEMENTED:  # an older router knows no flips
            raise Unanswered(str(exc)) from exc
        stale = exc.reason in (ErrorCode.STALE_ORDER.value, ErrorCode.UNKNOWN_WORKER.value)
        raise PlanRefused(str(exc), stale=stale) from exc
    except StopIteration as exc:
        raise Unanswered("the router ended the call") from exc
    finally:
        call.cancel()
