"""A router that dies or stands still under load: no wrong token, an error that says to try again, nothing left behind."""

from __future__ import annotations

import time

import pytest
from fault_service import ROUTER_LOST_S, TRIES, Phase, Service, assert_all_equal, assert_equal_or_retryable, load_in

from testkit.load import Load

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PHASES = pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)


def served_by_a_killed_router(service: Service, phase: Phase) -> int:
    """Kill it, and return how many requests had ended well before."""
    cluster = service.cluster
    with load_in(phase, cluster, service.load) as (load, held):
        cluster.processes["router"].kill()
        for name in held:
            cluster.processes[name].resume()
        return assert_equal_or_retryable(load.finish(), service.expected)


@PHASES
def test_a_killed_router_ends_its_streams_with_a_retryable_error(service: Service, phase: Phase) -> None:
    """(1) It is killed; (2) open streams end so that a client may try again; (3) it starts on the same ports, learns
    the workers, whose blocks are free; (4) the same requests succeed."""
    cluster = service.cluster
    workers = {name: cluster.processes[name] for name in cluster.worker_names}
    for _ in range(TRIES):
        served = served_by_a_killed_router(service, phase)
        service.assert_healed()
        if served < len(service.load):
            break
    assert served < len(service.load)
    assert {name: cluster.processes[name] for name in workers} == workers, "a worker did not outlive the router"
    with Load(cluster.grpc, service.load) as load:
        assert_all_equal(load.finish(), service.expected)
    cluster.assert_empty()


@PHASES
def test_a_short_pause_of_the_router_is_only_a_delay(service: Service, phase: Phase) -> None:
    """Shorter than the time after which workers and router give each other up."""
    cluster = service.cluster
    with load_in(phase, cluster, service.load) as (load, held):
        cluster.processes["router"].pause()
        for name in held:
            cluster.processes[name].resume()
        time.sleep(ROUTER_LOST_S / 4)
        cluster.processes["router"].resume()
        assert_all_equal(load.finish(), service.expected)
    service.assert_healed()


@PHASES
def test_a_router_that_was_given_up_makes_no_wrong_token(service: Service, phase: Phase) -> None:
    """(1) It stands still until its workers have dropped what it had placed and dial again; (2) it goes on with the
    same requests in memory: what it had heard last is not continued by what it hears next."""
    cluster = service.cluster
    with load_in(phase, cluster, service.load) as (load, held):
        cluster.processes["router"].pause()
        for name in held:
            cluster.processes[name].resume()
        time.sleep(2 * ROUTER_LOST_S)
        cluster.processes["router"].resume()
        assert_equal_or_retryable(load.finish(), service.expected)
    service.assert_healed()
