"""Workers that die or stand still under load: every request ends with the tokens of an undisturbed run."""

from __future__ import annotations

import pytest
from fault_service import BOUND_S, LOST_S, Phase, Service, assert_all_equal, wait_phase

from pdserve.testing.faults import Fault, strike
from pdserve.testing.load import Load
from pdserve.testing.processes import State

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_no_client_sees_the_loss_of_a_worker(service: Service, fault: Fault, victim: str, phase: Phase) -> None:
    """(1) 24 requests; (2) at their phase a worker dies or stands still; (3) all end as undisturbed; (4) it heals."""
    cluster = service.cluster
    with Load(cluster.grpc, service.load) as load:
        held = wait_phase(cluster, load, phase)
        strike(fault, cluster.processes[victim])
        for name in held:
            if name != victim:
                cluster.processes[name].resume()
        assert_all_equal(load.finish(), service.expected)
    service.assert_healed()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_that_stood_still_drops_its_work_and_joins_again(service: Service, victim: str) -> None:
    """(1) It stops in mid-work; (2) it is found lost and its requests end elsewhere; (3) it goes on with the same
    process: whatever it still computes reaches nobody; (4) it dials again and serves."""
    cluster = service.cluster
    process = cluster.processes[victim]
    with Load(cluster.grpc, service.load) as load:
        wait_phase(cluster, load, Phase.DECODING if victim.startswith("decode") else Phase.PREFILL)
        process.pause()
        cluster.wait_state(lambda state: not placed_on(state, victim), LOST_S + BOUND_S)
        process.resume()
        assert_all_equal(load.finish(), service.expected)
    cluster.wait_whole()
    assert cluster.processes[victim] is process
    service.assert_healed()


def placed_on(state: State, worker_id: str) -> bool:
    return any(w.worker_id == worker_id and w.ready for w in state.workers)
