"""The workers of a lasting cluster on other machines. This machine's record does not have them; only the router knows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pdserve.client import AdminClient, CallFailed
from pdserve.cluster.keeping.order import running_workers
from pdserve.cluster.record import ClusterRecord

DRAIN_TIMEOUT_S: Final = 30.0
LOOK_S: Final = 0.05
Say = Callable[[str], None]


def drain_elsewhere(record: ClusterRecord, dial: Callable[[str], str], say: Say) -> tuple[str, ...]:
    """Tell workers on other machines to drain, through the router. Return what is left there, in words.

    dial: from an address at which the router listens to one that this machine dials. A cluster with a Ray of its own has no
    workers elsewhere, so nothing is left there, whatever the router says.
    """
    facts, router = record.facts, record.router
    if facts is None:
        return ()
    if router is None or not router.admin or not router.process.alive:
        return _unknown(record, "the router, which knows them, does not run") if facts.joined else ()
    here = set(running_workers(record))
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    told: set[str] = set()
    with AdminClient(dial(router.admin), facts.token) as client:
        while True:
            try:
                others = [one.hello for one in client.cluster_state().workers if one.hello.worker_id not in here]
                for hello in others:
                    if hello.worker_id not in told:
                        told.add(hello.worker_id)
                        say(f"draining {hello.worker_id} at {hello.address}")
                        next(iter(client.drain(hello.worker_id, force=True, timeout_s=DRAIN_TIMEOUT_S)), None)
            except CallFailed as exc:
                return _unknown(record, str(exc)) if facts.joined else ()
            if not others or time.monotonic() > deadline:
                return tuple(f"{hello.worker_id} at {hello.address}" for hello in others) if facts.joined else ()
            time.sleep(LOOK_S)


def _unknown(record: ClusterRecord, why: str) -> tuple[str, ...]:
    return (f"workers of other machines, if there are any: {why}; {record.folder} is kept for `pdserve up`, which adopts them",)
