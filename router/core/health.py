"""The health of workers by their results. It ejects outliers of a pool, and tells how often a worker should sit out.

A failure of a request is a pending *charge* against the workers of the failed attempt. If the next attempt goes further on
other workers, the charge counts against the workers of the failed attempt. If it fails there with the same error, the request
is at fault, and nothing counts. So a request that fails everywhere ejects no worker, at any rate of such requests. A request
that ends before its fault is clear ejects no worker either.

A charge names both ends of a handoff where either may be the reason: a broken prefill worker causes logits that are no numbers
on all decode workers. The prefill worker is charged each time, and each decode worker is charged seldom.

At least half of a pool always stays, and so does a worker that takes the longest requests. The pool is here the workers of a
role that are linked and do not drain. When the pool shrinks, ejected workers come back, in the order in which their times end.
Design note 0064.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role, WorkerHello
from router.core import outliers
from router.core.events import LinkId
from router.core.live_request import Charge, LiveRequest, RemoteWork
from router.core.outliers import TRIAL_RESULTS, Account, place_of
from router.core.registry import NOT_YET_PROBED, Registry, Worker
from router.core.request_machine import RequestState

LOOK_EVERY_S: Final = 1.0
"""Slowness is looked for once in this time, which is how often heartbeats come."""
FORGOTTEN_S: Final = 300.0
"""After this time no failure and no trial is a handicap any more: ten half-lives of a trial."""
REMEMBERED_S: Final = 3600.0
"""The account of a worker that left is kept so long: a worker that is restarted is there again within minutes."""

_BOTH: Final = (ErrorCode.NUMERICAL_ERROR,)
_REPORTER: Final = (ErrorCode.INTERNAL_BUG,)
_LENDER: Final = (ErrorCode.KV_ROTTED,)


class Cause(Enum):
    """The reason of an ejection, as metrics name it."""

    FAILURES = "failures"
    UNREACHABLE = "unreachable"
    SLOW = "slow"


class Health:
    """Keeps the accounts of all places, and ejects workers by them."""

    def __init__(self, registry: Registry, *, enabled: bool) -> None:
        self._registry = registry
        self._enabled = enabled
        self._accounts: dict[WorkerId, Account] = {}
        self._on_trial: dict[str, LiveRequest] = {}
        """The requests with charges that are pending or may be taken back."""
        self._out: dict[WorkerId, Account] = {}
        """The accounts of the ejected places."""
        self._looked_s = 0.0
        self._convicted = False
        """A charge counts since the last look."""
        self.handicaps_until_s = 0.0
        """Until then some worker may have a handicap. Mostly no worker has one, and then a choice costs no more time."""
        self.ejections: Counter[tuple[Role, Cause]] = Counter()

    # What happens ----------------------------------------------------------------------------------------------------

    def joined(self, worker: Worker, now_s: float) -> None:
        """Open the account of a worker's place, or go on with it. An ejected place stays ejected."""
        worker_id, host = place_of(worker.hello)
        account = self._accounts.get(worker_id)
        if account is None or account.host != host:
            account = self._accounts[worker_id] = Account(worker_id, host)
            self._out.pop(worker_id, None)
        account.left_s, account.busy_s = None, 0.0
        worker.account = account
        if account.reason:
            self._keep_out(worker, account, now_s)
            self._readmit(worker.hello.role, now_s)

    def left(self, worker: Worker, now_s: float) -> None:
        """Charge a worker that was lost while it ran requests, once for all of them. A draining worker is not charged."""
        account = self._accounts.get(worker.hello.worker_id)
        if account is not None:
            account.left_s = now_s
        requests = [work.request for work in worker.work.values() if work.request.probe is None]
        if requests and not worker.draining:
            for request in requests:
                self._charge(request, (worker,), ErrorCode.REPLICA_LOST, 1.0 / len(requests), now_s)
        self._readmit(worker.hello.role, now_s)

    def drains(self, worker: Worker, now_s: float) -> None:
        """Take in that a worker takes no more requests. Its pool is smaller now, so ejected workers may have to come back."""
        worker.draining = True
        worker.touch()
        self._readmit(worker.hello.role, now_s)

    def failed(self, work: RemoteWork, error: PdserveError, now_s: float) -> None:
        """Take in that a worker has given a request up. The next attempt avoids the workers of this one. It is called before
        the work is dropped."""
        request = work.request
        reporter, lender = self._registry.get(work.link), None
        if work.role is Role.DECODE and request.prefill is not None:
            lender = self._registry.get(request.prefill.link)
        elif work.role is Role.DECODE and request.prefill_worker:
            lender = self._registry.find(request.prefill_worker)  # its work ended with the handoff
        if request.probe is not None or reporter is None:
            return
        ends = tuple(worker for worker in (reporter, lender) if worker is not None)
        request.avoid = tuple(dict.fromkeys((*request.avoid, *(worker.hello.worker_id for worker in ends))))
        if error.code in _BOTH:
            self._charge(request, ends, error.code, 1.0, now_s)
        elif error.code in _REPORTER:
            self._charge(request, (reporter,), error.code, 1.0, now_s)
        elif error.code in _LENDER and lender is not None:
            self._charge(request, (lender,), error.code, 1.0, now_s)

    def ended(self, request: LiveRequest, error: PdserveError | None) -> None:
        """Take in the end of a request. A charge that is still pending then counts against no worker, unless the request ended
        well."""
        if error is None and request.machine.state is RequestState.FINISHED:
            self._convict(request, self._witnesses(request))
            for account in self._witnesses(request):
                account.succeeded()
        self._on_trial.pop(request.request_id, None)

    def unreachable(self, worker: Worker, partners: int, now_s: float) -> bool:
        """Eject a worker between which and several others KV did not pass. False: too few would stay."""
        role = worker.hello.role.value
        other = "decode" if worker.hello.role is Role.PREFILL else "prefill"
        reason = f"KV did not pass between this {role} worker and {partners} {other} workers in a row"
        return self._eject(worker, Cause.UNREACHABLE, reason, now_s)

    def on_trial(self, worker: Worker) -> bool:
        """Tell whether the worker has come back from an ejection and has not done well for long enough."""
        return worker.account is not None and worker.account.trial_left > 0

    def look(self, now_s: float) -> None:
        """Do what time has made necessary: judge charges that have become clear, look for slow workers, let workers come back
        and forget old accounts."""
        for request in self._on_trial.values():
            if self._clear(request):
                self._convict(request, self._witnesses(request))
        if self._convicted:
            self._convicted = False
            self._judge(now_s)
        for role in Role:
            self._readmit(role, now_s)
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            for role in Role:
                self._look_at_speed(role, now_s)
            for worker_id, account in list(self._accounts.items()):
                if account.left_s is not None and now_s - account.left_s > REMEMBERED_S:
                    del self._accounts[worker_id]
                    self._out.pop(worker_id, None)
                elif account.ejections and not account.reason and now_s - account.ejected_until_s > outliers.WELL_S:
                    account.ejections = 0

    # Charges ---------------------------------------------------------------------------------------------------------

    def _charge(self, request: LiveRequest, ends: Sequence[Worker], code: ErrorCode, weight: float, now_s: float) -> None:
        """Charge workers with a failure, or take the earlier charges back when another worker has failed in the same way."""
        names = tuple(worker.hello.worker_id for worker in ends)
        for worker in ends:
            if worker.account is not None:
                worker.account.loaded(weight, now_s)
                self.handicaps_until_s = max(self.handicaps_until_s, now_s + FORGOTTEN_S)
        same = [charge for charge in request.charges if charge.code is code]
        if any(names[0] not in charge.workers for charge in same):
            for charge in same:
                self._absolve(charge)
            request.charges = [charge for charge in request.charges if charge.code is not code]
        elif not same:
            tokens = len(request.emitted) - len(request.resumed)
            request.charges.append(Charge(names, code, request.machine.bind, tokens, weight))
            self._on_trial[request.request_id] = request

    def _absolve(self, charge: Charge) -> None:
        for name in charge.counted:
            if (account := self._accounts.get(name)) is not None:
                account.absolved(charge.weight)

    def _clear(self, request: LiveRequest) -> bool:
        """Tell whether the present bind has gone further than a bind with a pending charge."""
        tokens = len(request.emitted) - len(request.resumed)
        return any(not c.judged and request.machine.bind > c.bind and tokens > c.tokens for c in request.charges)

    def _convict(self, request: LiveRequest, witnesses: Sequence[Account]) -> None:
        """Count the pending charges against the workers that did not serve the present attempt."""
        names = {account.worker_id for account in witnesses}
        for charge in request.charges:
            if charge.judged or request.machine.bind <= charge.bind:
                continue
            charge.judged = self._convicted = True
            charge.counted = tuple(name for name in charge.workers if name not in names)
            for name in charge.counted:
                if (account := self._accounts.get(name)) is not None:
                    account.failed(charge.weight)
            for account in witnesses:
                account.succeeded(charge.weight)

    def _witnesses(self, request: LiveRequest) -> list[Account]:
        """Return the accounts of the workers that served the present attempt."""
        names = dict.fromkeys((request.decode_worker, request.prefill_worker))
        return [account for name in names if (account := self._accounts.get(name)) is not None]

    # Ejection --------------------------------------------------------------------------------------------------------

    def _judge(self, now_s: float) -> None:
        """Eject the worst of all workers that fail much more than their pools. The charges of the other workers may have been
        its fault, so their accounts begin anew."""
        found = [worker for role in Role for worker in self._failing(self._registry.of_role(role))]
        for worker in sorted(found, key=lambda worker: -_share(worker)):
            reason = f"{_share(worker):.0%} of its last requests failed, and others served them"
            if self._eject(worker, Cause.FAILURES, reason, now_s):
                for other in self._registry:
                    if other.account is not None and other.hello.role is not worker.hello.role:
                        other.account.bad = 0.0
                return

    def _failing(self, pool: list[Worker]) -> Iterator[Worker]:
        for worker in pool:
            rest = (other.account for other in pool if other is not worker and other.account is not None)
            if worker.serves and worker.account is not None and outliers.fails(worker.account, rest):
                yield worker

    def _eject(self, worker: Worker, cause: Cause, reason: str, now_s: float) -> bool:
        """Take a worker out of its pool if at least half of the pool then serves. Its running requests stay."""
        account = worker.account
        if not self._enabled or account is None or not worker.serves or not self._may_lose(worker):
            return False
        account.ejections += 1
        account.ejected_until_s = now_s + outliers.away_s(account.ejections)
        account.reason, account.trial_left = reason, TRIAL_RESULTS
        self.handicaps_until_s = max(self.handicaps_until_s, account.ejected_until_s + FORGOTTEN_S)
        account.begin_anew()
        account.link = worker.link
        self._out[account.worker_id] = account
        self.ejections[worker.hello.role, cause] += 1
        self._keep_out(worker, account, now_s)
        return True

    def _may_lose(self, worker: Worker) -> bool:
        pool = [other for other in self._registry.of_role(worker.hello.role) if not other.draining]
        staying = [other for other in pool if other.serves and other is not worker]
        return 2 * len(staying) >= len(pool) and worker.hello.max_model_len <= _longest(staying)

    def _keep_out(self, worker: Worker, account: Account, now_s: float) -> None:
        readiness = worker.readiness
        readiness.ready, readiness.reason, readiness.failures = False, f"ejected: {account.reason}", 0
        readiness.out_until_s = readiness.try_after_s = account.ejected_until_s
        self._registry.unready[worker.link] = worker
        worker.touch()

    def _readmit(self, role: Role, now_s: float) -> None:
        """Note the workers of a role that are back, and let others come back at once while more than half of the pool are
        out, or nobody serves the longest requests."""
        if not self._out:
            return
        pool = [worker for worker in self._registry.of_role(role) if not worker.draining]
        out: list[tuple[float, LinkId, Worker, Account]] = []
        for worker in pool:
            account = worker.account
            if account is not None and account.reason and worker.readiness.ready:
                self._came_back(account)
            elif account is not None and account.reason:
                out.append((account.ejected_until_s, worker.link, worker, account))
        out.sort(key=lambda entry: entry[:2])
        while out:
            served_len = _longest([worker for worker in pool if worker.serves])
            needed = [entry for entry in out if 2 * len(out) > len(pool) or entry[2].hello.max_model_len > served_len]
            if not needed:
                return
            _, _, worker, account = needed[0]
            out.remove(needed[0])
            account.ejected_until_s = now_s
            self._came_back(account)
            served = account.link == worker.link
            worker.readiness.out_until_s = worker.readiness.try_after_s = 0.0
            worker.readiness.ready, worker.readiness.reason = served, "" if served else NOT_YET_PROBED
            worker.touch()

    def _came_back(self, account: Account) -> None:
        account.reason = ""
        del self._out[account.worker_id]

    # Slowness --------------------------------------------------------------------------------------------------------

    def _look_at_speed(self, role: Role, now_s: float) -> None:
        """Compare the workers of a role that have made steps recently, and judge the workers that have made steps since the
        last look. Workers are compared only with workers whose weights have the same type, and devices that report no peaks are
        not compared with devices that do."""
        kinds: dict[tuple[object, ...], list[tuple[Worker, Account, outliers.WorkerPace]]] = {}
        for worker in self._registry.of_role(role):
            hello, pace = worker.hello, outliers.pace_of(worker.hello, worker.before, worker.load)
            if pace is not None and worker.account is not None and worker.serves:
                kind = (hello.dtype, hello.quantization, hello.peak_flops_per_s > 0, hello.peak_bytes_per_s > 0)
                kinds.setdefault(kind, []).append((worker, worker.account, pace))
        for alike in kinds.values():
            multiples = outliers.slowness([pace for _, _, pace in alike])
            for (worker, account, _), multiple in zip(alike, multiples, strict=True):
                busy_s = worker.load.decode_busy_s if role is Role.DECODE else worker.load.prompt_busy_s
                new_s = busy_s - account.busy_s
                if new_s <= 0.0:
                    continue
                account.busy_s, account.slowness = busy_s, multiple if multiple >= outliers.SLOW else 1.0
                if account.slowness > 1.0:
                    self.handicaps_until_s = max(self.handicaps_until_s, now_s + FORGOTTEN_S)
                account.slow_s += min(max(new_s, outliers.LOOK_S_MIN), outliers.LOOK_S_MAX)
                if multiple < outliers.TOO_SLOW:
                    account.slow_s = 0.0
                elif account.slow_s >= outliers.TOO_SLOW_S:
                    reason = f"its {role.value} steps take {multiple:.1f} times as long as those of its pool"
                    self._eject(worker, Cause.SLOW, reason, now_s)

    def is_out(self, worker: Worker) -> bool:
        """Tell whether a worker is ejected."""
        return worker.hello.worker_id in self._out and not worker.readiness.ready

    def check_invariants(self) -> None:
        """Assert that workers and accounts agree, and that only live requests are remembered."""
        for worker in self._registry:
            account = self._accounts.get(worker.hello.worker_id)
            assert worker.account is account
            assert account is not None
            assert account.left_s is None
            assert min(account.good, account.bad, account.trial_left) >= 0
        for role in Role:
            pool = [worker for worker in self._registry.of_role(role) if not worker.draining]
            assert 2 * sum(self.is_out(worker) for worker in pool) <= len(pool), "more than half of a pool is ejected"
        assert self._out == {name: account for name, account in self._accounts.items() if account.reason}
        assert all(request.charges or not request.machine.terminal for request in self._on_trial.values())


def _longest(workers: Sequence[Worker]) -> int:
    """Return the length of the longest request that one of the workers takes. 0: there is no worker."""
    return max((worker.hello.max_model_len for worker in workers), default=0)


def _share(worker: Worker) -> float:
    return 0.0 if worker.account is None else worker.account.share


# Pairs of workers -----------------------------------------------------------------------------------------------------
#
# Pairs of a prefill worker and a decode worker between which KV does not pass. Pure. The router keeps this record itself,
# because it sees all handoffs. Workers whose versions differ too much need no record: their hellos show it.
#
# A pair that fails is set aside, longer after each further failure, and is tried again when that time is over. A success clears
# it. A pair is two processes, not two names: a restarted worker makes a new pair.


_Pair = tuple[Incarnation, Incarnation]


@dataclass(slots=True)
class AsidePair:
    """A pair that has failed. `until_s` is the end of the time for which it is set aside; it is infinite for two workers that
    can never exchange KV."""

    prefill: WorkerHello
    decode: WorkerHello
    reason: str
    until_s: float
    failures: int


class Pairs:
    """Knows the pairs that failed and the pairs in doubt. All other pairs are usable."""

    def __init__(self, *, aside_s: float, aside_max_s: float) -> None:
        self._aside_s = aside_s
        self._aside_max_s = aside_max_s
        self.failures: dict[_Pair, AsidePair] = {}
        """The pairs that have failed, set aside or on trial again. Empty: all pairs are usable."""
        self._doubted: dict[_Pair, tuple[WorkerHello, WorkerHello]] = {}
        self._partners: dict[Incarnation, dict[Incarnation, None]] = {}
        """The workers with which a worker has failed since KV last passed through it, at either end."""
        self._since: dict[Incarnation, int] = {}
        """The number of handoffs that had succeeded when these failures began."""
        self._passed = 0

    def __len__(self) -> int:
        """Return the number of pairs that have failed, set aside or on trial again. 0: all pairs are usable."""
        return len(self.failures)

    def failed(self, prefill: WorkerHello, decode: WorkerHello, reason: str, *, now_s: float) -> None:
        """Record that KV did not pass. A failure of a pair that is set aside already has the same cause and changes nothing."""
        pair = self.failures.get(_key(prefill, decode))
        if pair is None:
            pair = self.failures[_key(prefill, decode)] = AsidePair(prefill, decode, reason, now_s, 0)
        if pair.until_s <= now_s:
            pair.reason = reason
            pair.failures += 1
            pair.until_s = now_s + min(self._aside_max_s, self._aside_s * 2.0 ** min(pair.failures - 1, 32))

    def partners(self, worker: WorkerHello) -> int:
        """Return with how many workers this worker has failed in a row."""
        return len(self._partners.get(worker.incarnation, ()))

    def at_fault(self, worker: WorkerHello) -> bool:
        """Tell whether a worker is probably the cause of its failed pairs: two or more pairs have failed, and KV has passed
        between other workers since then. While KV passes nowhere, no single worker is the cause."""
        return self.partners(worker) >= 2 and self._passed > self._since[worker.incarnation]

    def in_a_row(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """Record a failure of two workers of which both had been ready."""
        for worker, other in ((prefill, decode), (decode, prefill)):
            self._since.setdefault(worker.incarnation, self._passed)
            self._partners.setdefault(worker.incarnation, {})[other.incarnation] = None

    def blamed(self, worker: WorkerHello) -> None:
        """Record that a worker was at fault in its failures, so that its partners were not."""
        for partner in self._forget_row(worker.incarnation):
            others = self._partners.get(partner, {})
            others.pop(worker.incarnation, None)
            if not others:
                self._forget_row(partner)

    def _forget_row(self, worker: Incarnation) -> dict[Incarnation, None]:
        self._since.pop(worker, None)
        return self._partners.pop(worker, {})

    def never(self, prefill: WorkerHello, decode: WorkerHello, reason: str) -> None:
        """Set a pair aside for ever. The layouts or versions of the two workers differ, and waiting does not change that."""
        self.failures[_key(prefill, decode)] = AsidePair(prefill, decode, reason, math.inf, 1)

    def succeeded(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """Clear a pair between which KV has passed."""
        self.failures.pop(_key(prefill, decode), None)
        self._doubted.pop(_key(prefill, decode), None)
        self._passed += 1
        if self._partners:
            self._forget_row(prefill.incarnation)
            self._forget_row(decode.incarnation)

    def doubt(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """Record that a request ended while its KV was late. That is no evidence against the pair, but a reason to probe it."""
        self._doubted[_key(prefill, decode)] = (prefill, decode)

    def in_doubt(self) -> list[tuple[WorkerHello, WorkerHello]]:
        """Return the prefill worker and the decode worker of each pair in doubt."""
        return list(self._doubted.values())

    def forget_doubt(self, prefill: WorkerHello, decode: WorkerHello) -> None:
        """End the doubt about a pair."""
        self._doubted.pop(_key(prefill, decode), None)

    def usable(self, prefill: WorkerHello, decode: WorkerHello, *, now_s: float) -> bool:
        """Tell whether KV may go from the prefill worker to the decode worker at `now_s`. An infinite `now_s` asks whether KV
        may ever go. Workers without a common version of their protocol, or with different weights, are never paired."""
        if not prefill.may_pair(decode):
            return False
        pair = self.failures.get(_key(prefill, decode)) if self.failures else None
        return pair is None or (pair.until_s <= now_s and not math.isinf(pair.until_s))

    def forget(self, linked: Container[Incarnation], *, now_s: float) -> None:
        """Drop pairs of which a worker is no longer in `linked`, once their failures are too old to matter if it comes back. A
        pair that can never exchange KV is dropped at once."""
        for incarnation in [known for known in self._partners if known not in linked]:
            self._forget_row(incarnation)
        for key, pair in list(self.failures.items()):
            gone = key[0] not in linked or key[1] not in linked
            if gone and (math.isinf(pair.until_s) or now_s > pair.until_s + self._aside_max_s):
                del self.failures[key]

    def set_aside(self, *, now_s: float) -> Iterator[AsidePair]:
        """Return the pairs that are set aside at `now_s`."""
        return (pair for pair in list(self.failures.values()) if pair.until_s > now_s)

    def check_invariants(self) -> None:
        """Assert that every pair is stored under its own key and has failed."""
        for key, pair in self.failures.items():
            assert key == _key(pair.prefill, pair.decode)
            assert pair.failures >= 1
        assert self._partners.keys() == self._since.keys()
        assert all(self._partners.values())


def _key(prefill: WorkerHello, decode: WorkerHello) -> _Pair:
    return prefill.incarnation, decode.incarnation
