"""The workers of each role, in the orders from which candidates are taken, and the workers of each session's last turn. Pure.

Workers are sorted when they change, not when a request comes: a choice looks at a few of them in a pool of any size, and a pool
without room says so at once. Workers that may take something are *open*, and only they are in the orders. Workers of one
`max_model_len` make a *tier*; a cluster has few of them, so a request goes over those that are long enough for it.

A worker that has become silent is still in the orders until somebody looks at it, or until the next tick.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role
from router.core.events import LinkId
from router.core.live_request import LiveRequest
from router.core.policy import Candidate, Shortlist, draw, prompt_s
from router.core.registry import Ledger, Registry, Worker
from router.core.turns import FIRST, Turn

# Load ------------------------------------------------------------------------------------------------------------
#
# The load of a worker: the measure by which a pool keeps its workers in order. Pure.


NOISE_SHARE: Final = 0.25
"""Rates within this share of the pool's mean count as equal to it. The measured rates of one worker vary by this share, because
prompts differ. If the difference counted, the fastest of equal workers would win every tie."""
DRIFT_SHARE: Final = 0.125
"""The counted mean follows the true mean only beyond this distance, since a new counted mean means that all workers are sorted
anew."""
MOST_TOKENS_PER_S: Final = 1e9
"""A rate above this, or a rate that is no number, is unknown."""


class Rates:
    """The prompt rates of one pool's workers, and the mean by which they are compared. The sum is of whole thousandths, so it
    does not depend on the order of changes."""

    def __init__(self) -> None:
        self._known: dict[LinkId, int] = {}
        self._sum = 0
        self._noted = False
        self.counted_mean = 0.0
        """The mean that counts, in tokens a second. 0: no rate is known."""

    def note(self, link: LinkId, tokens_per_s: float) -> None:
        """Take in the rate of a worker. 0: the rate is unknown, or the worker has left. `settle` follows."""
        rate = _thousandths(tokens_per_s)
        if rate == self._known.get(link, 0):
            return
        self._sum += rate - self._known.pop(link, 0)
        if rate:
            self._known[link] = rate
        self._noted = True

    def settle(self) -> bool:
        """Set the counted mean to the true mean if the true mean has drifted. True: the counted mean has changed.

        The result depends on the moments of the calls. So only the core's own questions settle, which a replay repeats.
        """
        if not self._noted:
            return False
        self._noted = False
        mean = self._mean()
        if mean == self.counted_mean or (mean and not self._drifted(mean)):
            return False
        self.counted_mean = mean
        return True

    def _mean(self) -> float:
        return self._sum / (1000 * len(self._known)) if self._known else 0.0

    def _drifted(self, mean: float) -> bool:
        return abs(mean - self.counted_mean) > DRIFT_SHARE * self.counted_mean

    def counted(self, tokens_per_s: float) -> float:
        """Return the counted rate of a worker: its own rate, or the mean if its rate is unknown or near the mean. 0: no rate is
        known."""
        mean = self.counted_mean
        return tokens_per_s if _thousandths(tokens_per_s) and abs(tokens_per_s - mean) > NOISE_SHARE * mean else mean

    def check_invariants(self, rates: Mapping[LinkId, float]) -> None:
        """Assert that all rates are known, and that the mean that counts was near theirs when it was settled."""
        fresh = Rates()
        for link, rate in rates.items():
            fresh.note(link, rate)
        assert (self._known, self._sum) == (fresh._known, fresh._sum)
        assert self._noted or not self._drifted(self._mean())


def _thousandths(tokens_per_s: float) -> int:
    return round(1000 * tokens_per_s) if 0 < tokens_per_s <= MOST_TOKENS_PER_S else 0


def decode_share(promised_tokens: int, kv_tokens: int, running: int, max_num_seqs: int) -> float:
    """Return how full a decode worker is: the larger of its share of promised KV and its share of taken slots."""
    return max(promised_tokens / kv_tokens, running / max(1, max_num_seqs))


# Sessions --------------------------------------------------------------------------------------------------------
#
# The workers that had the last turn of each session. Pure.
#
# This is a hint for placement: a worker that has computed a turn probably still has its KV. A session that is forgotten, or
# whose worker has left, only costs the time to compute the conversation anew.
#
# A session belongs to a salt, so a tenant who guesses the name of another tenant's session learns nothing and moves nothing.


MAX_SESSIONS: Final = 16_384
"""An entry takes about 0.8 KiB (measured with names of 36 characters), so all take 13 MiB. The session that had no turn for the
longest time is forgotten first."""


class _SessionTurn(NamedTuple):
    """The worker of a turn. A link that broke may be dialled again by the same process, which still has its KV."""

    link: LinkId
    worker_id: WorkerId
    incarnation: Incarnation


class Sessions:
    """Remembers, for a bounded number of sessions, the worker of each role that had the last turn."""

    def __init__(self, registry: Registry, *, max_sessions: int = MAX_SESSIONS) -> None:
        self._registry = registry
        self._max_sessions = max_sessions
        self._turns: dict[tuple[str, str], dict[Role, _SessionTurn]] = {}
        """The turns by salt and session. The last entry is the session with the latest turn."""

    def __len__(self) -> int:
        return len(self._turns)

    def placed(self, request: LiveRequest, worker: Worker) -> None:
        """Note that a part of a request was placed on a worker."""
        if request.session_id:
            key = (request.spec.cache_salt, request.session_id)
            turns = self._turns.pop(key, None) or {}
            turns[worker.hello.role] = _SessionTurn(worker.link, worker.hello.worker_id, worker.hello.incarnation)
            self._turns[key] = turns
            if len(self._turns) > self._max_sessions:
                del self._turns[next(iter(self._turns))]

    def last_turn(self, request: LiveRequest, role: Role) -> LinkId | None:
        """Return the present link of the worker that had the last turn of the request's session in this role. None: the request
        has no session, the session is unknown, or the worker has left."""
        if not request.session_id:
            return None
        turn = self._turns.get((request.spec.cache_salt, request.session_id), {}).get(role)
        if turn is None:
            return None
        worker = self._registry.get(turn.link) or self._registry.find(turn.worker_id)
        return worker.link if worker is not None and worker.hello.incarnation == turn.incarnation else None


# One pool --------------------------------------------------------------------------------------------------------

MAX_LOOKS: Final = 32
"""The most workers without enough free KV that are passed over in the order of load. After them, the order of free KV finds a
worker with enough, if there is one. So many workers are also looked at to find one with certain numerics."""
EMPTY: Final = 1 << 62
"""The free tokens of a decode worker on which nothing is promised. Such a worker is always asked, since the estimate may be
wrong."""


class Ask(NamedTuple):
    """The workers that one request can use."""

    length: int  # max_model_len must be at least this
    kv_tokens: int  # this many tokens must be free
    since_s: float  # they must have been heard since this time
    usable: Callable[[Worker], bool] | None = None  # what else must hold; it is asked of the workers that are looked at only
    turn: Turn = FIRST  # the request's turn: it may take a worker that is kept for a later turn

    def allows(self, worker: Worker) -> bool:
        """Tell whether a worker was heard recently and is usable."""
        return worker.last_seen_s >= self.since_s and (self.usable is None or self.usable(worker))


class State(NamedTuple):
    """The place of a worker in its pool, computed from the worker alone."""

    length: int
    known: bool  # it may serve requests once it is ready
    serving: bool  # it is ready, and requests may wait for it
    alive: bool  # it serves, and is not suspect
    kept_turn: Turn | None  # it is alive with space, which is kept for the request of this turn; None: it is not so
    space: bool  # it would take another sequence, as far as slots and its last refusal tell
    open: bool  # it is alive with space, and nobody has claimed it
    closed: bool  # it is alive without space, and nobody has claimed it
    load: float
    free_tokens: int
    picked: int
    spare_tokens: int  # KV that requests may take which pass the claiming request
    row: Candidate  # the snapshot that policies see, without what depends on a request


KEYS: Final = 5
"""The first fields of a state, which change seldom."""


class Tier:
    """The workers of one `max_model_len`."""

    def __init__(self) -> None:
        self.known: dict[LinkId, Worker] = {}
        self.serving: dict[LinkId, Worker] = {}
        self.alive: dict[LinkId, Worker] = {}
        self.by_load: list[tuple[float, int, LinkId]] = []
        """Open workers with their load and their last pick. The least loaded worker is first."""
        self.by_free: list[tuple[int, LinkId]] = []
        """Open workers with their free tokens. The emptiest worker is last."""
        self.by_turn: list[tuple[int, LinkId]] = []
        """Open workers with their last pick. The least recently picked worker is first."""
        self.closed: list[tuple[int, LinkId]] = []
        """Alive, unclaimed workers without space, with their free tokens. The emptiest worker is last."""


class Pool:
    """The workers of one role. `update` takes in what has changed on a worker."""

    def __init__(self, role: Role, ledger: Ledger) -> None:
        self._role = role
        self._ledger = ledger
        self._workers: dict[LinkId, Worker] = {}
        self._states: dict[LinkId, State] = {}
        self._rates = Rates()
        self._mean_moved = False
        """The mean rate has moved, and the workers have not been sorted anew yet."""
        self.tiers: dict[int, Tier] = {}
        """The tiers by `max_model_len`, in no order. A tier without workers is dropped."""
        self.kept: dict[LinkId, Turn] = {}
        """The workers with space that is kept for a request, by its turn."""
        self.tier_changes = 0
        """The number of times that a tier came or went."""
        self.shifts = 0
        """The number of times that requests may newly wait for a worker, or may no longer wait for it."""
        self.opened = 0
        """The number of times that a worker became able to take more."""
        self.picks = 0

    # Changes ---------------------------------------------------------------------------------------------------------

    def update(self, link: LinkId, worker: Worker | None) -> None:
        """Take in what has changed on a worker, or that it has left. It may be repeated after it has failed."""
        rate = 0.0 if worker is None or self._role is not Role.PREFILL else worker.load.prompt_tokens_per_s
        self._rates.note(link, rate)
        self._sort(link, worker)

    def settle(self) -> None:
        """Sort all workers anew if the mean rate has moved. It may be repeated after it has failed."""
        self._mean_moved = self._rates.settle() or self._mean_moved
        if self._mean_moved:
            for link, worker in list(self._workers.items()):
                self._sort(link, worker)
            self._mean_moved = False

    def _sort(self, link: LinkId, worker: Worker | None) -> None:
        old = self._states.get(link)
        if worker is None:
            if old is not None:
                self._leave(link, old)
            return
        counted_rate = self._rates.counted(worker.load.prompt_tokens_per_s)
        new = state_of(worker, self._ledger.charged(link), counted_rate, self._ledger.passed(link))
        if old is not None and old[:-1] == new[:-1]:  # nothing by which workers are sorted
            self._states[link] = new
            return
        tier = self.tiers.get(new.length)
        if tier is None:
            tier = self.tiers[new.length] = Tier()
            self.tier_changes += 1
        if old is not None:
            _discard(link, tier, old)
        gained = old is None or _gained(old, new)
        # Nothing between here and the end of the function can fail, so a repeated update finds all of it or nothing of it.
        self._workers[link] = worker
        if new.open:
            insort(tier.by_load, (new.load, new.picked, link))
            insort(tier.by_free, (new.free_tokens, link))
            insort(tier.by_turn, (new.picked, link))
        elif new.closed:
            insort(tier.closed, (new.free_tokens, link))
        self._states[link] = new
        self.opened += gained
        if old is None or old[:KEYS] != new[:KEYS]:
            self.shifts += old is None or old.known != new.known or old.serving != new.serving
            for group, holds in ((tier.known, new.known), (tier.serving, new.serving), (tier.alive, new.alive)):
                if holds:
                    group[link] = worker
                else:
                    group.pop(link, None)
            if new.kept_turn is not None:
                self.kept[link] = new.kept_turn
            else:
                self.kept.pop(link, None)

    def _leave(self, link: LinkId, old: State) -> None:
        tier = self.tiers[old.length]
        _discard(link, tier, old)
        for group in (tier.known, tier.serving, tier.alive, self._workers, self.kept):
            group.pop(link, None)
        del self._states[link]
        self.shifts += 1
        if all(state.length != old.length for state in self._states.values()):
            del self.tiers[old.length]
            self.tier_changes += 1

    def picked(self, worker: Worker) -> None:
        """Note that a request was given to a worker."""
        self.picks += 1
        worker.picked = self.picks
        worker.touch()

    # Questions -------------------------------------------------------------------------------------------------------

    def tier_of(self, length: int) -> int:
        """Return the `max_model_len` of the shortest tier that is long enough. 0: no tier is."""
        return min((tier for tier in self.tiers if tier >= length), default=0)

    def has(self, length: int, *, serving: bool) -> bool:
        """Tell whether a worker is long enough. It serves now, or may once it is ready."""
        return any(have >= length and (tier.serving if serving else tier.known) for have, tier in self.tiers.items())

    def heard(self, length: int, since_s: float, *, serving: bool) -> bool:
        """Tell whether a worker is long enough and was heard since a time. It serves now, or may once it is ready."""
        for have, tier in self.tiers.items():
            if have >= length:
                for worker in (tier.serving if serving else tier.known).values():
                    if worker.last_seen_s >= since_s:
                        return True
        return False

    def fitting(self, length: int) -> Iterator[Tier]:
        """Yield the tiers that are long enough."""
        return (tier for have, tier in self.tiers.items() if have >= length)

    def worker(self, link: LinkId) -> Worker:
        """Return a worker of the pool."""
        return self._workers[link]

    def names(self, links: Sequence[LinkId]) -> list[WorkerId]:
        """Return the ids of workers."""
        return [self._workers[link].hello.worker_id for link in links]

    def row(self, link: LinkId) -> Candidate:
        """Return the snapshot of a worker, without what depends on a request."""
        return self._states[link].row

    def shortlist(self, which: Shortlist, ask: Ask, near: Iterable[LinkId], seed: int) -> list[LinkId]:
        """Return the candidates of a policy, each once. `near` are workers that the policy names: the holders of a beginning of
        the prompt, and the worker of the session. If no worker may take the request in its turn, the candidates are the claimed
        workers on which it may pass the claiming request. Empty: no worker may take the request.

        Every worker has the same chance to be drawn, unless many workers are not allowed.
        """
        return self._able(which, ask, near, seed) or [link for link in self.kept if self._lets_pass(link, ask)]

    def _able(self, which: Shortlist, ask: Ask, near: Iterable[LinkId], seed: int) -> list[LinkId]:
        """Return the candidates of a policy among the workers that may take the request in its turn."""
        kept = [link for link in self.kept if self.takes(link, ask)] if self.kept else []
        tiers = [t for have, t in self.tiers.items() if have >= ask.length and t.by_free and t.by_free[-1][0] >= ask.kv_tokens]
        if not tiers:
            return kept
        if which.everyone:
            return sorted([*kept, *(link for tier in tiers for link in self._roomy(tier, ask))])
        found = dict.fromkeys(link for link in near if self.takes(link, ask))
        if which.least_loaded:
            found.update(dict.fromkeys(self._first([tier.by_load for tier in tiers], which.least_loaded, ask)))
        if which.least_recent:
            found.update(dict.fromkeys(self._first([tier.by_turn for tier in tiers], which.least_recent, ask)))
        if which.drawn:
            found.update(dict.fromkeys(self._drawn(tiers, which.drawn, ask, seed)))
        if not found:
            found.update(dict.fromkeys(link for tier in tiers for link in self._roomy(tier, ask, at_most=1)))
        found.update(dict.fromkeys(kept))
        return list(found)

    def alike(self, numerics: str, ask: Ask, near: Iterable[LinkId], load: float) -> list[LinkId]:
        """Return unclaimed workers with these numerics and at most this load that may take the request: all of `near`, and the
        first one in each order of load, as far as the first `MAX_LOOKS` workers of the order have one."""

        def fits(link: LinkId) -> bool:
            like = link in self._workers and self._workers[link].hello.numerics == numerics
            return like and self._states[link].open and self._states[link].load <= load and self.takes(link, ask)

        found = dict.fromkeys(filter(fits, near))
        for tier in self.fitting(ask.length):
            found.update(dict.fromkeys(islice(filter(fits, (key[-1] for key in tier.by_load[:MAX_LOOKS])), 1)))
        return list(found)

    def to_keep(self, ask: Ask) -> Worker | None:
        """Return the worker that a request without room should claim: of the unclaimed workers that could serve it, the worker
        with the most free KV. None: there is no such worker."""
        best: tuple[int, LinkId] | None = None
        for tier in self.fitting(ask.length):
            for order in (tier.by_free, tier.closed):
                found = next((key for key in reversed(order) if ask.allows(self._workers[key[1]])), None)
                if found is not None and (best is None or found > best):
                    best = found
        return None if best is None else self._workers[best[1]]

    def takes(self, link: LinkId, ask: Ask) -> bool:
        """Tell whether a worker may take the request."""
        state = self._states.get(link)
        return (
            state is not None
            and (state.open or (state.kept_turn is not None and ask.turn <= state.kept_turn))
            and state.length >= ask.length
            and state.free_tokens >= ask.kv_tokens
            and ask.allows(self._workers[link])
        )

    def _lets_pass(self, link: LinkId, ask: Ask) -> bool:
        """Tell whether a worker that is kept for an earlier request has enough KV that the earlier request does not need."""
        state = self._states[link]
        fits = state.length >= ask.length and min(state.spare_tokens, state.free_tokens) >= ask.kv_tokens
        return fits and ask.allows(self._workers[link])

    def _roomy(self, tier: Tier, ask: Ask, at_most: int = EMPTY) -> list[LinkId]:
        """Return workers that may take the request, the emptiest workers first."""
        found: list[LinkId] = []
        for free_tokens, link in reversed(tier.by_free):
            if free_tokens < ask.kv_tokens or len(found) == at_most:
                break
            if ask.allows(self._workers[link]):
                found.append(link)
        return found

    def _first(self, orders: Sequence[Sequence[tuple[Any, ...]]], count: int, ask: Ask) -> list[LinkId]:
        """Return the first `count` workers of the joined orders that may take the request."""
        found: list[tuple[Any, ...]] = []
        states, workers = self._states, self._workers
        for order in orders:
            taken = looks = 0
            for key in order:
                link = key[-1]
                if states[link].free_tokens < ask.kv_tokens:
                    looks += 1
                    if looks == MAX_LOOKS:
                        break
                elif ask.allows(workers[link]):
                    found.append(key)
                    taken += 1
                    if taken == count:
                        break
        if len(orders) > 1:
            found.sort()
        return [key[-1] for key in found[:count]]

    def _drawn(self, tiers: list[Tier], count: int, ask: Ask, seed: int) -> list[LinkId]:
        """Return up to `count` different workers that were drawn by chance and may take the request."""
        found: dict[LinkId, None] = {}
        total = sum(len(tier.by_turn) for tier in tiers)
        for number in range(MAX_LOOKS):
            position = int(draw(seed, self.picks + 1, -1 - number) * total)
            for tier in tiers:
                if position < len(tier.by_turn):
                    link = tier.by_turn[position][1]
                    if self.takes(link, ask):
                        found[link] = None
                    break
                position -= len(tier.by_turn)
            if len(found) == min(count, total):
                break
        return list(found)

    def check_invariants(self, workers: Mapping[LinkId, Worker]) -> None:
        """Assert that all that is kept equals what is computed anew from the workers."""
        prefills = self._role is Role.PREFILL
        self._rates.check_invariants({link: w.load.prompt_tokens_per_s for link, w in workers.items() if prefills})
        fresh = Pool(self._role, self._ledger)
        fresh._rates = self._rates
        for link, worker in workers.items():
            fresh.update(link, worker)
        assert self._states == fresh._states
        assert self._workers == fresh._workers
        assert self.tiers.keys() == fresh.tiers.keys()
        for length, tier in self.tiers.items():
            assert vars(tier) == vars(fresh.tiers[length])


def state_of(worker: Worker, promised_tokens: int, tokens_per_s: float, passed_tokens: int) -> State:
    """Return the place of a worker in its pool. `tokens_per_s` is the prompt rate of the worker, or the mean of its pool if its
    own rate is unknown or near the mean. `passed_tokens` are promised to requests that went before another request on this
    worker."""
    hello, load = worker.hello, worker.load
    prefills, placed, slots = hello.role is Role.PREFILL, len(worker.work), worker.slots
    kv_tokens, queued_tokens = hello.kv_tokens, worker.queued_tokens
    refused = worker.turned_away or worker.refused_blocks is not None
    suspect = worker.silent or worker.stalled
    willing = not prefills or not (refused or suspect)
    serving = worker.readiness.ready and not worker.draining and willing
    alive = serving and not suspect
    space = not refused and (prefills or placed < slots)
    claimed = worker.claimed
    free = alive and not claimed and worker.kept_for is None
    if prefills:
        busy = prompt_s(queued_tokens, tokens_per_s)
    else:
        busy = decode_share(promised_tokens, kv_tokens, placed, slots)
    row = Candidate(  # by position, which takes half the time
        worker.link,
        kv_tokens,
        promised_tokens,
        max(0, slots - placed),
        queued_tokens,
        hello.max_model_len,
        suspect,
        refused,
        claimed,
        placed,
        load.prompt_tokens_per_s,
        load.decode_step_s,
        load.running_sequences,
        worker.picked,
        role=hello.role,
        load=busy,
        counted_tokens_per_s=tokens_per_s,
    )
    return State(
        hello.max_model_len,
        not worker.draining and willing,
        serving,
        alive,
        worker.kept_for if alive and space and not claimed else None,
        space,
        free and space,
        free and not space,
        busy,
        kv_tokens - promised_tokens if promised_tokens else EMPTY,
        worker.picked,
        _spare_tokens(worker, kv_tokens, promised_tokens, passed_tokens),
        row,
    )


def _spare_tokens(worker: Worker, kv_tokens: int, promised_tokens: int, passed_tokens: int) -> int:
    """Return the KV for further requests that pass the claiming request. They leave the KV that the claiming request needs once
    the running requests have ended. 0: the claiming request would have room now without the requests that have passed it."""
    need_tokens = worker.kept_tokens
    if need_tokens is None or promised_tokens - passed_tokens + need_tokens <= kv_tokens:
        return 0
    return max(0, kv_tokens - need_tokens - passed_tokens)


def _gained(old: State, new: State) -> bool:
    """Tell whether the worker may now take work that it could not take before."""
    more = new.space and (not old.space or new.free_tokens > old.free_tokens)
    return more or (new.open and not old.open) or (new.known and not old.known) or (new.serving and not old.serving)


def _discard(link: LinkId, tier: Tier, old: State) -> None:
    """Take a worker out of the orders. What is missing there is no error, so this may be repeated."""
    if old.open:
        _remove(tier.by_load, (old.load, old.picked, link))
        _remove(tier.by_free, (old.free_tokens, link))
        _remove(tier.by_turn, (old.picked, link))
    elif old.closed:
        _remove(tier.closed, (old.free_tokens, link))


def _remove(order: list[Any], key: tuple[float, ...]) -> None:
    position = bisect_left(order, key)
    if position < len(order) and order[position] == key:
        del order[position]


# Both pools ------------------------------------------------------------------------------------------------------


class Pools:
    """One pool for each role. `refresh` comes before each question."""

    def __init__(self, registry: Registry, ledger: Ledger) -> None:
        self._registry = registry
        self.prefill = Pool(Role.PREFILL, ledger)
        self.decode = Pool(Role.DECODE, ledger)
        self.by_role = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        self._unsettled = False
        """The mean rate has not followed the workers that were taken in."""
        self.opened = 0
        """The number of times that some worker became able to take more."""
        self.shifts = 0
        """The number of times that requests may newly wait for some worker, or may no longer wait for it."""
        self.tier_changes = 0
        """The number of times that the lengths of the workers of a role changed."""

    def refresh(self) -> None:
        """Take in all workers that have changed since the last call, and let the mean rate of prefill workers follow: only
        theirs count."""
        if self._registry.changed or self._unsettled:
            self._update()
            self.prefill.settle()
            self._unsettled = False

    def _update(self) -> None:
        changed = self._registry.changed
        self._unsettled = True  # until `settle` has been called, also if something fails before
        while changed:
            link, role = next(iter(changed.items()))
            self.by_role[role].update(link, self._registry.get(link))
            del changed[link]
        self.opened = self.prefill.opened + self.decode.opened
        self.shifts = self.prefill.shifts + self.decode.shifts
        self.tier_changes = self.prefill.tier_changes + self.decode.tier_changes

    def check_invariants(self) -> None:
        """Assert that both pools are what they would be if they were made anew. The mean rates stay as they are: a recording
        does not record calls of this method, and its replay must decide the same."""
        self._update()
        for role, pool in self.by_role.items():
            pool.check_invariants({worker.link: worker for worker in self._registry.of_role(role)})
