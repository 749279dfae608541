"""The linked workers. For each, the registry keeps the hello, the last heartbeat, and the work that this router placed
there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Final

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import CannotDrain, CannotFlip, IncompatiblePeer, InternalBug, WorkerIdTaken
from pdserve.core.ids import Handle, RequestId, WorkerId
from pdserve.core.roofline import START
from pdserve.core.worker import (
    FIELDS_LINK_VERSION,
    LINK_VERSIONS,
    Role,
    WorkerHello,
    WorkerLoad,
    shown_digest,
    used_features,
)
from router.core.events import LinkId
from router.core.live_request import LiveRequest, RemoteWork
from router.core.outliers import Account, place_of
from router.core.turns import Turn

# The ledger -----------------------------------------------------------------------------------------------------------
#
# The ledger: how much KV the router believes each decode worker has promised. It is an estimate, never an authority.
#
# A worker reserves whole or answers NoRoom; the ledger only keeps the router from asking in vain. Every entry is taken once and
# returned once, and the sum of each worker's entries must equal what the worker is charged.


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV tokens that one request probably takes on one decode worker."""

    link: LinkId
    tokens: int
    passed: bool = False
    """The request passed another request that waits for this worker."""


class Ledger:
    """The entries by request, and their sum by worker."""

    def __init__(self, note: Callable[[LinkId], None] = lambda link: None) -> None:
        """`note` is called with each worker whose charge changes."""
        self._note = note
        self._entries: dict[RequestId, Entry] = {}
        self._charged: dict[LinkId, int] = {}
        self._passed: dict[LinkId, int] = {}

    def take(self, request_id: RequestId, link: LinkId, tokens: int, *, passed: bool = False) -> None:
        """Charge a worker for a request. Raises `InternalBug` if the request already has an entry."""
        if request_id in self._entries:
            raise InternalBug(f"request {request_id} already has a ledger entry: {self._entries[request_id]}")
        self._entries[request_id] = Entry(link, tokens, passed)
        self._charged[link] = self._charged.get(link, 0) + tokens
        if passed:
            self._passed[link] = self.passed(link) + tokens
        self._note(link)

    def give_back(self, request_id: RequestId) -> None:
        """Remove the entry of a request. Raises `InternalBug` if it has none."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            raise InternalBug(f"request {request_id} has no ledger entry to return")
        self._charged[entry.link] -= entry.tokens
        if self._charged[entry.link] == 0:
            del self._charged[entry.link]
        if entry.passed:
            self._passed[entry.link] -= entry.tokens
            if self._passed[entry.link] == 0:
                del self._passed[entry.link]
        self._note(entry.link)

    def has(self, request_id: RequestId) -> bool:
        """Tell whether the request has an entry."""
        return request_id in self._entries

    def link_of(self, request_id: RequestId) -> LinkId | None:
        """Return the worker that is charged for the request, or None when it has no entry."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.link

    def charged(self, link: LinkId) -> int:
        """Return the KV tokens promised on that worker."""
        return self._charged.get(link, 0)

    def passed(self, link: LinkId) -> int:
        """Return the KV tokens of the worker that are promised to requests which went before a request that waits for it."""
        return self._passed.get(link, 0)

    def __len__(self) -> int:
        return len(self._entries)

    def check_invariants(self) -> None:
        """Assert that the sum of each worker's entries equals what it is charged."""
        sums: dict[LinkId, int] = {}
        for entry in self._entries.values():
            assert entry.tokens > 0
            sums[entry.link] = sums.get(entry.link, 0) + entry.tokens
        assert sums == self._charged
        for link in sums.keys() | self._passed.keys():
            assert self.passed(link) == sum(e.tokens for e in self._entries.values() if e.link == link and e.passed)


# Backlog ---------------------------------------------------------------------------------------------------------
#
# The prompt tokens that one worker still has to compute, as the router knows it between two heartbeats. Pure.
#
# A heartbeat reports what waits on the worker, and is soon out of date: commands were on their way, and prompts come and go.
# The router receives the first token of each prompt that it sent, so it knows which prompts are computed.


class Backlog:
    """The prompts that were sent to one worker and have not been computed, and the content of its last heartbeat."""

    __slots__ = ("_counted", "_counted_tokens", "_others_tokens", "_reported_tokens", "_sent", "_sent_tokens")

    def __init__(self) -> None:
        self._sent: dict[Handle, int] = {}  # no heartbeat includes them yet; in the order of sending
        self._sent_tokens = 0
        self._counted: dict[Handle, int] = {}  # the last heartbeat includes them, perhaps partly computed
        self._counted_tokens = 0
        self._reported_tokens = 0
        self._others_tokens = 0  # reported tokens that are none of these prompts

    @property
    def tokens(self) -> int:
        """The prompt tokens that wait on the worker or are on their way to it. Until it is computed, each prompt counts whole,
        or as far as the last heartbeat reports it."""
        return min(self._reported_tokens, self._counted_tokens + self._others_tokens) + self._sent_tokens

    def sent(self, handle: Handle, tokens: int) -> None:
        """Count a prompt that was sent to the worker. Handles grow."""
        self._sent[handle] = tokens
        self._sent_tokens += tokens

    def ended(self, handle: Handle) -> None:
        """Forget a prompt that is computed or withdrawn. Nothing happens for an unknown prompt."""
        self._sent_tokens -= self._sent.pop(handle, 0)
        self._counted_tokens -= self._counted.pop(handle, 0)

    def heard(self, queued_tokens: int, last_handle: int) -> None:
        """Take in a heartbeat: the tokens that wait, which include all commands up to `last_handle`."""
        while self._sent and (oldest := next(iter(self._sent))) <= last_handle:
            tokens = self._counted[oldest] = self._sent.pop(oldest)
            self._sent_tokens -= tokens
            self._counted_tokens += tokens
        self._reported_tokens = queued_tokens
        self._others_tokens = max(0, queued_tokens - self._counted_tokens)

    def check_invariants(self, running: Container[Handle]) -> None:
        """Assert that the sums are right, and that only prompts of work that runs are counted."""
        assert self._sent_tokens == sum(self._sent.values())
        assert self._counted_tokens == sum(self._counted.values())
        assert list(self._sent) == sorted(self._sent)
        assert all(handle in running for handle in (*self._sent, *self._counted))


# Workers ---------------------------------------------------------------------------------------------------------


NOT_YET_PROBED: Final = "waiting for a KV round trip"
FLIP_SINCE: Final = 1
"""The first version of the link's protocol that has `Flip`."""


RECENT_S: Final = 10.0
"""The shortest time over which the present utilisation is measured: many steps, and several heartbeats."""
STUCK_SHARE: Final = 0.1
"""The share of `step_timeout_s` without an engine step after which a worker gets nothing new: 6 s of 60 s, or three times the
largest step where that sets the timeout. Work that is placed later would probably wait in vain."""


@dataclass(slots=True)
class Readiness:
    """The state of a worker's probes since it dialled. `ready`: KV has passed through the worker. Otherwise `reason` says why
    not."""

    ready: bool = False
    reason: str = NOT_YET_PROBED
    failures: int = 0
    try_after_s: float = 0.0
    out_until_s: float = 0.0
    """The worker is ejected, and is not probed before this time."""
    probes: int = 0
    """The number of running probes that have this worker at either end."""


@dataclass(slots=True)
class Worker:
    """One linked worker, as this router knows it."""

    link: LinkId
    hello: WorkerHello
    last_seen_s: float
    load: WorkerLoad
    work: dict[Handle, RemoteWork] = field(default_factory=dict)
    backlog: Backlog = field(default_factory=Backlog)
    """The prompts that were sent to the worker and are not known to be computed."""
    refused_blocks: int | None = None
    """The number of blocks for which the worker had no room. None: it refused no work, or has shown room since then."""
    turned_away: bool = False
    """The worker refused work that it usually takes, and has sent no heartbeat since then."""
    draining: bool = False
    """The worker gets no new work, and finishes its present work."""
    claimed_by: LinkId | None = None
    """The worker whose probe gets the next room on this worker. None: no probe claims it."""
    kept_for: Turn | None = None
    """The turn of the waiting request that gets the next room on this worker, unless an earlier request gets it. None: no
    request has claimed it."""
    kept_tokens: int | None = None
    """The KV that the claiming request needs: requests that fit beside it may pass it. None: no request passes it."""
    alone_for: RequestId | None = None
    """The request that gets this decode worker for itself. It is suspected of ending its workers. None: there is none."""
    readiness: Readiness = field(default_factory=Readiness)
    account: Account | None = None
    """The results of the worker's place. None: the worker has just been linked."""
    silent: bool = False
    """The worker was found silent, and has not been heard since then."""
    picked: int = 0
    """The number of the pick, counted over the pool, that last chose the worker. 0: none did."""
    before: WorkerLoad = START
    """The load of `RECENT_S` to twice as long ago, by the worker's own clock. `START`: it is linked for a shorter time."""
    mark: WorkerLoad = START
    """The load that `before` becomes next."""
    changed: dict[LinkId, Role] = field(default_factory=dict)
    """The workers that have changed since the pools were brought up to date. All workers of a registry share it."""

    def touch(self) -> None:
        """Note a change of a field by which workers are chosen. The code that changes the worker calls this."""
        self.changed[self.link] = self.hello.role

    @property
    def name(self) -> str:
        """The worker's role and id, for messages."""
        return f"{self.hello.role.value} worker {self.hello.worker_id}"

    @property
    def link_version(self) -> int:
        """The version of the link's protocol that this router and the worker speak with each other."""
        return min(LINK_VERSIONS.newest, self.hello.link_version)

    @property
    def claimed(self) -> bool:
        """The next room is for a probe, or the worker is kept for one request alone."""
        return self.claimed_by is not None or self.alone_for is not None

    @property
    def serves(self) -> bool:
        """Requests of clients may be placed on the worker, as far as it has room."""
        return self.readiness.ready and not self.draining

    @property
    def stalled(self) -> bool:
        """The worker reports that its engine has made no step for longer than it ever should."""
        return 0 < self.hello.step_timeout_s * STUCK_SHARE < self.load.engine_stalled_s

    @property
    def stuck(self) -> bool:
        """The worker's engine has made no step for so long that it never will."""
        return 0 < self.hello.step_timeout_s < self.load.engine_stalled_s

    @property
    def requests_placed(self) -> int:
        """Count the requests of clients on the worker. Probes are left out."""
        return sum(work.request.probe is None for work in self.work.values())

    @property
    def queued_tokens(self) -> int:
        """Count the prompt tokens that wait on the worker or are on their way to it."""
        return self.backlog.tokens

    @property
    def slots(self) -> int:
        """The sequences that may run on the worker now."""
        return self.hello.slots(self.load)

    @property
    def has_room(self) -> bool:
        """There is room for one more sequence, as far as this router knows."""
        return len(self.work) < self.slots and self.refused_blocks is None and not self.turned_away

    def sent(self, handle: Handle, tokens: int) -> None:
        """Count a prompt that was sent to the worker, until it is computed."""
        self.backlog.sent(handle, tokens)
        self.touch()

    def computed(self, handle: Handle) -> None:
        """Note that a prompt is computed: its first token has come."""
        self.backlog.ended(handle)
        self.touch()

    def ended(self, handle: Handle) -> None:
        """Forget work that is over or was withdrawn, and its prompt."""
        self.work.pop(handle, None)
        self.backlog.ended(handle)
        self.refused_blocks = None  # something was freed there
        self.touch()

    def saw_heartbeat(self, load: WorkerLoad) -> None:
        """Take over the load of a heartbeat. Older refusals then no longer count."""
        self.load = load
        if load.uptime_s - self.mark.uptime_s >= RECENT_S:
            self.before, self.mark = self.mark, load
        self.backlog.heard(load.queued_tokens, load.last_handle)
        self.turned_away = False
        if self.refused_blocks is not None and load.blocks.free + load.blocks.cached >= self.refused_blocks:
            self.refused_blocks = None
        self.touch()


class Registry:
    """The workers by link, with at most one link for each worker id. Iteration is in the order of joining."""

    def __init__(self, model_fingerprint: str, *, allow_mixed_quantization: bool = False, require_exact: bool = False) -> None:
        self._model_fingerprint = model_fingerprint
        self._require_exact = require_exact
        self._allow_mixed_quantization = allow_mixed_quantization
        self.exact = True
        """True while all linked workers have the same numerics: then a token depends neither on the worker nor on its batch."""
        self.foreign = False
        """Some linked worker runs an engine that is not pdserve's own."""
        self.mixed_numerics = False
        """Two linked workers have different numerics, so it matters to a request which of them compute it."""
        self._by_link: dict[LinkId, Worker] = {}
        self._by_role: dict[Role, dict[LinkId, Worker]] = {role: {} for role in Role}
        self._by_seen: OrderedDict[LinkId, Worker] = OrderedDict()
        self.unready: dict[LinkId, Worker] = {}
        """The workers that were not ready when they were last looked at, in the order of joining."""
        self.changed: dict[LinkId, Role] = {}
        """The workers that have changed, joined or left since the pools were brought up to date."""
        self.longest: dict[Role, int] = {}
        """The token limit of the longest request that some worker of a role takes. While none is linked, the last value stays,
        because workers may come back. A role of which no worker has joined yet is missing."""
        self.mixed_peers = False
        """True while some linked prefill worker and some linked decode worker may never be paired: they have no version of
        their protocol in common, or the digest of one's weights is unknown."""

        self.model_digest = ""
        """The digest of the linked workers' weights. Empty: no worker knows it. While no worker is linked, the last digest
        stays."""
        self.undivided: frozenset[str] = frozenset()
        """The features whose requests some linked worker serves only if it computes them from the prompt to the end."""
        self.unresumed: frozenset[str] = frozenset()
        """The features whose requests some linked worker cannot take up behind output that exists. While no worker is linked,
        the last value stays: the workers that come next have the same engine."""
        self.limited = False
        """Some linked worker cannot serve all requests: it refuses a feature, or speaks an old version of the link."""
        self.held_tokens = 0
        """The most tokens whose KV a request of any length holds on any decode worker. 0: there is no such bound."""

    def check(self, hello: WorkerHello) -> None:
        """Check that a worker fits the model and the other workers. Raises `IncompatiblePeer` with the reason when it does
        not."""
        name = f"{hello.role.value} worker {hello.worker_id}"
        if LINK_VERSIONS.common(hello.link_versions) is None:
            raise IncompatiblePeer(
                f"{name} speaks version {hello.link_versions} of the link's protocol, this router speaks {LINK_VERSIONS}: "
                "upgrade the older one of the two"
            )
        if hello.model_fingerprint != self._model_fingerprint:
            raise IncompatiblePeer(
                f"{name} serves model {hello.model_fingerprint or '(none)'}, this router serves {self._model_fingerprint}"
            )
        for other in self._by_link.values():
            if other.hello.engine.partition(" ")[0] != hello.engine.partition(" ")[0]:
                raise IncompatiblePeer(
                    f"{name} runs {_engine(hello)}, {other.name}, which was here first, runs {_engine(other.hello)}: their KV "
                    "layouts differ; give both pools the same engine (engine.backend)"
                )
        if differing := self._other_weights(hello):
            raise IncompatiblePeer(
                f"{name} has loaded weights of digest {shown_digest(hello.model_digest)}, {differing.name}, which was here "
                f"first, has {shown_digest(differing.hello.model_digest)}: {_digests_advice(hello, differing.hello)}"
            )
        if self._require_exact and not hello.numerics:
            raise IncompatiblePeer(
                f"{name} computes tokens that depend on their batch, and router.require_exact is true: start it with "
                "batch_invariant and with KV that is not quantised"
            )
        if hello.kv_tokens <= 0:
            raise IncompatiblePeer(f"{name} has no KV blocks: {hello.num_blocks} of {hello.block_size} tokens")
        for other in self._by_link.values():
            if other.hello.worker_id == hello.worker_id:
                continue
            if other.hello.quantization != hello.quantization and not self._allow_mixed_quantization:
                raise IncompatiblePeer(
                    f"{name} has weights in quantization {hello.quantization or 'none'}, {other.hello.worker_id} in "
                    f"{other.hello.quantization or 'none'}; router.allow_mixed_quantization: true allows it"
                )
            if self._require_exact and other.hello.numerics != hello.numerics:
                raise IncompatiblePeer(
                    f"{name} computes other bits than {other.hello.worker_id}, which was here first, and router.require_exact "
                    "is true: give both the same kind of machine and the same dtype, quantization and kv_cache_dtype"
                )
            if not _same_blocks(other.hello, hello):
                raise IncompatiblePeer(
                    f"{name} has KV layout {_layout(hello)}, {other.hello.worker_id} has {_layout(other.hello)} "
                    "(block_size, dtype, kv_bytes_per_token; only the dtype may differ, and the bytes with it)"
                )

    def _other_weights(self, hello: WorkerHello) -> Worker | None:
        """Return the first linked worker whose weights are known to differ from the newcomer's. None: there is none.

        So all known digests of linked workers are equal. A process that dials again is not compared with itself.
        """
        others = (w for w in self._by_link.values() if w.hello.worker_id != hello.worker_id and w.hello.model_digest)
        return next((other for other in others if hello.model_digest not in ("", other.hello.model_digest)), None)

    def cannot_resume(self, request: LiveRequest) -> str:
        """Return the feature for which a request can neither move nor be computed again: the client has a part of the output,
        and no worker can take it up. Empty: there is none."""
        used = used_features(request.spec, self.unresumed) if self.unresumed and request.emitted else ()
        return min(used, default="")

    def check_id(self, hello: WorkerHello, *, now_s: float, lost_s: float) -> None:
        """Check that no other process uses this worker's id. Raises `WorkerIdTaken` if another process uses it and was heard
        within `lost_s`.

        A process that dials again is let in at once, because it has given up its old link. A restarted worker waits until the
        old process' connection has broken, which happens when that process dies, or until that process has been silent for
        `lost_s`.
        """
        holder = self.find(hello.worker_id)
        if holder is None or holder.hello.incarnation == hello.incarnation or _flipped(holder.hello, hello):
            return
        silent_s = now_s - holder.last_seen_s
        if silent_s <= lost_s:
            raise WorkerIdTaken(
                f"worker_id {hello.worker_id!r} is taken: {holder.name} at {holder.hello.address}, pid {holder.hello.pid}, "
                f"has it and was heard {silent_s:.1f} s ago; the {hello.role.value} worker at {hello.address}, "
                f"pid {hello.pid}, is refused until that one has gone: give one of the two another worker_id, or stop it"
            )

    def join(self, link: LinkId, hello: WorkerHello, *, now_s: float) -> Worker:
        """Add a checked worker, without work: a worker whose link broke has dropped the work of that link."""
        assert self.find(hello.worker_id) is None
        idle = WorkerLoad(BlockCounts(hello.num_blocks, hello.num_blocks, 0, 0, 0))
        worker = Worker(link, hello, now_s, idle, draining=hello.draining, changed=self.changed)
        self._by_link[link] = self._by_role[hello.role][link] = self._by_seen[link] = worker
        self.unready[link] = worker
        worker.touch()
        self._note_change(hello.role)
        return worker

    def saw_heartbeat(self, worker: Worker, load: WorkerLoad) -> None:
        """Take over the load of a worker's heartbeat."""
        worker.saw_heartbeat(load)

    def leave(self, link: LinkId) -> Worker | None:
        """Remove and return the worker of a link. None: it had left already."""
        worker = self._by_link.pop(link, None)
        if worker is not None:
            self._by_role[worker.hello.role].pop(link, None)
            self._by_seen.pop(link, None)
            self.unready.pop(link, None)
            worker.touch()
            self._note_change(worker.hello.role)
        return worker

    def seen(self, link: LinkId, *, now_s: float) -> Worker | None:
        """Return the worker of a link that was heard just now, or None when it has left."""
        worker = self._by_link.get(link)
        if worker is not None:
            worker.last_seen_s = now_s
            self._by_seen.move_to_end(link)
            if worker.silent:
                worker.silent = False
                worker.touch()
        return worker

    def forgive(self, late_s: float, *, now_s: float) -> None:
        """Do not count a time as silence in which the router itself stood still."""
        for worker in self._by_link.values():
            worker.last_seen_s = min(now_s, worker.last_seen_s + late_s)

    def silent_since(self, before_s: float) -> list[Worker]:
        """Return the workers that were last heard before a time. The worker with the longest silence is first."""
        found: list[Worker] = []
        for worker in self._by_seen.values():
            if worker.last_seen_s >= before_s:
                break
            found.append(worker)
        return found

    def get(self, link: LinkId) -> Worker | None:
        """Return the worker of a link, or None when it has left."""
        return self._by_link.get(link)

    def touch(self, link: LinkId) -> None:
        """Note that something has changed by which the worker of a link is chosen. It may have left."""
        worker = self._by_link.get(link)
        if worker is not None:
            worker.touch()

    def find(self, worker_id: WorkerId) -> Worker | None:
        """Return the linked worker with this id, or None."""
        return next((w for w in self._by_link.values() if w.hello.worker_id == worker_id), None)

    def check_flip(self, worker: Worker, role: Role, *, needs_prefill: bool) -> None:
        """Check that a worker may leave its pool for the other one. Raises `CannotFlip`, which names the obstacle.

        An indispensable pool keeps a ready worker: the decode pool always, and with `needs_prefill` the prefill pool too.
        """
        if worker.hello.role is role:
            raise CannotFlip(f"{worker.name} has this role already", field="worker_id")
        if worker.hello.flip_obstacle:
            raise CannotFlip(f"{worker.name} cannot change its role: {worker.hello.flip_obstacle}", field="worker_id")
        if worker.link_version < FLIP_SINCE:
            raise CannotFlip(
                f"{worker.name} speaks version {worker.link_version} of the link's protocol, which has no flips: upgrade it to "
                f"version {FLIP_SINCE}",
                field="worker_id",
            )
        if worker.draining:
            raise CannotFlip(f"{worker.name} drains already", field="worker_id")
        others = [other for other in self.of_role(worker.hello.role) if other is not worker and other.serves]
        if not others and (worker.hello.role is Role.DECODE or needs_prefill):
            raise CannotFlip(
                f"{worker.name} is the last {worker.hello.role.value} worker, and no request is served without one: "
                "start another one first (`pdserve scale`)",
                field="worker_id",
            )

    def check_drain(self, worker: Worker) -> None:
        """Check that others of its role serve when a worker leaves. Raises `CannotDrain`. A worker that does not serve may
        leave."""
        if worker.serves and not any(other.serves for other in self.of_role(worker.hello.role) if other is not worker):
            raise CannotDrain(
                f"{worker.name} is the last {worker.hello.role.value} worker that serves: start another one first "
                "(`pdserve scale`), or drain it with --force",
                field="worker_id",
            )

    def _note_change(self, role: Role) -> None:
        numerics = {worker.hello.numerics for worker in self._by_link.values()}
        self.foreign = any(worker.hello.foreign for worker in self._by_link.values())
        self.mixed_numerics = len(numerics) > 1
        self.exact = not self.mixed_numerics and "" not in numerics
        kinds = ({w.hello.pairing: w.hello for w in self._by_role[side].values()} for side in (Role.PREFILL, Role.DECODE))
        prefill, decode = (kind.values() for kind in kinds)
        self.mixed_peers = any(not lender.may_pair(reader) for lender in prefill for reader in decode)
        digests = (worker.hello.model_digest for worker in self._by_link.values() if worker.hello.model_digest)
        self.model_digest = next(digests, "" if self._by_link else self.model_digest)
        held = [worker.hello.held_tokens for worker in self._by_role[Role.DECODE].values()]
        self.held_tokens = max(held) if held and all(held) else 0
        self.undivided = frozenset(name for worker in self._by_link.values() for name in worker.hello.undivided)
        if self._by_link:
            self.unresumed = frozenset(name for worker in self._by_link.values() for name in worker.hello.unresumed)
        self.limited = any(w.hello.refuses or w.link_version < FIELDS_LINK_VERSION for w in self._by_link.values())
        lengths = [worker.hello.max_model_len for worker in self.of_role(role)]
        if lengths:
            self.longest[role] = max(lengths)

    def of_role(self, role: Role) -> list[Worker]:
        """Return the linked workers of a role, in the order of joining."""
        return list(self._by_role[role].values())

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._by_link.values()))

    def __len__(self) -> int:
        return len(self._by_link)


def _engine(hello: WorkerHello) -> str:
    return hello.engine or "pdserve's engine"


def _digests_advice(hello: WorkerHello, other: WorkerHello) -> str:
    """Return why two digests of one model may differ, and what to do. The digest of a foreign engine names more than files."""
    if not hello.foreign:
        return (
            "the files of the two differ, although they look alike; load the same files on both and start the worker with the "
            "wrong ones again"
        )
    return (
        "besides the files it covers the engine's release, its block size and its dtypes, here "
        f"{_foreign_facts(hello)} and {_foreign_facts(other)}; give both the same release, settings and files, and start the "
        "wrong one again"
    )


def _foreign_facts(hello: WorkerHello) -> str:
    return f"({hello.engine}, {hello.block_size} tokens, KV in {hello.dtype})"


def _flipped(before: WorkerHello, hello: WorkerHello) -> bool:
    """Tell whether this is the same process in a later life: the process has flipped, so its earlier link is never taken up
    again."""
    return (before.pid, place_of(before)) == (hello.pid, place_of(hello)) and hello.flips > before.flips


def _same_blocks(one: WorkerHello, other: WorkerHello) -> bool:
    """Tell whether two workers of one model can read each other's blocks. Blocks of different dtypes are converted."""
    same_bytes = one.kv_bytes_per_token == other.kv_bytes_per_token or one.dtype != other.dtype
    return one.block_size == other.block_size and same_bytes


def _layout(hello: WorkerHello) -> tuple[int, str, int]:
    return hello.block_size, hello.dtype, hello.kv_bytes_per_token
