"""Placement: the placer picks a worker by the policies from the registry and the ledger. It decides, and changes nothing but
its turns."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Final, NamedTuple

from pdserve.config import RouterConfig
from pdserve.core.errors import Unavailable
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role, WorkerHello
from pdserve.observe.story import Scores
from router.core.events import LinkId
from router.core.ledger import Ledger, OutputMean
from router.core.live_request import LiveRequest
from router.core.pairs import Pairs
from router.core.policy import filters
from router.core.policy.candidate import Candidate, RequestView
from router.core.policy.decider import Reason, decide
from router.core.policy.picker import pick
from router.core.policy.ranking import BUILT_IN, Rankings
from router.core.registry import Registry, Worker

MAX_SCORES: Final = 16
SUSPECT_SHARE: Final = 0.6
"""The share of `heartbeat_lost_s` after which a silent worker gets nothing new: 3 s of 5 s."""


@dataclass(frozen=True, slots=True)
class Place:
    """The decode worker and the placement that a request gets, and the reason for the placement."""

    worker: Worker
    placement: Placement
    reason: Reason


@dataclass(frozen=True, slots=True)
class Wanted:
    """Decode workers that could serve a request, none of which has room by the estimate."""

    links: tuple[LinkId, ...]


class _Decided(NamedTuple):
    """A decision, and the workers that it was made for: decode workers and prefill workers that hold the request."""

    placement: Placement
    reason: Reason
    decoders: list[Candidate]
    lenders: list[Candidate]


class Placer:
    """Picks workers for requests. Equally good workers of a role are picked in turn."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        ledger: Ledger,
        outputs: OutputMean,
        pairs: Pairs,
        rankings: Rankings = BUILT_IN,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._outputs = outputs
        self._pairs = pairs
        self._rankings = {Role.PREFILL: rankings.prefill, Role.DECODE: rankings.decode}
        self._configured = Placement(config.placement)
        self._colocate_below_tokens = config.colocate_below_tokens
        self._suspect_s = config.heartbeat_lost_s * SUSPECT_SHARE
        self.scores: Scores = ()
        """The candidates of the last pick with their scores, at most `MAX_SCORES`, for stories. Workers that were filtered out
        are not among them."""
        self._turns = dict.fromkeys(Role, 0)  # a shared turn, advancing by two a handoff, would always pick the same of two

    def check(self, request: LiveRequest, *, now_s: float) -> None:
        """Check that linked workers could serve the request as asked. The request may wait for workers that are not ready yet
        and for pairs that are set aside for a while. Raises `Unavailable` when waiting would not help."""
        self._decide(request, now_s, serving=False)

    def decide(self, request: LiveRequest, *, now_s: float) -> tuple[Placement, Reason]:
        """Choose between disaggregated and colocated. Raises `Unavailable` when no ready worker could ever serve the request as
        asked."""
        decided = self._decide(request, now_s, serving=True)
        return decided.placement, decided.reason

    def _decide(self, request: LiveRequest, now_s: float, *, serving: bool) -> _Decided:
        decoders = self._candidates(Role.DECODE, now_s, serving=serving)
        if not decoders:
            raise Unavailable("no decode worker is ready")
        decoders = filters.long_enough(decoders, request.max_len)
        if not decoders:
            raise Unavailable(f"no decode worker takes a request of {request.max_len} tokens (prompt and max_tokens)")
        lenders = self._lenders(request, now_s, serving=serving)
        paired_s = now_s if serving else math.inf
        placement, reason = decide(
            request.asked,
            self._configured,
            prompt_tokens=request.work_len,
            colocate_below_tokens=self._colocate_below_tokens,
            has_prefill=bool(lenders),
            has_pair=any(self._paired(lenders, decoder.link, paired_s) for decoder in decoders),
        )
        return _Decided(placement, reason, decoders, lenders)

    def need_tokens(self, request: LiveRequest) -> int:
        """Return how many tokens of KV the request will probably take on its decode worker."""
        return request.work_len + self._outputs.expect(request.remaining_tokens)

    def place(self, request: LiveRequest, *, now_s: float, kept: Container[LinkId] = ()) -> Place | Wanted:
        """Pick a decode worker and the placement, or return the workers that the request waits for. Workers in `kept` are left
        to other requests.

        A request that may be placed freely is colocated on a decode worker that no KV may go to, rather than wait for a paired
        one: no disaggregated request has a use for that worker. Raises `Unavailable` as `decide` does.
        """
        placement, reason, decoders, lenders = self._decide(request, now_s, serving=True)
        fitting = filters.alive(decoders)
        cut_off: list[Candidate] = []
        if placement is Placement.DISAGGREGATED and len(self._pairs):
            cut_off = [c for c in fitting if not self._paired(lenders, c.link, now_s)]
            fitting = [c for c in fitting if c not in cut_off]
        tries = [(fitting, placement, reason)]
        if reason is Reason.DEFAULT:
            tries.append((cut_off, Placement.COLOCATED, Reason.PAIRS_SET_ASIDE))
        for among, how, why in tries:
            worker = self._roomiest(request, [c for c in among if c.link not in kept])
            if worker is not None:
                return Place(worker, how, why)
        return Wanted(tuple(c.link for among, _, _ in tries for c in among))

    def room_beside(self, kept: Container[LinkId], *, now_s: float) -> bool:
        """Tell whether a decode worker that is not in `kept` might have room."""
        others = [c for c in self._candidates(Role.DECODE, now_s, serving=True) if c.link not in kept]
        return bool(filters.with_room(filters.alive(others), 1))

    def rebind_worker(self, request: LiveRequest, lender: LinkId, *, now_s: float) -> Worker | None:
        """Pick a decode worker that has room now, by the estimate, and may read from `lender`. None: there is no such
        worker."""
        fitting = self._fitting(request, now_s)
        hello = self._hello(lender)
        return self._roomiest(request, [c for c in fitting if self._usable(hello, c.link, now_s)])

    def prefill_worker(self, request: LiveRequest, decode: LinkId, *, now_s: float) -> Worker | None:
        """Pick a prefill worker that takes new work and whose KV may go to that decode worker. A probe has chosen its own.
        None: there is no such worker."""
        if request.probe is not None:
            peer = None if request.probe.prefill is None else self._registry.get(request.probe.prefill)
            return None if peer is None or peer.draining else peer
        lenders = self._paired(self._lenders(request, now_s, serving=True), decode, now_s)
        prompt_tokens = request.work_len
        return self._pick(Role.PREFILL, lenders, RequestView(prompt_tokens, prompt_tokens))

    def suspect(self, worker: Worker, *, now_s: float) -> bool:
        """Tell whether the worker is silent or its engine makes no steps. Such a worker gets nothing new, and may be lost."""
        return self._silent(worker, now_s) or worker.stalled

    def _silent(self, worker: Worker, now_s: float) -> bool:
        return now_s - worker.last_seen_s > self._suspect_s

    def not_ready_reason(self, worker: Worker, *, now_s: float) -> str:
        """Return why the worker gets no requests of clients. Empty: it is ready."""
        if worker.draining:
            return "draining"
        if self._silent(worker, now_s):
            return "silent"
        if worker.stalled:
            return f"its engine has made no step for {worker.load.engine_stalled_s:.1f} s while work waits"
        return "" if worker.readiness.ready else worker.readiness.reason

    def _fitting(self, request: LiveRequest, now_s: float) -> list[Candidate]:
        alive = filters.alive(self._candidates(Role.DECODE, now_s, serving=True))
        return filters.long_enough(alive, request.max_len)

    def _roomiest(self, request: LiveRequest, fitting: list[Candidate]) -> Worker | None:
        need = self.need_tokens(request)
        roomy = filters.with_room(fitting, need)
        return self._pick(Role.DECODE, roomy, RequestView(request.work_len, need))

    def _lenders(self, request: LiveRequest, now_s: float, *, serving: bool) -> list[Candidate]:
        alive = [c for c in filters.alive(self._candidates(Role.PREFILL, now_s, serving=serving)) if not c.refused]
        return filters.long_enough(alive, request.work_len + 1)

    def _paired(self, lenders: list[Candidate], decode: LinkId, now_s: float) -> list[Candidate]:
        """Return the lenders whose KV may go to that decode worker."""
        if not len(self._pairs):
            return lenders
        return [c for c in lenders if self._usable(self._hello(c.link), decode, now_s)]

    def _usable(self, prefill: WorkerHello | None, decode: LinkId, now_s: float) -> bool:
        reader = self._hello(decode)
        return prefill is not None and reader is not None and self._pairs.usable(prefill, reader, now_s=now_s)

    def _hello(self, link: LinkId) -> WorkerHello | None:
        worker = self._registry.get(link)
        return None if worker is None else worker.hello

    def _pick(self, role: Role, among: list[Candidate], request: RequestView) -> Worker | None:
        scores = self._rankings[role](among, request)
        picked = pick(among, scores, self._turns[role])
        if picked is None:
            return None
        named = zip(among[:MAX_SCORES], scores, strict=False)
        self.scores = tuple([(worker.hello.worker_id, score) for c, score in named if (worker := self._registry.get(c.link))])
        self._turns[role] += 1
        return self._registry.get(picked.link)

    def _candidates(self, role: Role, now_s: float, *, serving: bool) -> list[Candidate]:
        """Return the workers of a role that serve now. Without `serving`, return all that are linked and do not drain."""
        return [
            Candidate(
                link=worker.link,
                kv_tokens=worker.hello.kv_tokens,
                promised_tokens=self._ledger.charged(worker.link),
                free_slots=worker.hello.max_num_seqs - len(worker.work),
                queued_tokens=worker.queued_tokens,
                max_model_len=worker.hello.max_model_len,
                suspect=self.suspect(worker, now_s=now_s),
                refused=worker.turned_away or worker.refused_blocks is not None,
                claimed=worker.claimed_by is not None,
            )
            for worker in self._registry.of_role(role)
            if (worker.serves if serving else not worker.draining)
        ]
