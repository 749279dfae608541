"""Workers that die, stand still or hang under load: every request ends with the tokens of an undisturbed run."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import pytest
from fault_service import BOUND_S, LOST_S, Phase, Service, assert_all_equal, load_in, tiny

from testkit.faults import Fault, strike
from testkit.load import Load
from testkit.processes import Place, State
from testkit.told_worker import HANGING

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEP_TIMEOUT_S = 3.0  # instead of 60; a step of the tiny model takes milliseconds
HANGS_SOON = replace(HANGING, worker={"engine": tiny(step_timeout_s=STEP_TIMEOUT_S)})


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_no_client_sees_the_loss_of_a_worker(service: Service, fault: Fault, victim: str, phase: Phase) -> None:
    """(1) 24 requests; (2) at their phase a worker dies or stands still; (3) all end as undisturbed; (4) it heals."""
    cluster = service.cluster
    with load_in(phase, cluster, service.load) as (load, held):
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
    with load_in(Phase.DECODING if victim.startswith("decode") else Phase.PREFILL, cluster, service.load) as (load, _):
        process.pause()
        cluster.wait_state(lambda state: not placed_on(state, victim), LOST_S + BOUND_S)
        process.resume()
        assert_all_equal(load.finish(), service.expected)
    cluster.wait_whole()
    assert cluster.processes[victim] is process
    service.assert_healed()


def placed_on(state: State, worker_id: str) -> bool:
    return any(w.hello.worker_id == worker_id and w.ready for w in state.workers)


@pytest.fixture(params=["decode-0", "prefill-0"])
def hanging(request: pytest.FixtureRequest, service: Service) -> str:
    """Its process hangs when it gets SIGUSR1; the one that follows it is an ordinary one."""
    name = request.param
    service.cluster.move(name, HANGS_SOON)
    service.cluster.start(name)
    service.cluster.move(name, Place())
    service.cluster.wait_whole()
    return str(name)


def test_no_client_sees_an_engine_that_hangs(service: Service, hanging: str) -> None:
    """(1) 24 requests; (2) one engine hangs in the middle of them; (3) its worker says so and ends with a failure's status,
    so that whoever started it starts another; (4) all requests end as undisturbed; (5) it heals."""
    cluster = service.cluster
    process = cluster.processes[hanging]
    router = cluster.processes["router"]
    told_before = len(router.log())
    with load_in(Phase.DECODING if hanging.startswith("decode") else Phase.PREFILL, cluster, service.load) as (load, _):
        process.send(signal.SIGUSR1)
        assert_all_equal(load.finish(), service.expected)
    if process.alive and "is lost: the engine" not in process.log():  # all had ended before it hung: the next step is the last
        with Load(cluster.grpc, service.load) as load:
            assert_all_equal(load.finish(), service.expected)
    assert process.popen.wait(BOUND_S) == 1
    assert f"{hanging} is lost: the engine has made no step for" in process.log()
    service.assert_healed()
    heard = router.log()[told_before:]  # by its own word, or by its heartbeats before that
    assert re.search(rf"{hanging}\b.* ended: .* has made no step for", heard), heard
