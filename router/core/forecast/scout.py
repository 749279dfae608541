"""The scout tells what workers would take for a request. It picks nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.worker import Role
from router.core.events import LinkId
from router.core.forecast import times
from router.core.forecast.transfers import Transfers
from router.core.live_request import LiveRequest
from router.core.policy.candidate import Candidate
from router.core.policy.decider import Reason, weigh
from router.core.policy.shortlist import Shortlist
from router.core.pools.pool import Ask
from router.core.pools.pools import Pools
from router.core.prefix_index import Held, PrefixIndex
from router.core.registry import Registry, Worker

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
        uncached = times.uncached_tokens(reader, request.work_len)
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
    ttft_s = times.ttft_s(row, prompt_tokens)
    return ttft_s is None, ttft_s or 0.0, row.load
