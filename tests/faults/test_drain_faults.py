"""Workers that leave in order, under load: no request notices, and their process ends with 0."""

from __future__ import annotations

import signal
import threading

import grpc
import pytest
from fault_service import BOUND_S, Phase, Service, assert_all_equal, load_in

from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2
from testkit.processes import ProcessCluster, State

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PHASES = {"prefill-0": Phase.PREFILL, "decode-0": Phase.DECODING}
VICTIMS = pytest.mark.parametrize("victim", list(PHASES))


class DrainCall(threading.Thread):
    """The Drain call of an operator, read to its end."""

    def __init__(self, cluster: ProcessCluster, worker_id: str) -> None:
        super().__init__(daemon=True)
        self.progress: list[inference_pb2.DrainProgress] = []
        self.error: grpc.RpcError | None = None
        self._address = cluster.admin
        self._worker_id = worker_id

    def run(self) -> None:
        with grpc.insecure_channel(self._address) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            try:
                for step in stub.Drain(inference_pb2.DrainRequest(worker_id=self._worker_id), timeout=BOUND_S):
                    self.progress.append(step)
            except grpc.RpcError as exc:
                self.error = exc


@VICTIMS
def test_an_operators_drain_is_seen_by_nobody_else(service: Service, victim: str) -> None:
    """(1) It has work; (2) it is drained; (3) the call ends when it has left, which it does with 0; (4) all requests
    end as undisturbed; (5) a new process takes its name."""
    cluster = service.cluster
    with load_in(PHASES[victim], cluster, service.load) as (load, _):
        call = DrainCall(cluster, victim)
        call.start()
        assert cluster.processes[victim].popen.wait(BOUND_S) == 0, cluster.processes[victim].log()
        call.join(BOUND_S)
        assert call.error is None
        assert [step.done for step in call.progress[-2:]] in ([False, True], [True])
        assert_all_equal(load.finish(), service.expected)
    service.assert_healed()


@VICTIMS
def test_sigterm_is_a_drain(service: Service, victim: str) -> None:
    cluster = service.cluster
    with load_in(PHASES[victim], cluster, service.load) as (load, _):
        assert cluster.processes[victim].terminate(BOUND_S) == 0, cluster.processes[victim].log()
        assert_all_equal(load.finish(), service.expected)
    service.assert_healed()


@VICTIMS
def test_a_second_signal_stops_at_once_and_loses_nothing(service: Service, victim: str) -> None:
    """(1) SIGTERM, and the router knows; (2) SIGTERM again: the process ends with its work undone; (3) the requests
    end elsewhere as undisturbed."""
    cluster = service.cluster
    process = cluster.processes[victim]
    with load_in(PHASES[victim], cluster, service.load) as (load, _):
        process.send(signal.SIGTERM)
        cluster.wait_state(lambda state: not process.alive or drains(state, victim), BOUND_S)
        process.terminate(BOUND_S)
        assert_all_equal(load.finish(), service.expected)
    service.assert_healed()


def drains(state: State, worker_id: str) -> bool:
    return any(w.draining and w.hello.worker_id == worker_id for w in state.workers)
