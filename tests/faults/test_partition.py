"""Two network namespaces and KV over TCP between them: a slow, a lossy, a flapping and a cut link.

Prefill-0 is alone in the other namespace, reached by one link for the router and another for KV; everything else is
here. Without root, or without namespaces, these tests are skipped with the reason.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from fault_service import BOUND_S, ROUTER, WORKER, Service, assert_all_equal, assert_serves, messages, tiny
from namespaces import Neighbour, why_not

from testkit.faults import Supervisor
from testkit.load import Load
from testkit.processes import Place, ProcessCluster, State

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

FAR = "prefill-0"
SLOW = "10mbit"  # a prompt of KV, about 500 KiB, takes half a second, and no transfer reaches its deadline of 5 s


@dataclass
class Far:
    """`service` of three workers, of which `FAR` is in `neighbour`."""

    neighbour: Neighbour
    service: Service

    @property
    def cluster(self) -> ProcessCluster:
        return self.service.cluster


@pytest.fixture(scope="module")
def both() -> Iterator[Far]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Neighbour() as neighbour:
        control, data = neighbour.control, neighbour.data
        places = {FAR: Place(neighbour.command, worker={"host": data.their_ip})}
        cluster = ProcessCluster(
            tiny(),
            prefill=2,
            decode=1,
            router=replace(ROUTER, host=control.our_ip, pair_aside_s=2.0),
            worker={**WORKER, "host": data.our_ip, "allow_public_bind": True},
            env={"UCX_TLS": "tcp,self"},
            places=places,
        )
        with cluster:
            yield Far(neighbour, Service(cluster, messages(12)))


RECOVERY_LOADS = 4


@pytest.fixture
def far(both: Far) -> Iterator[Far]:
    both.cluster.heal()
    both.cluster.wait_state(lambda state: not set_aside(state), BOUND_S)
    both.neighbour.data.shape(SLOW)
    yield both
    both.neighbour.control.heal()
    both.neighbour.data.heal()


def used_far(load: Load) -> bool:
    """Some KV crossed the link that the test is about."""
    return any(o.answer.report.prefill_worker == FAR and o.answer.report.kv_bytes for o in load.outcomes)


def wait_reading_far(far: Far, load: Load) -> None:
    """Until a prompt that prefill-0 has computed is known to the client but cannot have crossed the slow link yet."""
    far.cluster.wait_state(lambda state: any(w.load.leases_held and w.hello.worker_id == FAR for w in state.workers), BOUND_S)
    load.until(lambda outcomes: any(len(o.answer.ids) == 1 for o in outcomes), BOUND_S)


def set_aside(state: State) -> bool:
    return any(pair.prefill_worker == FAR and pair.decode_worker == "decode-0" for pair in state.set_aside_pairs)


def assert_recovered(far: Far) -> None:
    """Whole, no pair set aside any more, KV crosses the link again, nothing is left."""
    far.neighbour.data.unshape()
    far.cluster.heal()
    far.cluster.wait_state(lambda state: not set_aside(state), BOUND_S)
    far.cluster.assert_empty(BOUND_S)
    for _ in range(RECOVERY_LOADS):  # its first trial may fail on what is left of the broken connection
        far.cluster.wait_state(lambda state: not set_aside(state), BOUND_S)
        with Load(far.cluster.grpc, far.service.load) as load:
            assert_all_equal(load.finish(), far.service.expected)
        if used_far(load):
            break
    assert used_far(load)
    assert_serves(far.cluster, far.service.load[:2], far.service.expected[:2])


def test_a_slow_link_is_only_slow(far: Far) -> None:
    with Load(far.cluster.grpc, far.service.load) as load:
        assert_all_equal(load.finish(), far.service.expected)
        assert used_far(load)
    assert_recovered(far)


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed: see the test with a flapping link")
def test_lost_packets_change_no_token(far: Far) -> None:
    far.neighbour.data.lose(percent=3)
    try:
        with Load(far.cluster.grpc, far.service.load) as load:
            assert_all_equal(load.finish(), far.service.expected)
    finally:
        far.neighbour.data.lose_nothing()
    assert_recovered(far)


def test_a_flapping_link_changes_no_token(far: Far) -> None:
    """Down for a fifth of a second five times, in the middle of transfers: TCP repairs it, or the pair is set aside."""
    with Load(far.cluster.grpc, far.service.load) as load, Supervisor(far.cluster):
        wait_reading_far(far, load)
        for _ in range(5):
            far.neighbour.data.cut()
            time.sleep(0.2)
            far.neighbour.data.heal()
            time.sleep(0.3)
        assert_all_equal(load.finish(), far.service.expected)
    assert_recovered(far)


def test_a_pair_that_is_cut_off_is_set_aside_and_tried_again(far: Far) -> None:
    """(1) The link of KV is cut in mid-transfer; the router still hears both. (2) Their requests end over the other
    pair; (3) the status names the pair; (4) the link heals and the pair is used again."""
    with Load(far.cluster.grpc, far.service.load) as load, Supervisor(far.cluster):
        wait_reading_far(far, load)
        far.neighbour.data.cut()
        far.cluster.wait_state(set_aside, BOUND_S)
        assert_all_equal(load.finish(), far.service.expected)
    far.neighbour.data.heal()
    assert_recovered(far)


def test_a_worker_that_is_cut_off_from_all_is_lost_and_comes_back(far: Far) -> None:
    """(1) Both links are cut in mid-transfer; (2) the worker is found silent and its requests end elsewhere; (3) the
    links heal; (4) it dials again and is used again."""
    with Load(far.cluster.grpc, far.service.load) as load, Supervisor(far.cluster):
        wait_reading_far(far, load)
        far.neighbour.data.cut()
        far.neighbour.control.cut()
        far.cluster.wait_state(lambda state: all(w.hello.worker_id != FAR for w in state.workers), BOUND_S)
        assert_all_equal(load.finish(), far.service.expected)
    far.neighbour.control.heal()
    far.neighbour.data.heal()
    assert_recovered(far)
