"""KV over TCP, and the one way in which UCX ends a process of ours: a lender that stood still while its reader went away.

It may die as soon as it goes on. Its supervisor starts it again, and no client notices either way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from fault_service import BOUND_S, ROUTER, WORKER, Phase, Service, assert_all_equal, load_in, messages, tiny

from testkit.faults import Supervisor
from testkit.processes import ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROUNDS = 3


@pytest.fixture(scope="module")
def tcp_service() -> Iterator[Service]:
    env = {"UCX_TLS": "tcp,self"}
    with ProcessCluster(tiny(), prefill=2, decode=2, router=ROUTER, worker=WORKER, env=env) as cluster:
        yield Service(cluster, messages(16))


def test_a_lender_that_stood_still_while_its_reader_died_is_survived(tcp_service: Service) -> None:
    """(1) A lender stops in mid-handoff; (2) a reader is killed; (3) the lender goes on, or dies of it and is started
    again; (4) all requests end as undisturbed; (5) nothing is left. Reports how often the lender died."""
    cluster = tcp_service.cluster
    aborted = 0
    for _ in range(ROUNDS):
        lender = cluster.processes["prefill-0"]
        with Supervisor(cluster) as supervisor, load_in(Phase.PREFILL, cluster, tcp_service.load) as (load, _):
            lender.pause()
            load.until(lambda outcomes: any(o.answer.ids for o in outcomes))
            cluster.processes["decode-0"].kill()
            cluster.wait_state(
                lambda state: all(w.hello.worker_id != "prefill-0" or not w.ready for w in state.workers), BOUND_S
            )
            lender.resume()
            assert_all_equal(load.finish(), tcp_service.expected)
            assert supervisor.error is None
        aborted += sum(restart.aborted for restart in supervisor.restarts)
        tcp_service.assert_healed()
    print(f"{aborted} of {ROUNDS} lenders died of it", file=sys.stderr)
