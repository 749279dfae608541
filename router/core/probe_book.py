"""The book of probes: the decode workers that probes have claimed, and the result of each probe for both of its workers."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import PdserveError
from router.core.events import LinkId
from router.core.live_request import Probe
from router.core.registry import Registry, Worker

BACKOFF_S: Final = 0.5
BACKOFF_MAX_S: Final = 8.0


class ProbeBook:
    """Keeps the claims, and the readiness of workers by the results of their probes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.results = 0
        """The number of probes that have ended. When it grows, a worker may have become ready."""
        self.claims: dict[LinkId, LinkId] = {}
        """The worker whose probe gets the next room, for each claimed decode worker."""

    def claim(self, decode: Worker, claimant: Worker) -> None:
        """Claim the next room on a decode worker. One claim is kept; other claimants try again at the next tick."""
        if decode.claimed_by is None:
            decode.claimed_by = self.claims[decode.link] = claimant.link
            decode.touch()
        claimant.readiness.reason = f"waiting for room on {decode.hello.worker_id} for a KV round trip"

    def unclaim(self, decode: LinkId) -> None:
        """End the claim on a decode worker."""
        del self.claims[decode]
        worker = self._registry.get(decode)
        if worker is not None:
            worker.claimed_by = None
            worker.touch()

    def ended(self, probe: Probe, error: PdserveError | None, now_s: float) -> None:
        """Note the result of a probe for both workers. This is called once for each probe, however it ended. `error` is None
        when KV has passed."""
        self.results += 1
        decode = self._registry.get(probe.decode)
        prefill = None if probe.prefill is None else self._registry.get(probe.prefill)
        no_room = error is not None and decode is not None and decode.refused_blocks is not None
        for worker, peer in ((decode, prefill), (prefill, decode)):
            if worker is not None:
                worker.readiness.probes -= 1
                if no_room and not worker.readiness.ready and decode is not None:
                    self.claim(decode, worker)
                else:
                    drains = peer is not None and peer.draining  # the result says nothing about the worker
                    _note(worker, _who(probe, peer), error, now_s, counts=not drains)

    def check_invariants(self) -> None:
        """Assert that each worker's claim is in the book, and that a worker that is not ready has a reason."""
        for worker in self._registry:
            assert worker.readiness.ready == (not worker.readiness.reason)
            assert worker.readiness.ready or worker.link in self._registry.unready
            assert worker.claimed_by == self.claims.get(worker.link)


def _note(worker: Worker, peer: str, error: PdserveError | None, now_s: float, *, counts: bool) -> None:
    """Note the result of a probe for one of its workers. After an error that does not count, the next probe may start at
    once."""
    readiness = worker.readiness
    if now_s < readiness.out_until_s:
        return  # it was ejected while the probe ran
    if error is None:
        readiness.ready, readiness.reason, readiness.failures = True, "", 0
        worker.touch()
    elif not readiness.ready:
        readiness.reason = f"KV round trip with {peer} failed: {error.message}"
        if not counts:
            return
        readiness.try_after_s = now_s + min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(readiness.failures, 8))
        readiness.failures += 1


def _who(probe: Probe, peer: Worker | None) -> str:
    if probe.prefill is None:
        return "itself"
    return peer.hello.worker_id if peer is not None else "a peer that left"
