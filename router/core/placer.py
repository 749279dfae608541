"""Placement: the placer picks a worker by the policies from the pools. It decides, and changes nothing but the turns of
workers.

A choice looks at a shortlist (`router.core.policy`), so it costs the same in a pool of any size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.errors import Unavailable
from pdserve.core.ids import WorkerId
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role, VersionRange
from pdserve.observe.story import Scores
from router.core.events import LinkId
from router.core.forecast import ExpectedOutputs, Outlook, Transfers
from router.core.health import Health
from router.core.live_request import LiveRequest
from router.core.pairs import Pairs
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
    prompt_wait_s,
    ttft_s,
    uncached_tokens,
    why,
)
from router.core.pools import Ask, Pool, Pools
from router.core.prefix_index import Held, PrefixIndex
from router.core.registry import Registry, Worker
from router.core.turns import FIRST, Turn
from router.core.waiting import Kind, newcomer, size_of

# The decision where the prompt is computed -----------------------------------------------------------------------
#
# The decision where a request's prompt is computed, and the reason for it. Metrics count the reasons.
#
# The rules come first: what the client asks for, the settings, and what the pools can do (`decide`). A request that the rules
# leave free is weighed by predicted cost (`weigh`).


MARGIN_S: Final = 0.02
"""A prompt moves to the decode worker only for a larger gain: about one decode step. Predictions leave out steps that run now
and messages, so a smaller gain is noise. Tiny prompts on an idle cluster thus stay disaggregated, and decisions do not flap."""


class Reason(Enum):
    """The reason for a placement, as reports and metrics name it."""

    REQUESTED = "requested"
    CONFIGURED = "configured"
    PREFILL_POOL_EMPTY = "prefill_pool_empty"
    PAIRS_SET_ASIDE = "pairs_set_aside"
    VERSIONS_DIFFER = "versions_differ"
    """No two workers speak a common version of the protocol between workers."""
    SHORT_PROMPT = "short_prompt"
    PREFILL_QUEUE = "prefill_queue"
    """The prompt would wait too long on the prefill worker."""
    PREFILL_SLOW = "prefill_slow"
    """The prefill worker computes too slowly."""
    CACHED_SUFFIX = "cached_suffix"
    """The decode worker has the KV of so much of the prompt that it soon computes the rest."""
    SIBLING = "sibling"
    """The decode worker has the KV of the request's leader, which has the same prompt."""
    TRANSFER = "transfer"
    """The KV would take too long to move."""
    SUSPECT = "suspect"
    """Workers died while they computed the request, so one decode worker computes all of it, and nothing else."""
    DEFAULT = "default"


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

    The cost of each way is in seconds, of the request and of those that it delays. Disaggregated: the wait and the computation
    on the prefill worker, and the transfer that the second token waits for (`exposed_s`, None for unknown). Colocated: the wait
    and the computation on the decode worker, and the same computation once more for each sequence that decodes there, because
    all of them stand still for that time. At least one is counted: the worker is for decoding, and others will come.
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


# The scout -------------------------------------------------------------------------------------------------------
#
# The scout tells what workers would take for a request. It picks nothing.


SOONEST: Final = Shortlist(least_loaded=1, holders=1)
"""The workers among which a forecast looks for the one that would compute a prompt the soonest."""


class Scout:
    """Looks at single workers for single requests. The pools must be up to date."""

    def __init__(self, config: RouterConfig, registry: Registry, pools: Pools, index: PrefixIndex) -> None:
        self.transfers = Transfers()
        """The measured cost of handoffs."""
        self._registry = registry
        self._pools = pools
        self._index = index
        self._walks: dict[Role, tuple[LiveRequest, int, Held]] = {}
        """The last walk of each role, with the request and the state of the index that it belongs to."""
        self._below_tokens = config.colocate_below_tokens
        self._by_cost = config.colocate_by_cost

    def soonest(self, role: Role, request: LiveRequest, ask: Ask) -> Candidate | None:
        """Return the worker of a role that would compute the prompt the soonest, as far as anybody knows. None: no worker may
        take the request."""
        held = self.held(role, request)
        near = [] if held is None else held.longest(SOONEST.holders)
        links = self._pools.of(role).shortlist(SOONEST, ask, near, 0)
        return min(self._rows(role, request, links, held), key=lambda row: _order(row, request.work_len), default=None)

    def row(self, request: LiveRequest, worker: Worker) -> Candidate:
        """Return the row of a worker, with what it holds of the request's prompt."""
        role = worker.hello.role
        return self._rows(role, request, [worker.link], self.held(role, request))[0]

    def local_reason(self, request: LiveRequest, reader: Candidate, lending: Ask) -> Reason | None:
        """Return why a decode worker should compute the prompt of a request that may be placed freely. None: it should not.
        `lending` describes the prefill workers that could compute it instead."""
        uncached = uncached_tokens(reader, request.work_len)
        if uncached < self._below_tokens:
            return Reason.SHORT_PROMPT
        worker = self._registry.get(reader.link)
        if not self._by_cost or not reader.prompt_tokens_per_s or worker is None:
            return None
        lender = self.soonest(Role.PREFILL, request, lending)
        exposed_s = self.transfers.exposed_s(uncached * worker.hello.kv_bytes_per_token)
        return None if lender is None else weigh(reader, lender, request.work_len, exposed_s)

    def with_cached(self, row: Candidate, request: LiveRequest, held: Held | None) -> Candidate:
        """Return a row with the tokens of the request's prompt that the worker holds."""
        blocks = 0 if held is None else held.blocks(row.link)
        worker = self._registry.get(row.link) if blocks else None
        if worker is None:
            return row
        return row._replace(cached_tokens=min(blocks * worker.hello.block_size, request.work_len - 1))

    def held(self, role: Role, request: LiveRequest) -> Held | None:
        """Return who of a role holds which part of the request's prompt. One event asks for it several times. None: the keys of
        the prompt are unknown."""
        if not request.prefix_keys:
            return None
        walk = self._walks.get(role)
        if walk is None or walk[0] is not request or walk[1] != self._index.changes:
            walk = self._walks[role] = request, self._index.changes, self._index.walk(request.prefix_keys, role)
        return walk[2]

    def _rows(self, role: Role, request: LiveRequest, links: Iterable[LinkId], held: Held | None) -> list[Candidate]:
        pool = self._pools.of(role)
        return [self.with_cached(pool.row(link), request, held) for link in links]


def _order(row: Candidate, prompt_tokens: int) -> tuple[bool, float, float]:
    """Sort workers by their predicted TTFT. Those without a rate come last, by their load."""
    soon_s = ttft_s(row, prompt_tokens)
    return soon_s is None, soon_s or 0.0, row.load


# The placer ------------------------------------------------------------------------------------------------------


MAX_SCORES: Final = 16
SITTING_OUT: Final = 1
"""This is added to the seed where chance decides who sits out, so that it does not depend on the draws of policies."""
SUSPECT_SHARE: Final = 0.6
"""The share of `heartbeat_lost_s` after which a silent worker gets nothing new: 3 s of 5 s."""


@dataclass(frozen=True, slots=True)
class Place:
    """The decode worker and the placement that a request gets, and the reason for the placement."""

    worker: Worker
    placement: Placement
    reason: Reason


_Usable = Callable[[Worker], bool]


class Placer:
    """Picks workers for requests. Among equally good ones it picks the one that was picked the longest ago."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        pools: Pools,
        outputs: ExpectedOutputs,
        pairs: Pairs,
        index: PrefixIndex,
        health: Health,
        rankings: Rankings = BUILT_IN,
        seed: int = 0,
    ) -> None:
        """`seed` is the only source of chance."""
        self._registry = registry
        self._pools = pools
        self._outputs = outputs
        self._pairs = pairs
        self._health = health
        self._seed = seed
        self._rankings = {Role.PREFILL: rankings.prefill, Role.DECODE: rankings.decode}
        self._configured = Placement(config.placement)
        self._colocate_below_tokens = config.colocate_below_tokens
        self._suspect_s = config.heartbeat_lost_s * SUSPECT_SHARE
        self.scout = Scout(config, registry, pools, index)
        self.scores: Scores = ()
        """The candidates of the last pick with their scores, at most `MAX_SCORES`, for stories. Workers that were not on the
        shortlist are not among them."""
        self.why = Why.PROBE
        """The reason of the last pick."""
        self.cached_tokens = 0
        """The tokens of the prompt whose KV the last pick probably holds."""
        self.picks: Counter[tuple[Role, str, Why]] = Counter()
        """The picks by role, policy and reason. Probes are not counted."""
        self.predicted_tokens = dict.fromkeys(Role, 0)
        """The sum of `cached_tokens` of all picks, by role."""
        self._decided: tuple[tuple[LiveRequest, int, float, int], tuple[Placement, Reason]] | None = None
        """The last decision with all that it depended on. One event asks for it several times."""
        self.last_turn: Callable[[LiveRequest, Role], LinkId | None] = lambda request, role: None
        """Returns the worker that had the last turn of the request's session. None: the session has had none."""

    def check(self, request: LiveRequest, *, now_s: float) -> None:
        """Check that linked workers could serve the request as asked. The request may wait for workers that are not ready yet
        and for pairs that are set aside for a while. Raises `Unavailable` when waiting would not help."""
        try:
            self._decide(request, now_s, serving=True)  # who can be served now needs no wait, and is asked about again at once
        except Unavailable:
            self._decide(request, now_s, serving=False)

    def decide(self, request: LiveRequest, *, now_s: float) -> tuple[Placement, Reason]:
        """Choose between disaggregated and colocated. Raises `Unavailable` when no ready worker could ever serve the request as
        asked."""
        return self._decide(request, now_s, serving=True)

    def _decide(self, request: LiveRequest, now_s: float, *, serving: bool) -> tuple[Placement, Reason]:
        self.note_silence(now_s=now_s)  # else nobody would notice that a worker is heard again before the next tick
        self._pools.refresh()
        if not serving or self.pairs_in_trouble:
            return self._decide_anew(request, now_s, serving=serving)
        mark = request, request.work_len, now_s, self._pools.shifts
        if self._decided is None or self._decided[0] != mark:
            self._decided = mark, self._decide_anew(request, now_s, serving=True)
        return self._decided[1]

    def _decide_anew(self, request: LiveRequest, now_s: float, *, serving: bool) -> tuple[Placement, Reason]:
        if not self._pools.decode.has(request.max_len, serving=serving):
            if not self._pools.decode.has(0, serving=serving):
                raise Unavailable("no decode worker is ready")
            raise Unavailable(f"no decode worker takes a request of {request.max_len} tokens (prompt and max_tokens)")
        has_prefill = self._pools.prefill.heard(request.work_len + 1, now_s - self._suspect_s, serving=serving)
        return decide(
            request.asked,
            self._configured,
            prompt_tokens=request.work_len,
            colocate_below_tokens=self._colocate_below_tokens,
            has_prefill=has_prefill,
            has_pair=has_prefill and self._has_pair(request, now_s, serving=serving),
            no_pair=self._no_pair,
        )

    def _has_pair(self, request: LiveRequest, now_s: float, *, serving: bool) -> bool:
        """Tell whether KV may go from some prefill worker to some decode worker that are long enough for the request."""
        if not self._pairs_differ:
            return True
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
            if kind not in known or len(self._pairs):
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

    def need_tokens(self, request: LiveRequest) -> int:
        """Return how many tokens of KV the request will probably take on its decode worker."""
        tokens = request.work_len + self._outputs.expect(request)
        held = self._registry.held_tokens
        return min(tokens, held) if held else tokens

    @property
    def _pairs_differ(self) -> bool:
        """Some prefill worker and some decode worker may not be paired, at present or ever."""
        return len(self._pairs) > 0 or self._registry.mixed_peers

    @property
    def _no_pair(self) -> Reason:
        """The reason why some worker has no partner, if one has none. Pairs that have failed explain it first."""
        return Reason.PAIRS_SET_ASIDE if len(self._pairs) else Reason.VERSIONS_DIFFER

    @property
    def pairs_in_trouble(self) -> bool:
        """Some pair of workers has failed, so time alone may make it usable again."""
        return len(self._pairs) > 0

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

    def place(self, request: LiveRequest, *, now_s: float, turn: Turn = FIRST) -> Place | None:
        """Pick a decode worker and the placement. None: no worker that could serve the request has room.

        A worker that is kept for a later turn has room for this request. A request that may be placed freely is colocated on a
        decode worker that no KV may go to, rather than wait for a paired one: no disaggregated request has a use for that
        worker. A sibling goes to the KV of its leader first. Raises `Unavailable` as `decide` does.
        """
        if request.beside is not None and (place := self._beside_leader(request, request.beside, now_s, turn)) is not None:
            return place
        placement, reason = self._decide(request, now_s, serving=True)
        need = self.need_tokens(request)
        for usable, how, because in self._tries(request, placement, reason, now_s):
            ask = Ask(request.max_len, need, self._heard_and(usable, now_s), turn)
            picked = self._choose(Role.DECODE, request, ask, now_s, local=how is Placement.COLOCATED)
            if picked is not None:
                return self._weighed(request, Place(picked[0], how, because), picked[1], now_s)
        return None

    def _beside_leader(self, request: LiveRequest, link: LinkId, now_s: float, turn: Turn) -> Place | None:
        """Return the place beside the KV of the request's leader, where only what follows the last full block is computed.
        None: that worker has left or drains, or has no room."""
        worker = self._registry.get(link)
        if worker is None:
            return None
        self._pools.refresh()
        pool, shared = self._pools.decode, shared_tokens(request, worker)
        if not pool.takes(link, Ask(request.max_len, self.need_tokens(request) - shared, self._heard_and(None, now_s), turn)):
            return None
        self.scores, self.why, self.cached_tokens = (), Why.LEADER, shared
        self.predicted_tokens[Role.DECODE] += shared
        self.picks[Role.DECODE, self._rankings[Role.DECODE].name, self.why] += 1
        pool.picked(worker)
        return Place(worker, Placement.COLOCATED, Reason.SIBLING)

    def _weighed(self, request: LiveRequest, place: Place, row: Candidate, now_s: float) -> Place:
        """Let the decode worker compute the prompt itself where few tokens are left of it, or where that costs less. Rules of
        the client and of the settings come before that."""
        if place.reason is not Reason.DEFAULT:
            return place
        reason = self.scout.local_reason(request, row, self._lending(request, now_s))
        return place if reason is None else Place(place.worker, Placement.COLOCATED, reason)

    def outlook(self, request: LiveRequest, *, now_s: float) -> Outlook | None:
        """Return where the request would probably be placed now. It picks nothing. None: nobody could serve the request now, or
        nobody can tell where."""
        try:
            placement, reason = self._decide(request, now_s, serving=True)
        except Unavailable:
            return None
        lending = self._lending(request, now_s)
        ask = Ask(request.max_len, self.need_tokens(request), self._heard_and(None, now_s), newcomer(request))
        reader = self.scout.soonest(Role.DECODE, request, ask)
        local = placement is Placement.COLOCATED
        if reader is not None and reason is Reason.DEFAULT:
            local = self.scout.local_reason(request, reader, lending) is not None
        computer = (reader or self._any_reader(request)) if local else self.scout.soonest(Role.PREFILL, request, lending)
        return None if computer is None else Outlook(computer, has_room=reader is not None)

    def _lending(self, request: LiveRequest, now_s: float) -> Ask:
        return Ask(request.work_len + 1, 0, self._heard_and(None, now_s))

    def _any_reader(self, request: LiveRequest) -> Candidate | None:
        """Return one of the decode workers for whose room a request waits."""
        workers = (worker for tier in self._pools.decode.fitting(request.max_len) for worker in tier.alive.values())
        return next((self.scout.row(request, worker) for worker in workers), None)

    def waited_for(self, request: LiveRequest, *, now_s: float) -> list[Worker]:
        """Return the decode workers that could serve a request, whether they have room or not."""
        tries = [usable for usable, _, _ in self._tries(request, *self.decide(request, now_s=now_s), now_s)]
        workers = (worker for tier in self._pools.decode.fitting(request.max_len) for worker in tier.alive.values())
        return [w for w in workers if not self._silent(w, now_s) and any(usable is None or usable(w) for usable in tries)]

    def to_keep(self, request: LiveRequest, *, now_s: float) -> Worker | None:
        """Return the decode worker whose next room a request without room should claim. None: all that could serve it are
        claimed."""
        for usable, _, _ in self._tries(request, *self.decide(request, now_s=now_s), now_s):
            worker = self._pools.decode.to_keep(Ask(request.max_len, 0, self._heard_and(usable, now_s)))
            if worker is not None:
                return worker
        return None

    def may_keep(self, request: LiveRequest, worker: Worker, *, now_s: float) -> bool:
        """Tell whether a worker that a request has claimed could still serve it."""
        tries = [usable for usable, _, _ in self._tries(request, *self.decide(request, now_s=now_s), now_s)]
        fits = worker.serves and not self.suspect(worker, now_s=now_s) and worker.hello.max_model_len >= request.max_len
        return fits and any(usable is None or usable(worker) for usable in tries)

    def _tries(
        self, request: LiveRequest, placement: Placement, reason: Reason, now_s: float
    ) -> list[tuple[_Usable | None, Placement, Reason]]:
        """Return the ways to place a request, the best one first. Each has a function that tells whether a worker can be used
        in that way, or None where all can."""
        tries: list[tuple[_Usable | None, Placement, Reason]] = [(None, placement, reason)]
        if placement is Placement.DISAGGREGATED and self._pairs_differ:
            reached = self._reach(request, now_s)
            tries = [(reached, placement, reason)]
            if reason is Reason.DEFAULT:
                tries.append((lambda worker: not reached(worker), Placement.COLOCATED, self._no_pair))
        return self._avoiding(request, tries, now_s) if request.avoid else tries

    def _avoiding(
        self, request: LiveRequest, tries: list[tuple[_Usable | None, Placement, Reason]], now_s: float
    ) -> list[tuple[_Usable | None, Placement, Reason]]:
        """Return the same ways without the workers that the request avoids, as long as another one that serves could take the
        request in one of these ways. It waits for the room of that one."""
        heard = self._heard_and(lambda worker: worker.hello.worker_id not in request.avoid, now_s)
        readers = [w for tier in self._pools.decode.fitting(request.max_len) for w in tier.alive.values() if heard(w)]
        if not any(usable is None or usable(worker) for usable, _, _ in tries for worker in readers):
            return tries
        return [(self._heard_and(_both(usable, heard), now_s), placement, reason) for usable, placement, reason in tries]

    def _heard_and(self, usable: _Usable | None, now_s: float) -> _Usable:
        """Return a function that tells whether a worker was heard of late and is usable."""
        since_s = now_s - self._suspect_s
        if usable is None:
            return lambda worker: worker.last_seen_s >= since_s
        return lambda worker: worker.last_seen_s >= since_s and usable(worker)

    def rebind_worker(self, request: LiveRequest, lender: LinkId, *, now_s: float) -> Worker | None:
        """Pick a decode worker that has room now, by the estimate, and may read from `lender`. None: there is no such
        worker."""
        self._pools.refresh()
        source = self._registry.get(lender)
        if source is None:
            return None

        def reads(worker: Worker) -> bool:
            fresh = worker.hello.worker_id not in request.avoid
            return fresh and self._pairs.usable(source.hello, worker.hello, now_s=now_s)

        allowed = self._heard_and(reads, now_s)
        picked = self._choose(Role.DECODE, request, Ask(request.max_len, self.need_tokens(request), allowed), now_s)
        return None if picked is None else picked[0]

    def prefill_worker(self, request: LiveRequest, decode: LinkId, *, now_s: float) -> Worker | None:
        """Pick a prefill worker that takes new work and whose KV may go to that decode worker. A probe has chosen its own.
        None: there is no such worker."""
        self._pools.refresh()
        if request.probe is not None:
            self.scores, self.why, self.cached_tokens = (), Why.PROBE, 0
            peer = None if request.probe.prefill is None else self._registry.get(request.probe.prefill)
            return None if peer is None or peer.draining else peer
        reader = self._registry.get(decode)
        if reader is None:
            return None

        usable: _Usable | None = None
        if self._pairs_differ:
            usable = lambda worker: self._pairs.usable(worker.hello, reader.hello, now_s=now_s)  # noqa: E731
        ask = Ask(request.work_len + 1, 0, self._heard_and(usable, now_s))
        picked = None
        if request.avoid:
            picked = self._choose(Role.PREFILL, request, _without(ask, request.avoid), now_s)
        picked = picked or self._choose(Role.PREFILL, request, ask, now_s)
        return None if picked is None else picked[0]

    def chose_alone(self) -> None:
        """Note for the story that a worker was chosen because it serves nobody else. Nothing is known of its KV."""
        self.scores, self.why, self.cached_tokens = (), Why.ALONE, 0

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

    # One choice ------------------------------------------------------------------------------------------------------

    def _choose(
        self, role: Role, request: LiveRequest, ask: Ask, now_s: float, *, local: bool = False
    ) -> tuple[Worker, Candidate] | None:
        """Let the policy of a role pick one of the workers that `ask` describes, and return it with its row. None: there is
        none. `local`: the decode worker computes the prompt."""
        pool, ranking = self._pools.of(role), self._rankings[role]
        held = self.scout.held(role, request)
        session = self.last_turn(request, role)
        near = [] if held is None else held.longest(ranking.shortlist.holders)
        if session is not None and ranking.shortlist.session:
            near.append(session)
        links = self._shortlist(pool, ranking, request, ask, near, now_s)
        if not links:
            return None
        if held or session is not None or ranking.shortlist.drawn or ranking.shortlist.everyone:
            rows = [self._row(pool, ranking, link, request, held, session) for link in links]
        else:
            rows = [pool.row(link) for link in links]
        view = RequestView(request.work_len, ask.kv_tokens or request.work_len, *_targets(request, role, now_s, local=local))
        scores = ranking.scores(rows, view)
        picked = pick(rows, scores)
        worker = None if picked is None else self._registry.get(picked.link)
        if picked is None or worker is None:
            return None
        self.scores = tuple([(pool.name(link), score) for link, score in zip(links[:MAX_SCORES], scores, strict=False)])
        self.why = why(picked, ranking.shortlist)
        self.cached_tokens = picked.cached_tokens
        self.predicted_tokens[role] += picked.cached_tokens
        self.picks[role, ranking.name, self.why] += 1
        pool.picked(worker)
        return worker, picked

    def _shortlist(
        self, pool: Pool, ranking: Ranking, request: LiveRequest, ask: Ask, near: list[LinkId], now_s: float
    ) -> list[LinkId]:
        """Return the candidates of a policy. Workers with a handicap sit out all but a share of the picks while another worker
        takes the request, and all of them if the request has failed elsewhere. So recent failures weigh the same under every
        policy, also under one that looks at no load, and no order of a pool depends on them."""
        if self._health.handicapped(now_s):
            seed, pick, again = self._seed + SITTING_OUT, pool.picks + 1, bool(request.avoid)

            def takes_part(worker: Worker) -> bool:
                handicap = 0.0 if worker.account is None else worker.account.handicap(now_s)
                return not handicap or (not again and draw(seed, pick, worker.link) * (1.0 + handicap) < 1.0)

            links = pool.shortlist(ranking.shortlist, ask._replace(allowed=_both(ask.allowed, takes_part)), near, self._seed)
            if links:
                return links
        return pool.shortlist(ranking.shortlist, ask, near, self._seed)

    def _row(
        self, pool: Pool, ranking: Ranking, link: LinkId, request: LiveRequest, held: Held | None, session: LinkId | None
    ) -> Candidate:
        """Return a worker's row with what depends on the request."""
        row, which = self.scout.with_cached(pool.row(link), request, held), ranking.shortlist
        if link == session:
            row = row._replace(session=True)
        if which.drawn or which.everyone:
            row = row._replace(draw=draw(self._seed, pool.picks + 1, link))
        return row


def _both(one: _Usable | None, other: _Usable) -> _Usable:
    """Return a function that tells whether a worker can be used by both."""
    return other if one is None else lambda worker: one(worker) and other(worker)


def _without(ask: Ask, avoid: tuple[WorkerId, ...]) -> Ask:
    return ask._replace(allowed=_both(ask.allowed, lambda worker: worker.hello.worker_id not in avoid))


def shared_tokens(request: LiveRequest, worker: Worker) -> int:
    """Return the tokens of the blocks that a sibling shares with its leader: all full ones of the prompt before its last token,
    which is always computed."""
    block_size = worker.hello.block_size
    return (request.work_len - 1) // block_size * block_size


def _targets(request: LiveRequest, role: Role, now_s: float, *, local: bool) -> tuple[float | None, float | None]:
    """Return the time that is left for the first token, and the target for the time between tokens. None: there is no such
    target, or a worker of the role does not decide about it."""
    target_s, tpot_s = request.slo.ttft_s, request.slo.tpot_s
    if role is Role.PREFILL:
        tpot_s = None
    if target_s is None or (role is Role.DECODE and not local):
        return None, tpot_s
    return request.times.arrived_s + target_s - now_s, tpot_s
