"""Probes: a worker gets requests of clients only after KV has passed through it since it dialled.

A probe is a tiny request that the router makes itself. It goes from a prefill worker to a decode worker in the same way as
every request: bind, prefill, attach, pull, commit, first decoded token. When that token comes, both workers are ready. A decode
worker that has no prefill worker, or is set aside from all of them, is probed alone, because it can serve colocated requests. A
prefill worker without a decode worker stays not ready. A failed probe is repeated with the next peer, later each time. A decode
worker's peers include the worker itself, so that a prefill worker which is too busy to answer does not keep it out.

A probe needs room on a decode worker, and clients leave none: they refill each slot in the same event. So a probe that finds no
room claims the worker. Clients get nothing there until the next room has gone to the probe.

A pair is in doubt after a request ended and its computed KV had not arrived. This alone is no evidence against the path between
the two workers, so the pair is probed. A probe lives longer than a lender's answer or a read may take, so it finds a broken
path.
"""

from __future__ import annotations

from typing import Final

from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.worker import Role, WorkerHello, shown_digest
from router.core.dispatcher import Dispatcher
from router.core.events import Effects, LinkId, Submit
from router.core.health import Pairs
from router.core.live_request import LiveRequest, Probe, Reason
from router.core.placer import Pick, Placer
from router.core.policy import Why
from router.core.probe_book import ProbeBook
from router.core.registry import NOT_YET_PROBED, Registry, Worker
from router.core.requests import Requests

DEADLINE_S: Final = 10.0
"""The time that a probe may take. A round trip takes milliseconds, but the first round trip of a process waits for connections,
kernels and a running step."""
PRIORITY: Final = 1000
"""Clients may ask for at most 100. This is so far above that no client's request comes before a probe by having waited."""


class Probes:
    """Starts probes."""

    def __init__(
        self,
        registry: Registry,
        requests: Requests,
        dispatcher: Dispatcher,
        placer: Placer,
        pairs: Pairs,
        book: ProbeBook,
        *,
        enabled: bool,
    ) -> None:
        self._registry = registry
        self._requests = requests
        self._dispatcher = dispatcher
        self._placer = placer
        self._pairs = pairs
        self._enabled = enabled
        self._book = book
        self._count = 0

    def start_due(self, now_s: float) -> Effects:
        """Probe the workers that are not ready and may be tried now, and the pairs in doubt. A worker that joined is tried at
        once. When probes are disabled, every worker is ready."""
        for worker in list(self._registry.unready.values()):
            readiness = worker.readiness
            if readiness.ready:
                del self._registry.unready[worker.link]
            elif now_s < readiness.out_until_s:
                continue
            elif not self._enabled:
                readiness.ready, readiness.reason = True, ""
                worker.touch()
            elif not readiness.probes and not worker.draining and now_s >= readiness.try_after_s:
                yield from self._try(worker, now_s)
        for prefill, decode in self._pairs.in_doubt():
            if self._enabled:
                yield from self._settle_doubt(prefill, decode, now_s)
            else:
                self._pairs.forget_doubt(prefill, decode)

    def start_claimed(self, now_s: float) -> Effects:
        """Start each claimed probe whose decode worker has room now, before other requests get that room."""
        for link, claimant in list(self._book.claims.items()):
            decode, worker = self._registry.get(link), self._registry.get(claimant)
            if decode is None or worker is None or worker.readiness.ready or worker.draining or decode.draining:
                self._book.unclaim(link)
            elif decode.has_room and not worker.readiness.probes:
                self._book.unclaim(link)
                yield from self._start(decode, None if worker is decode else worker, now_s)

    def _try(self, worker: Worker, now_s: float) -> Effects:
        peer = self._peer(worker, now_s)
        if worker.hello.role is Role.DECODE:
            yield from self._start_or_claim(worker, peer, worker, now_s)
        elif peer is not None:
            yield from self._start_or_claim(peer, worker, worker, now_s)
        elif worker.readiness.reason.startswith(NOT_YET_PROBED):
            worker.readiness.reason = f"{NOT_YET_PROBED}: {self._no_reader(worker)}"

    def _no_reader(self, prefill: Worker) -> str:
        """Return why there is no decode worker to probe a prefill worker with."""
        readers = self._registry.of_role(Role.DECODE)
        if not readers or any(prefill.hello.may_pair(reader.hello) for reader in readers):
            return "there is no decode worker"
        if any(prefill.hello.peer_versions.common(reader.hello.peer_versions) is not None for reader in readers):
            return f"no decode worker has weights of its digest ({shown_digest(prefill.hello.model_digest)})"
        return f"no decode worker speaks a version of its protocol between workers ({prefill.hello.peer_versions})"

    def _start_or_claim(self, decode: Worker, prefill: Worker | None, claimant: Worker, now_s: float) -> Effects:
        if decode.has_room:
            yield from self._start(decode, prefill, now_s)
        else:
            self._book.claim(decode, claimant)

    def _peer(self, worker: Worker, now_s: float) -> Worker | None:
        """Pick a worker of the other role to probe with. Decode workers with room come first, then workers that are ready;
        after each failure the next peer is picked. None: the decode worker is to be probed alone, which is the last choice of
        each round, or the prefill worker has no peer."""
        decodes = worker.hello.role is Role.DECODE
        others = self._registry.of_role(Role.PREFILL if decodes else Role.DECODE)
        found = [other for other in others if self._may_pair(worker, other, now_s)]
        found.sort(key=lambda peer: (not decodes and not peer.has_room, not peer.readiness.ready))
        peers: list[Worker | None] = [*found, None] if decodes else [*found]
        return peers[worker.readiness.failures % len(peers)] if peers else None

    def _settle_doubt(self, prefill: WorkerHello, decode: WorkerHello, now_s: float) -> Effects:
        """Probe a pair in doubt once both workers serve, no other probe runs on them, and the decode worker has room. The doubt
        ends when one of them is gone."""
        lender, reader = self._registry.find(prefill.worker_id), self._registry.find(decode.worker_id)
        if lender is None or reader is None or (lender.hello, reader.hello) != (prefill, decode):
            self._pairs.forget_doubt(prefill, decode)
        elif (
            reader.has_room and reader.serves and lender.serves and not reader.readiness.probes and not lender.readiness.probes
        ):
            self._pairs.forget_doubt(prefill, decode)
            yield from self._start(reader, lender, now_s)

    def _may_pair(self, worker: Worker, other: Worker, now_s: float) -> bool:
        out = now_s < other.readiness.out_until_s
        if out or other.draining or other.turned_away or self._placer.suspect(other, now_s=now_s):
            return False
        decode, prefill = (worker, other) if worker.hello.role is Role.DECODE else (other, worker)
        return self._pairs.usable(prefill.hello, decode.hello, now_s=now_s)

    def _start(self, decode: Worker, prefill: Worker | None, now_s: float) -> Effects:
        longest = decode.hello.max_model_len - 2
        if prefill is not None:
            longest = min(longest, prefill.hello.max_model_len - 1)
        probe = Probe(decode.link, None if prefill is None else prefill.link)
        request = self._make(max(1, min(decode.hello.block_size + 1, longest)), probe, now_s)
        for worker in (decode, prefill):
            if worker is not None:
                worker.readiness.probes += 1
        self._requests.add(request)
        placement = Placement.COLOCATED if prefill is None else Placement.DISAGGREGATED
        need_tokens = self._placer.need_tokens(request)
        pick = Pick(decode, Why.PROBE, (), 0, need_tokens, placement, Reason.REQUESTED)
        yield from self._requests.alone(request, self._bind(request, pick, now_s), now_s)

    def _bind(self, request: LiveRequest, pick: Pick, now_s: float) -> Effects:
        yield self._dispatcher.bind(request, pick, now_s)

    def _make(self, prompt_len: int, probe: Probe, now_s: float) -> LiveRequest:
        """Make the request of a probe. Its prompt is one full block and one token of the next block, if both workers can hold
        two blocks: the second token is right only if both blocks arrive."""
        self._count += 1
        submit = Submit(
            request_id=RequestId(f"probe-\0{self._count}"),  # never a client's id, which is printable
            spec=RequestSpec((0,) * prompt_len, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), PRIORITY),
            arrived_s=now_s,
            deadline_s=now_s + DEADLINE_S,
        )
        return self._requests.make(submit, probe)

    def check_invariants(self) -> None:
        """Assert that each worker knows how many probes run with it at either end."""
        running: dict[LinkId, int] = {}
        for request in self._requests.probes():
            assert request.probe is not None
            for link in (request.probe.decode, request.probe.prefill):
                if link is not None:
                    running[link] = running.get(link, 0) + 1
        for worker in self._registry:
            assert worker.readiness.probes == running.get(worker.link, 0)
