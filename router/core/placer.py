"""The placer decides where a request runs: whether its prompt is computed where it is decoded, and on which workers. It changes
no worker and no pool: a `Pick` holds the whole result, and `took` counts the pick once it is used.

The decision between disaggregated and colocated comes first. Rules come before costs: what the client asks for, the settings,
and what the pools can do (`decide`). A request that the rules leave free is weighed by predicted cost (`weigh`). The request
keeps its decision, which is made again only where workers have come, gone or changed.

Then the policy of the role picks among the workers on its shortlist (`router.core.policy`), so a choice costs the same in a
pool of any size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from pdserve.config import RouterConfig
from pdserve.core.errors import InvalidRequest, Unavailable
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role, VersionRange, used_features
from pdserve.observe.story import Scores
from router.core.events import LinkId
from router.core.forecast import ExpectedOutputs, Transfers
from router.core.health import Health, Pairs
from router.core.live_request import LiveRequest, PlacementDecision, Reason
from router.core.policy import (
    BUILT_IN,
    Candidate,
    Ranking,
    Rankings,
    RequestView,
    Shortlist,
    Why,
    compute_s,
    draw,
    pick,
    pick_alike,
    prompt_wait_s,
    ttft_s,
    uncached_tokens,
    why,
)
from router.core.pools import Ask, Pool, Pools, Sessions
from router.core.prefix_index import Held, PrefixIndex
from router.core.registry import Registry, Worker
from router.core.turns import FIRST, Turn
from router.core.waiting import Kind, newcomer, size_of

MARGIN_S: Final = 0.02
"""A prompt moves to the decode worker only for a larger gain: about one decode step. Predictions leave out steps that run now
and messages, so a smaller gain is noise. Tiny prompts on an idle cluster thus stay disaggregated, and decisions do not flap."""
_NO_PAIR: Final = {
    Reason.PAIRS_SET_ASIDE: "every pair of workers is set aside",
    Reason.VERSIONS_DIFFER: "no prefill worker and decode worker speak a common version (`pdserve status` shows the versions)",
}


def decide(
    asked: Placement | None,
    configured: Placement,
    *,
    prompt_tokens: int,
    colocate_below_tokens: int,
    has_prefill: bool,
    has_pair: bool = True,
    no_pair: Reason = Reason.PAIRS_SET_ASIDE,
) -> tuple[Placement, Reason]:
    """Return disaggregated or colocated, never AUTO. `has_pair`: KV may go from some prefill worker to some decode worker.
    `no_pair` is the reason if it may not.

    Raises `Unavailable` when disaggregation is demanded and there is no prefill worker or no pair.
    """
    explicit = asked is not None and asked is not Placement.AUTO
    wanted = asked if asked is not None else configured
    why = Reason.REQUESTED if explicit else Reason.CONFIGURED
    if wanted is Placement.COLOCATED:
        return Placement.COLOCATED, why
    if wanted is Placement.DISAGGREGATED:
        if not has_prefill:
            raise Unavailable(f"placement is disaggregated ({why.value}) and no prefill worker is ready")
        if not has_pair:
            raise Unavailable(f"placement is disaggregated ({why.value}) and {_NO_PAIR[no_pair]}")
        return Placement.DISAGGREGATED, why
    if not has_prefill:
        return Placement.COLOCATED, Reason.PREFILL_POOL_EMPTY
    if prompt_tokens < colocate_below_tokens:
        return Placement.COLOCATED, Reason.SHORT_PROMPT
    if not has_pair:
        return Placement.COLOCATED, no_pair
    return Placement.DISAGGREGATED, Reason.DEFAULT


def weigh(decoder: Candidate, lender: Candidate, prompt_tokens: int, exposed_s: float | None) -> Reason | None:
    """Return why the decode worker should compute the prompt of `prompt_tokens` itself. None: the prefill worker should, or the
    costs are unknown.

    The cost of each way is the sum of the seconds of the request and of the requests that it delays. Disaggregated: the wait
    and the computation on the prefill worker, and the transfer that the second token waits for (`exposed_s`, None for unknown).
    Colocated: the wait and the computation on the decode worker, and the same computation once more for each sequence that
    decodes there, because all of them stand still for that time. At least one is counted: the worker is for decoding, and
    others will come.
    """
    queue_there_s, compute_there_s = prompt_wait_s(lender), compute_s(lender, prompt_tokens)
    queue_here_s, compute_here_s = prompt_wait_s(decoder), compute_s(decoder, prompt_tokens)
    if exposed_s is None or queue_there_s is None or compute_there_s is None or queue_here_s is None or compute_here_s is None:
        return None
    harm_s = compute_here_s * max(1, decoder.running)
    saved_s = {
        Reason.PREFILL_QUEUE: queue_there_s - queue_here_s,
        Reason.TRANSFER: exposed_s,
        _compute_reason(decoder, lender): compute_there_s - compute_here_s,
    }
    if sum(saved_s.values()) - harm_s <= MARGIN_S:
        return None
    return max(saved_s, key=lambda reason: saved_s[reason])


def _compute_reason(decoder: Candidate, lender: Candidate) -> Reason:
    return Reason.CACHED_SUFFIX if decoder.cached_tokens > lender.cached_tokens else Reason.PREFILL_SLOW


MAX_SCORES: Final = 16
SITTING_OUT: Final = 1
"""This number is added to the seed where chance decides which workers sit out, so that these draws do not depend on the draws
of policies."""
SUSPECT_SHARE: Final = 0.6
"""The share of `heartbeat_lost_s` after which a silent worker gets nothing new: 3 s of 5 s."""
SOONEST: Final = Shortlist(least_loaded=1, holders=1)
"""The number of workers that a forecast compares to find the worker that would compute a prompt the soonest."""

_Usable = Callable[[Worker], bool]
_Way = tuple[_Usable | None, Placement, Reason]
"""A way to place a request, with a function that tells whether a decode worker can be used for it. None: all can."""


class Pick(NamedTuple):
    """A worker for a part of a request, and how it was found."""

    worker: Worker
    why: Why
    scores: Scores = ()
    """The candidates with their scores, at most `MAX_SCORES`, for stories. Workers that were not on the shortlist are not among
    them."""
    cached_tokens: int = 0
    """The tokens of the prompt whose KV the worker probably holds."""
    need_tokens: int = 0
    """The tokens of KV that the request will probably take on a decode worker."""
    placement: Placement = Placement.AUTO
    """Where the prompt is computed, if a decode worker was picked for a new bind."""
    reason: Reason = Reason.DEFAULT
    row: Candidate | None = None
    """The worker as its policy saw it."""


class Placer:
    """Picks workers for requests. Among equally good workers it picks the least recently picked worker."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        pools: Pools,
        outputs: ExpectedOutputs,
        pairs: Pairs,
        index: PrefixIndex,
        health: Health,
        sessions: Sessions,
        rankings: Rankings = BUILT_IN,
        seed: int = 0,
    ) -> None:
        """`seed` is the only source of chance."""
        self._registry = registry
        self._pools = pools
        self._outputs = outputs
        self._pairs = pairs
        self._index = index
        self._health = health
        self._sessions = sessions
        self._seed = seed
        self._rankings = {Role.PREFILL: rankings.prefill, Role.DECODE: rankings.decode}
        self._configured = Placement(config.placement)
        self._colocate_below_tokens = config.colocate_below_tokens
        self._by_cost = config.colocate_by_cost
        self._suspect_s = config.heartbeat_lost_s * SUSPECT_SHARE
        self._walks: dict[Role, tuple[LiveRequest, int, Held | None]] = {}
        """The last walk of each role, with the request and the state of the index that it belongs to."""
        self.transfers = Transfers()
        """The measured cost of handoffs."""
        self.picks: Counter[tuple[Role, str, Why]] = Counter()
        """The picks that were used, by role, policy and reason. Probes and trials are not counted."""
        self.predicted_tokens = dict.fromkeys(Role, 0)
        """The sum of `cached_tokens` of all these picks, by role."""

    # Disaggregated or colocated --------------------------------------------------------------------------------------

    def check(self, request: LiveRequest, *, now_s: float) -> None:
        """Check that linked workers could serve the request as asked. The request may wait for workers that are not ready yet
        and for pairs that are set aside for a while. Raises `Unavailable` when waiting would not help, and `InvalidRequest`
        when two workers are asked for what the engines only serve on one."""
        if (whole := self._whole_by(request)) and self._wants_two(request):
            only = f"the engines serve {whole} only where one worker computes all of it"
            if request.asked is None:
                raise InvalidRequest(
                    f"router.placement is disaggregated, and {only}: leave it out, or set placement to auto or colocated",
                    field=whole,
                )
            raise InvalidRequest(f"disaggregated cannot be had, since {only}: ask for auto or colocated", field="placement")
        try:
            self.decide(request, now_s=now_s)
        except Unavailable:
            self._rule(request, now_s, serving=False)

    def decide(self, request: LiveRequest, *, now_s: float) -> PlacementDecision:
        """Return the decision between disaggregated and colocated, which the request keeps. It is made again where workers have
        changed since. Raises `Unavailable` when no ready worker could ever serve the request as asked."""
        kept, changed = request.decision, self._registry.changed or self._pairs.failures
        if kept is not None and not changed and kept.made == (now_s, self._pools.shifts, request.work_len):
            return kept
        self.note_silence(now_s=now_s)  # otherwise a worker that is heard again would stay out until the next tick
        self._pools.refresh()
        placement, reason = self._rule(request, now_s, serving=True)
        decision = PlacementDecision(placement, reason, (now_s, self._pools.shifts, request.work_len))
        request.decision = None if self._pairs.failures else decision  # a failed pair may be usable again in the same moment
        return decision

    def _rule(self, request: LiveRequest, now_s: float, *, serving: bool) -> tuple[Placement, Reason]:
        """Apply the rules. `serving`: to the workers that serve now; otherwise to the workers that may serve once they are
        ready."""
        pools, prompt_tokens, max_len = self._pools, request.work_len, request.max_len
        if not pools.decode.has(max_len, serving=serving):
            if not pools.decode.has(0, serving=serving):
                raise Unavailable("no decode worker is ready")
            raise Unavailable(f"no decode worker takes a request of {max_len} tokens (prompt and max_tokens)")
        if whole := self._whole_by(request):
            if self._wants_two(request):  # the workers that joined after its check are others
                raise Unavailable(
                    f"placement is disaggregated, and the engines serve {whole} only where one worker computes all"
                )
            return Placement.COLOCATED, Reason.UNDIVIDED
        has_prefill = pools.prefill.heard(prompt_tokens + 1, now_s - self._suspect_s, serving=serving)
        return decide(
            request.asked,
            self._configured,
            prompt_tokens=prompt_tokens,
            colocate_below_tokens=self._colocate_below_tokens,
            has_prefill=has_prefill,
            has_pair=has_prefill and (not self._pairs_differ or self._has_pair(request, now_s, serving=serving)),
            no_pair=self._no_pair,
        )

    def _whole_by(self, request: LiveRequest) -> str:
        """Return the feature for which one worker must compute the whole request. Empty: there is none."""
        used = used_features(request.spec, self._registry.undivided) if self._registry.undivided else ()
        return min(used, default="")

    def _wants_two(self, request: LiveRequest) -> bool:
        """Tell whether two workers must compute the request, by its own word or by the settings."""
        return (self._configured if request.asked is None else request.asked) is Placement.DISAGGREGATED

    def _has_pair(self, request: LiveRequest, now_s: float, *, serving: bool) -> bool:
        """Tell whether KV may go from some prefill worker to some decode worker that are long enough for the request."""
        reached = self._reach(request, now_s, serving=serving)
        tiers = self._pools.decode.fitting(request.max_len)
        readers = (worker for tier in tiers for worker in (tier.serving if serving else tier.known).values())
        return any(map(reached, readers))

    def _reach(self, request: LiveRequest, now_s: float, *, serving: bool = True) -> _Usable:
        """Return a function that tells whether the KV of some prefill worker that is long enough for the request may go to a
        decode worker. Unless pairs have failed, it looks for a prefill worker only once for each kind of decode worker."""
        paired_s = now_s if serving else math.inf
        known: dict[tuple[VersionRange, str], bool] = {}

        def reached(reader: Worker) -> bool:
            kind = reader.hello.pairing
            if kind not in known or self._pairs.failures:
                lenders = self._lenders(request, now_s, serving=serving)
                known[kind] = any(self._pairs.usable(lender.hello, reader.hello, now_s=paired_s) for lender in lenders)
            return known[kind]

        return reached

    def _lenders(self, request: LiveRequest, now_s: float, *, serving: bool) -> Iterator[Worker]:
        """Yield the prefill workers that could compute the request's prompt."""
        for tier in self._pools.prefill.fitting(request.work_len + 1):
            for worker in (tier.serving if serving else tier.known).values():
                if not self._silent(worker, now_s):
                    yield worker

    @property
    def _pairs_differ(self) -> bool:
        """Some prefill worker and some decode worker may not be paired, at present or ever."""
        return self._registry.mixed_peers or bool(self._pairs.failures)

    @property
    def _no_pair(self) -> Reason:
        """The reason why some worker has no partner, if there is such a worker. Failed pairs are the first explanation."""
        return Reason.PAIRS_SET_ASIDE if self._pairs.failures else Reason.VERSIONS_DIFFER

    @property
    def pairs_in_trouble(self) -> bool:
        """Some pair of workers has failed, so time alone may make it usable again."""
        return bool(self._pairs.failures)

    # Decode workers ----------------------------------------------------------------------------------------------------

    def place(self, request: LiveRequest, *, now_s: float, turn: Turn = FIRST) -> Pick | None:
        """Pick a decode worker and the placement. None: no worker that could serve the request has room.

        A worker that is kept for a later turn has room for this request. A request that may be placed freely is colocated on a
        decode worker that no KV may go to, rather than wait for a paired one: no disaggregated request has a use for that
        worker. A sibling goes to the KV of its leader first. Raises `Unavailable` as `decide` does.
        """
        if request.beside is not None and (found := self._beside_leader(request, request.beside, now_s, turn)) is not None:
            return found
        ways, need_tokens = self._ways(request, now_s), self.need_tokens(request)
        for usable, placement, reason in ways:
            ask = Ask(request.max_len, need_tokens, now_s - self._suspect_s, usable, turn)
            found = self._choose(Role.DECODE, request, ask, now_s, local=placement is Placement.COLOCATED)
            if found is not None:
                local = None
                if reason is Reason.DEFAULT and found.row is not None:
                    local = self._local_reason(request, found.row, now_s)
                if local is not None:
                    placement, reason = Placement.COLOCATED, local
                return found._replace(need_tokens=need_tokens, placement=placement, reason=reason)
        return None

    def _beside_leader(self, request: LiveRequest, link: LinkId, now_s: float, turn: Turn) -> Pick | None:
        """Return the place beside the KV of the request's leader, where only the tokens after the last full block are computed.
        None: the leader's worker has left or drains, or has no room."""
        worker = self._registry.get(link)
        if worker is None:
            return None
        self._pools.refresh()
        need_tokens, shared = self.need_tokens(request), shared_tokens(request, worker)
        ask = Ask(request.max_len, need_tokens - shared, now_s - self._suspect_s, None, turn)
        if not self._pools.decode.takes(link, ask):
            return None
        return Pick(worker, Why.LEADER, (), shared, need_tokens, Placement.COLOCATED, Reason.SIBLING)

    def _local_reason(self, request: LiveRequest, reader: Candidate, now_s: float) -> Reason | None:
        """Return why a decode worker should compute the prompt of a request that may be placed freely: few tokens are left of
        it, or that costs less. None: it should not. Rules of the client and of the settings come before that."""
        uncached = uncached_tokens(reader, request.work_len)
        if uncached < self._colocate_below_tokens:
            return Reason.SHORT_PROMPT
        worker = self._registry.get(reader.link)
        if not self._by_cost or not reader.prompt_tokens_per_s or worker is None:
            return None
        lender = self._soonest(Role.PREFILL, request, self._lending(request, now_s))
        exposed_s = self.transfers.exposed_s(uncached * worker.hello.kv_bytes_per_token)
        return None if lender is None else weigh(reader, lender, request.work_len, exposed_s)

    def need_tokens(self, request: LiveRequest) -> int:
        """Return how many tokens of KV the request will probably take on its decode worker."""
        tokens = request.work_len + self._outputs.expect(request)
        held = self._registry.held_tokens
        return min(tokens, held) if held else tokens

    def rebind_worker(self, request: LiveRequest, lender: LinkId, *, now_s: float) -> Pick | None:
        """Pick a decode worker that has room now, by the estimate, and may read from `lender`. None: there is no such
        worker."""
        self._pools.refresh()
        source = self._registry.get(lender)
        if source is None:
            return None

        def reads(worker: Worker) -> bool:
            fresh = worker.hello.worker_id not in request.avoid
            return fresh and self._pairs.usable(source.hello, worker.hello, now_s=now_s)

        need_tokens = self.need_tokens(request)
        ask = Ask(request.max_len, need_tokens, now_s - self._suspect_s, reads)
        found = self._choose(Role.DECODE, request, ask, now_s)
        return None if found is None else found._replace(need_tokens=need_tokens)

    # Requests that wait ------------------------------------------------------------------------------------------------

    def kind_of(self, request: LiveRequest) -> Kind:
        """Return the kind of a waiting request: requests of one kind may be served by the same workers."""
        self._pools.refresh()
        return Kind(
            self._pools.decode.tier_of(request.max_len),
            self._pools.prefill.tier_of(request.work_len + 1),
            request.asked or self._configured,
            request.work_len < self._colocate_below_tokens,
            size_of(self.need_tokens(request)),
            request.avoid,
        )

    def waited_for(self, request: LiveRequest, *, now_s: float) -> list[Worker]:
        """Return the decode workers that could serve a request, whether they have room or not."""
        ways = self._ways(request, now_s)
        workers = (worker for tier in self._pools.decode.fitting(request.max_len) for worker in tier.alive.values())
        return [w for w in workers if not self._silent(w, now_s) and any(usable is None or usable(w) for usable, _, _ in ways)]

    def to_keep(self, request: LiveRequest, *, now_s: float) -> Worker | None:
        """Return the decode worker whose next room a request without room should claim. None: all workers that could serve it
        are claimed."""
        for usable, _, _ in self._ways(request, now_s):
            worker = self._pools.decode.to_keep(Ask(request.max_len, 0, now_s - self._suspect_s, usable))
            if worker is not None:
                return worker
        return None

    def may_keep(self, request: LiveRequest, worker: Worker, *, now_s: float) -> bool:
        """Tell whether a worker that a request has claimed could still serve it."""
        ways = self._ways(request, now_s)
        fits = worker.serves and not self.suspect(worker, now_s=now_s) and worker.hello.max_model_len >= request.max_len
        return fits and any(usable is None or usable(worker) for usable, _, _ in ways)

    # Ways --------------------------------------------------------------------------------------------------------------

    def _ways(self, request: LiveRequest, now_s: float) -> list[_Way]:
        """Return the ways to place a request, the best one first. Raises `Unavailable` as `decide` does."""
        decision = self.decide(request, now_s=now_s)
        ways: list[_Way] = [(None, decision.placement, decision.reason)]
        if decision.placement is Placement.DISAGGREGATED and self._pairs_differ:
            reached = self._reach(request, now_s)
            ways = [(reached, decision.placement, decision.reason)]
            if decision.reason is Reason.DEFAULT:
                ways.append((lambda worker: not reached(worker), Placement.COLOCATED, self._no_pair))
        return self._avoiding(request, ways, now_s) if request.avoid else ways

    def _avoiding(self, request: LiveRequest, ways: list[_Way], now_s: float) -> list[_Way]:
        """Return the same ways without the workers that the request avoids, as long as another serving worker could take the
        request in one of these ways. The request then waits for room on that worker."""

        def fresh(worker: Worker) -> bool:
            return worker.hello.worker_id not in request.avoid

        alive = (worker for tier in self._pools.decode.fitting(request.max_len) for worker in tier.alive.values())
        readers = [worker for worker in alive if fresh(worker) and not self._silent(worker, now_s)]
        if not any(usable is None or usable(worker) for usable, _, _ in ways for worker in readers):
            return ways
        return [(_both(usable, fresh), placement, reason) for usable, placement, reason in ways]

    # Prefill workers ---------------------------------------------------------------------------------------------------

    def prefill_worker(self, request: LiveRequest, decode: LinkId, *, now_s: float) -> Pick | None:
        """Pick a prefill worker that takes new work and whose KV may go to the given decode worker. A probe has chosen its
        prefill worker already. None: there is no such worker."""
        self._pools.refresh()
        if request.probe is not None:
            peer = None if request.probe.prefill is None else self._registry.get(request.probe.prefill)
            return None if peer is None or peer.draining else Pick(peer, Why.PROBE)
        reader = self._registry.get(decode)
        if reader is None:
            return None

        usable: _Usable | None = None
        if self._pairs_differ:
            usable = lambda worker: self._pairs.usable(worker.hello, reader.hello, now_s=now_s)  # noqa: E731
        ask = Ask(request.work_len + 1, 0, now_s - self._suspect_s, usable)
        found = None
        if request.avoid:
            others = _both(usable, lambda worker: worker.hello.worker_id not in request.avoid)
            found = self._choose(Role.PREFILL, request, ask._replace(usable=others), now_s)
        return found or self._choose(Role.PREFILL, request, ask, now_s)

    # Forecasts ---------------------------------------------------------------------------------------------------------

    def outlook(self, request: LiveRequest, *, now_s: float) -> tuple[Candidate | None, bool]:
        """Return the worker that would probably compute the prompt of a new request as things are now, and whether some decode
        worker would take the request at once. None: no worker could serve the request now, or the times are unknown. The method
        picks no worker: the policy may choose another worker, and a refused request changes no turn."""
        try:
            decision = self.decide(request, now_s=now_s)
        except Unavailable:
            return None, False
        ask = Ask(request.max_len, self.need_tokens(request), now_s - self._suspect_s, None, newcomer(request))
        reader = self._soonest(Role.DECODE, request, ask)
        local = decision.placement is Placement.COLOCATED
        if reader is not None and decision.reason is Reason.DEFAULT:
            local = self._local_reason(request, reader, now_s) is not None
        computer = reader
        if not local:
            computer = self._soonest(Role.PREFILL, request, self._lending(request, now_s))
        elif reader is None:  # one of the workers for whose room the request would wait
            workers = (worker for tier in self._pools.decode.fitting(request.max_len) for worker in tier.alive.values())
            computer = next((self._row(request, worker.link, Role.DECODE) for worker in workers), None)
        return computer, reader is not None

    def _lending(self, request: LiveRequest, now_s: float) -> Ask:
        """Describe the prefill workers that could compute the prompt."""
        return Ask(request.work_len + 1, 0, now_s - self._suspect_s)

    def _soonest(self, role: Role, request: LiveRequest, ask: Ask) -> Candidate | None:
        """Return the worker of a role that would compute the prompt the soonest, as far as the rates are known. Workers without
        a rate come last, by their load. None: no worker may take the request."""
        held = self._held(role, request)
        near = [] if held is None else held.longest(SOONEST.holders)
        best: tuple[tuple[bool, float, float], Candidate] | None = None
        for link in self._pools.by_role[role].shortlist(SOONEST, ask, near, 0):
            row = self._row(request, link, role)
            soon_s = ttft_s(row, request.work_len)
            order = (soon_s is None, soon_s or 0.0, row.load)
            if best is None or order < best[0]:
                best = order, row
        return None if best is None else best[1]

    # One choice --------------------------------------------------------------------------------------------------------

    def _choose(self, role: Role, request: LiveRequest, ask: Ask, now_s: float, *, local: bool = False) -> Pick | None:
        """Let the policy of a role pick one of the workers that `ask` describes. None: there is none. `local`: the decode
        worker computes the prompt."""
        pool, ranking = self._pools.by_role[role], self._rankings[role]
        which = ranking.shortlist
        held = self._held(role, request)
        session = self._sessions.last_turn(request, role) if request.session_id else None
        near = [] if held is None else held.longest(which.holders)
        if session is not None and which.session:
            near.append(session)
        work_len = request.work_len
        view = RequestView(work_len, ask.kv_tokens or work_len, *_targets(request, role, now_s, local))
        links = self._shortlist(pool, ranking, request, ask, near, now_s)
        if not links:
            return None
        if held is not None or session is not None or which.drawn or which.everyone:
            rows = [self._row(request, link, role, ranking, session) for link in links]
        else:
            rows = [pool.row(link) for link in links]
        scores = ranking.scores(rows, view)
        picked = pick(rows, scores)
        if picked is None:
            return None
        shown = tuple(zip(pool.names(links[:MAX_SCORES]), scores, strict=False))
        numerics = self._preferred_numerics(role, request, now_s, local)
        if numerics and pool.worker(picked.link).hello.numerics != numerics:
            usable = _both(ask.usable, lambda worker: worker.account is None or not worker.account.handicap(now_s))
            others = pool.alike(numerics, ask._replace(usable=usable), near, picked.load)
            rows = [picked, *(self._row(request, link, role, ranking, session) for link in others)]
            picked = pick_alike(rows, ranking.scores(rows, view))
        reason = why(picked, which)
        return Pick(pool.worker(picked.link), reason, shown, picked.cached_tokens, row=picked)

    def _preferred_numerics(self, role: Role, request: LiveRequest, now_s: float, local: bool) -> str:
        """Return the numerics of the worker that a request should get among workers that are equally good. Those are the
        numerics of the workers that have computed it so far. At first they are those of the prefill worker whose turn it is.
        Empty: all numerics are as good."""
        if not self._registry.mixed_numerics or not request.exact:
            return ""
        if request.numerics or local or role is Role.PREFILL:
            return request.numerics
        lender = self._choose(Role.PREFILL, request, self._lending(request, now_s), now_s)
        return "" if lender is None else lender.worker.hello.numerics

    def took(self, found: Pick) -> None:
        """Count a pick that is used: the worker has had its turn."""
        if found.why is not Why.PROBE and found.why is not Why.ALONE:
            role = found.worker.hello.role
            self.predicted_tokens[role] += found.cached_tokens
            self.picks[role, self._rankings[role].name, found.why] += 1
            self._pools.by_role[role].picked(found.worker)

    def _shortlist(
        self, pool: Pool, ranking: Ranking, request: LiveRequest, ask: Ask, near: Sequence[LinkId], now_s: float
    ) -> list[LinkId]:
        """Return the candidates of a policy. Workers with a handicap sit out all but a share of the picks while another worker
        takes the request, and all of them if the request has failed elsewhere. So recent failures weigh the same under every
        policy, also under one that looks at no load, and no order of a pool depends on them."""
        if now_s < self._health.handicaps_until_s:
            seed, number, again = self._seed + SITTING_OUT, pool.picks + 1, bool(request.avoid)

            def takes_part(worker: Worker) -> bool:
                handicap = 0.0 if worker.account is None else worker.account.handicap(now_s)
                return not handicap or (not again and draw(seed, number, worker.link) * (1.0 + handicap) < 1.0)

            links = pool.shortlist(ranking.shortlist, ask._replace(usable=_both(ask.usable, takes_part)), near, self._seed)
            if links:
                return links
        return pool.shortlist(ranking.shortlist, ask, near, self._seed)

    def _row(
        self, request: LiveRequest, link: LinkId, role: Role, ranking: Ranking | None = None, session: LinkId | None = None
    ) -> Candidate:
        """Return a worker's row with the tokens of the prompt that it holds, and with the fields that a policy sees of the
        request."""
        pool, held = self._pools.by_role[role], self._held(role, request)
        blocks = 0 if held is None else held.blocks(link)
        row = pool.row(link)
        if blocks:
            row = row._replace(cached_tokens=min(blocks * pool.worker(link).hello.block_size, request.work_len - 1))
        if link == session:
            row = row._replace(session=True)
        if ranking is not None and (ranking.shortlist.drawn or ranking.shortlist.everyone):
            row = row._replace(draw=draw(self._seed, pool.picks + 1, link))
        return row

    def _held(self, role: Role, request: LiveRequest) -> Held | None:
        """Return how much of the request's prompt each worker of a role holds. One event asks for it several times. None: no
        worker holds anything of it, or the keys of the prompt are unknown."""
        if not request.prefix_keys:
            return None
        walk = self._walks.get(role)
        if walk is None or walk[0] is not request or walk[1] != self._index.changes:
            held = self._index.walk(request.prefix_keys, role)
            walk = self._walks[role] = request, self._index.changes, held or None
        return walk[2]

    # Workers that get nothing --------------------------------------------------------------------------------------------

    def suspect(self, worker: Worker, *, now_s: float) -> bool:
        """Tell whether the worker is silent or its engine makes no steps. Such a worker gets nothing new, and may be lost."""
        return self._silent(worker, now_s) or worker.stalled

    def note_silence(self, *, now_s: float) -> None:
        """Take the workers that have become silent out of the pools."""
        for worker in self._registry.silent_since(now_s - self._suspect_s):
            if not worker.silent:
                worker.silent = True
                worker.touch()

    def _silent(self, worker: Worker, now_s: float) -> bool:
        return worker.last_seen_s < now_s - self._suspect_s

    def not_ready_reason(self, worker: Worker, *, now_s: float) -> str:
        """Return why the worker gets no requests of clients. Empty: it is ready."""
        if worker.draining:
            return "draining"
        if self._silent(worker, now_s):
            return "silent"
        if worker.stalled:
            return f"its engine has made no step for {worker.load.engine_stalled_s:.1f} s while work waits"
        left_s = worker.readiness.out_until_s - now_s
        more = f"; it is tried again in {left_s:.0f} s" if left_s > 0 else ""
        return "" if worker.readiness.ready else worker.readiness.reason + more


def _both(one: _Usable | None, other: _Usable) -> _Usable:
    """Return a function that tells whether both functions find a worker usable."""
    return other if one is None else lambda worker: one(worker) and other(worker)


def shared_tokens(request: LiveRequest, worker: Worker) -> int:
    """Return the tokens of the blocks that a sibling shares with its leader: all full blocks of the prompt before its last
    token, which is always computed."""
    block_size = worker.hello.block_size
    return (request.work_len - 1) // block_size * block_size


def _targets(request: LiveRequest, role: Role, now_s: float, local: bool) -> tuple[float | None, float | None]:
    """Return the time that is left for the first token, and the target for the time between tokens. None: there is no such
    target, or a worker of the role does not decide about it."""
    target_s, tpot_s = request.slo.ttft_s, request.slo.tpot_s
    if role is Role.PREFILL:
        tpot_s = None
    if target_s is None or (role is Role.DECODE and not local):
        return None, tpot_s
    return request.times.arrived_s + target_s - now_s, tpot_s
