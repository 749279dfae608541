"""The reader's side of the lease protocol: a `LeaseClient` keeps one `PeerLink` to each incarnation of a lender that is in
use, and a `FollowedLease` is one lease as its reader follows it.

A link calls Handshake, Watch, Renew, Commit and Release. The state of a lease comes in two ways, on purpose. Watch pushes it
at once. Renew repeats it, in one batch for all leases every second. So a broken Watch costs a renewal interval and never a
request. Renew is also the heartbeat: a lender that answers no Renew for `lost_s` is lost, long before its leases expire. The
router has the same rule for workers. A lender that is only busy answers late and is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from kvtransfer.lease_service import MAX_RENEWALS, versions_differ
from kvtransfer.thread import TransferThread
from kvtransfer.ticket import LeaseTicket, WrongTicket
from pdserve.config import LeaseConfig
from pdserve.core.errors import (
    DeadlineExceeded,
    IncompatiblePeer,
    InternalBug,
    KvCorrupt,
    KvRotted,
    LeaseGone,
    Overloaded,
    PdserveError,
    ReplicaLost,
    TransferFailed,
)
from pdserve.core.ids import Incarnation, LeaseId, ReaderId
from pdserve.core.lease import CommitAnswer, FirstToken, LeaseView
from pdserve.core.reader import SendCommit
from pdserve.core.worker import PEER_VERSIONS, VersionRange, digests_differ
from pdserve.rpc import codec
from pdserve.rpc.channel import open_channel, token_metadata, translate
from pdserve.rpc.v1 import peer_pb2, peer_pb2_grpc


@dataclass(frozen=True, slots=True)
class Committed:
    """The lender's answer to a Commit. OK comes with token 0. With CORRUPT, `rotted_blocks` blocks have changed in the lender's
    memory; None: the lender does not know how many."""

    answer: CommitAnswer
    first_token: FirstToken | None = None
    rotted_blocks: int | None = None

    def check(self, lease_id: LeaseId, commit: SendCommit) -> None:
        """Raise `LeaseGone`, `KvCorrupt` or `KvRotted` unless the lease was committed."""
        if self.answer is CommitAnswer.GONE:
            raise LeaseGone(f"lease {lease_id} was gone when {commit.blocks} blocks had been read")
        if self.answer is not CommitAnswer.CORRUPT:
            return
        read = f"{commit.blocks - commit.first} blocks of lease {lease_id}"
        if self.rotted_blocks == 0:
            raise KvCorrupt(f"{read} were not read as they were written, and the lender still holds what it wrote")
        where = f"{self.rotted_blocks} have changed" if self.rotted_blocks else "it is not known what has changed"
        raise KvRotted(f"{read} were not read as they were written: {where} in the lender's memory")


class FollowedLease:
    """One follower of one lease, which is renewed in the background until `close`. The loop owns it. Each call on the lender
    carries `proof`, which comes from the ticket.

    The state only moves forward: views that arrive late or twice change nothing, and an error is final.
    """

    def __init__(self, lease_id: LeaseId, prompt_len: int, proof: bytes, lender: PeerLink) -> None:
        self.lease_id = lease_id
        self.proof = proof
        self.prompt_len = prompt_len
        self._lender = lender
        self._watermark = 0
        self._first_token: FirstToken | None = None
        self._error: PdserveError | None = None
        self._committing = False
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def watermark(self) -> int:
        """The KV of prompt tokens [0, watermark) can be read. The watermark never shrinks."""
        return self._watermark

    @property
    def first_token(self) -> FirstToken | None:
        """Token 0. None until the watermark covers the prompt."""
        return self._first_token

    @property
    def error(self) -> PdserveError | None:
        """The final error, after which no more state comes: `LeaseGone`, `ReplicaLost` when the lender fell silent, or another
        error when its answers cannot be used. None: no error yet."""
        return self._error

    @property
    def changed(self) -> asyncio.Future[None]:
        """A future that is done when watermark, token 0 or error change next. Take it before you look at them, and never
        cancel it."""
        return self._changed

    async def commit(self, reader_id: ReaderId, commit: SendCommit) -> None:
        """Commit the lease, and return when the KV that was read may be used. Every read of this bind must be over before.

        Raises `LeaseGone`, `KvCorrupt`, `KvRotted`, or `ReplicaLost` when the lender cannot be reached: the KV that was read
        must then be discarded.
        """
        self._committing = True  # from here on only the answer decides: a pushed GONE may come from our own Commit
        (await self._lender.commit(self.lease_id, self.proof, reader_id, commit)).check(self.lease_id, commit)

    async def release(self) -> None:
        """Give the lease up early, with one bounded try: a lease also expires by itself. Never raises a `PdserveError`."""
        await self._lender.release(self.lease_id, self.proof)

    def close(self) -> None:
        """Stop following and renewing. The lease itself stays as it is. Idempotent."""
        self._lender.unfollow(self)

    def apply(self, view: LeaseView) -> None:
        """Take a state of the lease that the lender has pushed or answered. Only the link to the lender calls this."""
        if self._error is not None or self._committing or view.lease_id != self.lease_id:
            return
        if not view.held:
            self.fail(LeaseGone(f"lease {self.lease_id} is gone"))
        elif view.watermark > self.prompt_len or (view.first_token is None) == (view.watermark == self.prompt_len):
            self.fail(
                TransferFailed(f"lease {self.lease_id}: watermark {view.watermark} of {self.prompt_len}, {view.first_token}")
            )
        else:
            self._advance(view)

    def fail(self, error: PdserveError) -> None:
        """Set the final error, unless one is set. Only the link to the lender calls this from outside."""
        if self._error is None:
            self._error = error
            self._notify()

    def _advance(self, view: LeaseView) -> None:
        if view.watermark <= self._watermark:
            return
        self._watermark = view.watermark
        self._first_token = view.first_token
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
REWATCH_MIN_S: Final = 0.05
CLOCK_SLACK_S: Final = 0.05  # gRPC's timer may fire a little before ours; a call that used all its time must end after it
DEFAULT_TRANSPORT: Final = "nixl"  # workers of the first releases name none
COMMIT_TRIES: Final = 3  # two answers may be lost; who loses more is cut off, and the lease would end before it is heard
COMMIT_PAUSE_S: Final = 0.1  # before the second try; twice that before the third
_Shown = tuple[LeaseId, bytes]
"""A lease id and the proof that was shown for it."""
_ANSWERS: Final = {
    peer_pb2.COMMIT_RESULT_OK: CommitAnswer.OK,
    peer_pb2.COMMIT_RESULT_GONE: CommitAnswer.GONE,
    peer_pb2.COMMIT_RESULT_CORRUPT: CommitAnswer.CORRUPT,
}
_PASSING: Final = (ReplicaLost, TransferFailed, Overloaded)  # worth another try; the rest is not


class PeerLink:
    """One channel and its background tasks, which the loop owns. `close` releases both."""

    def __init__(
        self,
        incarnation: Incarnation,
        address: str,
        config: LeaseConfig,
        *,
        cluster_token: str,
        transport: str = DEFAULT_TRANSPORT,
        model_digest: str = "",
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        """`transport` is the name of this worker's transport, and `model_digest` that of its weights. A lender with another
        one is refused at the handshake."""
        self.incarnation = incarnation
        self._model_digest = model_digest
        self._transport = transport
        self.address = address
        self.closed = False
        self._config = config
        self._renew_interval_s = config.renew_interval_s
        self._metadata = token_metadata(cluster_token)
        self._channel = open_channel(address)
        self._peer = peer_pb2_grpc.PeerStub(self._channel)  # generated
        self._lease = peer_pb2_grpc.LeaseStub(self._channel)  # generated
        self._followed: dict[LeaseId, list[FollowedLease]] = {}  # a lease has two followers while one bind replaces another
        self._to_watch: asyncio.Queue[_Shown] | None = None  # leases to subscribe to on the open Watch stream
        self._renewing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered_s = self._now_s()

    @property
    def num_followed(self) -> int:
        """The number of followers of all leases."""
        return sum(len(followers) for followers in self._followed.values())

    async def handshake(self) -> bytes:
        """Return the lender's agent metadata. Raises `LeaseGone` when another incarnation answers at this address, and
        `IncompatiblePeer` when the lender has another transport or other weights, or speaks no common version."""
        request = peer_pb2.HandshakeRequest(
            transport=self._transport,
            oldest_peer_version=PEER_VERSIONS.oldest,
            peer_version=PEER_VERSIONS.newest,
            model_digest=self._model_digest,
        )
        response = await self._call(self._peer.Handshake, request, HANDSHAKE_TIMEOUT_S)
        if response.incarnation != self.incarnation:
            raise LeaseGone(f"{self.address} is now {response.incarnation:016x}, the lease was {self.incarnation:016x}'s")
        versions = VersionRange(response.oldest_peer_version, response.peer_version)
        if PEER_VERSIONS.common(versions) is None:
            raise IncompatiblePeer(versions_differ(f"the lender at {self.address}", versions, "this reader", PEER_VERSIONS))
        if response.model_digest != self._model_digest:
            lender = f"the lender at {self.address}"
            raise IncompatiblePeer(digests_differ(lender, response.model_digest, "this reader", self._model_digest))
        theirs = response.transport or DEFAULT_TRANSPORT
        if theirs != self._transport:
            raise IncompatiblePeer(
                f"transfer.transport is {theirs} at {self.address} and {self._transport} at this worker: set it alike for both"
            )
        return bytes(response.agent_metadata)

    async def follow(self, lease_id: LeaseId, prompt_len: int, proof: bytes) -> FollowedLease:
        """Renew the lease once, watch it, and go on renewing until `unfollow`. Raises `ReplicaLost` when the link is closed."""
        self._check_open()
        if not self._followed:
            self._answered_s = self._now_s()  # silence counts from the first follower on
        lease = FollowedLease(lease_id, prompt_len, proof, self)
        self._followed.setdefault(lease_id, []).append(lease)
        if self._to_watch is not None and not self._to_watch.full():
            self._to_watch.put_nowait((lease_id, proof))
        self._start_tasks()
        try:
            await self._renew([(lease_id, proof)])
        except BaseException:
            self.unfollow(lease)
            raise
        return lease

    def unfollow(self, lease: FollowedLease) -> None:
        """Remove a follower. Renewals end with the last follower of the link. Idempotent."""
        followers = self._followed.get(lease.lease_id, [])
        if lease in followers:
            followers.remove(lease)
        if not followers:
            self._followed.pop(lease.lease_id, None)
        if not self._followed and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def commit(self, lease_id: LeaseId, proof: bytes, reader_id: ReaderId, commit: SendCommit) -> Committed:
        """Send Commit up to `COMMIT_TRIES` times, and return the answer. Raises `ReplicaLost` or `LeaseGone` when none came."""
        request = peer_pb2.CommitRequest(
            lease_id=codec.lease_id_to_wire(lease_id),
            reader_id=codec.reader_id_to_wire(reader_id),
            blocks=commit.blocks,
            first=commit.first,
            group_sums=[peer_pb2.GroupSums(sums=group) for group in commit.sums],
            proof=proof,
        )
        failure: PdserveError | None = None
        for number in range(COMMIT_TRIES):
            await asyncio.sleep(COMMIT_PAUSE_S * number)
            try:
                response = await self._call(self._lease.Commit, request, self._config.commit_timeout_s)
            except _PASSING as exc:
                failure = exc
            else:
                answer = _ANSWERS.get(response.result, CommitAnswer.GONE)  # so counts an answer that only newer lenders know
                rotted = response.rotted_blocks if response.HasField("rotted_blocks") else None
                try:
                    return Committed(answer, codec.first_token_from_wire(response), rotted)
                except KeyError as exc:
                    raise IncompatiblePeer(f"{self.address} sent finish reason {exc}, unknown here") from exc
        if isinstance(failure, ReplicaLost):
            raise failure
        raise LeaseGone(f"lease {lease_id}: no answer to Commit in {COMMIT_TRIES} tries: {failure}")

    async def release(self, lease_id: LeaseId, proof: bytes) -> None:
        """Send Release once. A failure is only logged, because the lease expires by itself."""
        request = peer_pb2.ReleaseRequest(lease_id=codec.lease_id_to_wire(lease_id), proof=proof)
        try:
            await self._call(self._lease.Release, request, self._config.commit_timeout_s)
        except PdserveError as exc:
            logger.info("lease %s was not released and will expire: %s", lease_id, exc)

    async def close(self) -> None:
        """End the tasks and close the channel. Followed leases fail with `ReplicaLost`. Idempotent."""
        self.closed = True
        self._fail_all(ReplicaLost(f"the link to {self.address} is closed"))
        self._followed.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def _start_tasks(self) -> None:
        if self._renewing is None or self._renewing.done():
            self._renewing = self._spawn(self._renew_loop(), "renew")
        if self._watching is None or self._watching.done():
            self._watching = self._spawn(self._watch_loop(), "watch")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"{name} {self.address}")
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s died", task.get_name(), exc_info=error)
            self._fail_all(InternalBug(f"task {task.get_name()} died: {error!r}"))

    async def _renew_loop(self) -> None:
        """Renew all followed leases once in each interval. `unfollow` of the last lease cancels this task."""
        interval_s = self._renew_interval_s
        while True:
            due_s = self._now_s() + interval_s
            await asyncio.sleep(interval_s)
            self._answered_s += max(self._now_s() - due_s, 0.0)  # we called late, which is not the lender's silence
            leases = self._leases()
            for start in range(0, len(leases), MAX_RENEWALS):
                await self._renew(leases[start : start + MAX_RENEWALS])

    def _leases(self) -> list[_Shown]:
        """Return each followed lease, once for each different proof of its followers."""
        return list(dict.fromkeys((lease.lease_id, lease.proof) for leases in self._followed.values() for lease in leases))

    async def _renew(self, leases: Sequence[_Shown]) -> None:
        request = peer_pb2.RenewRequest(
            lease_ids=[codec.lease_id_to_wire(lease_id) for lease_id, _ in leases], proofs=[proof for _, proof in leases]
        )
        left_s = self._answered_s + self._config.lost_s - self._now_s()
        timeout_s = max(left_s, self._renew_interval_s) + CLOCK_SLACK_S
        try:
            response = await self._call(self._lease.Renew, request, timeout_s)
        except PdserveError as exc:
            self._on_silence(exc)
            return
        self._answered_s = self._now_s()
        for status, (_, proof) in zip(response.statuses, leases, strict=False):
            self._apply(status, proof)

    def _on_silence(self, error: PdserveError) -> None:
        """Take a failed renewal. Followed leases fail when the error cannot pass, or when the lender is silent for `lost_s`."""
        silent_s = self._now_s() - self._answered_s
        if not isinstance(error, _PASSING):
            self._fail_all(error)
        elif silent_s >= self._config.lost_s:
            self._fail_all(ReplicaLost(f"no answer for {silent_s:.1f} s: {error.message}"))
        else:
            logger.info("renewal failed: %s", error)

    async def _watch_loop(self) -> None:
        """Keep a Watch stream open while leases are followed. Open a broken one again with back-off."""
        pause_s = REWATCH_MIN_S
        while self._followed:
            if await self._watch():
                pause_s = REWATCH_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._renew_interval_s)

    async def _watch(self) -> bool:
        """Read one Watch stream until it breaks. Return True when it had brought a state."""
        queue = self._to_watch = asyncio.Queue(maxsize=MAX_RENEWALS)
        for shown in self._leases()[:MAX_RENEWALS]:
            queue.put_nowait(shown)
        call = self._lease.Watch(metadata=self._metadata)
        subscribing = asyncio.create_task(_subscribe(call, queue))  # a request iterator would not do: grpc.aio leaks its task
        received = False
        try:
            async for status in call:
                received = True
                self._apply(status)
        except grpc.aio.AioRpcError as exc:
            logger.info("watch broke: %s", translate(exc, self.address))
        finally:
            self._to_watch = None
            call.cancel()
            subscribing.cancel()
            await asyncio.gather(subscribing, return_exceptions=True)  # it fails when the stream does
        return received

    def _apply(self, status: peer_pb2.LeaseStatus, proof: bytes | None = None) -> None:
        """Give a state to the lease's followers. `proof` was shown for this answer, so only followers with this proof get it.
        None: the state came by Watch, for all followers."""
        for lease in self._followed.get(codec.lease_id_from_wire(status.lease_id), ()):
            if proof is not None and lease.proof != proof:
                continue
            try:
                lease.apply(codec.lease_view_from_wire(status))
            except KeyError as exc:
                lease.fail(IncompatiblePeer(f"{self.address} sent finish reason {exc}, unknown here"))

    def _fail_all(self, error: PdserveError) -> None:
        for followers in self._followed.values():
            for lease in followers:
                lease.fail(error)

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Make one unary call. Raises a `PdserveError` for each failure."""
        self._check_open()
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc, self.address) from exc
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.closed and task is not None and not task.cancelling():
                self._check_open()  # the closed channel cancelled the call; nobody cancelled this task
            raise

    def _check_open(self) -> None:
        if self.closed:
            raise ReplicaLost(f"the link to {self.address} is closed")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _subscribe(call: Any, queue: asyncio.Queue[_Shown]) -> None:
    while True:
        lease_id, proof = await queue.get()
        await call.write(peer_pb2.WatchRequest(lease_id=codec.lease_id_to_wire(lease_id), proof=proof))


IDLE_CLOSE_S: Final = 180.0
"""A link that follows no lease for so long is closed. Opening it again costs a handshake of a few milliseconds."""


class _Entry:
    """A link with its one handshake, the number of attaches under way, and the timer that closes it when it is idle."""

    def __init__(self, link: PeerLink, handshake: asyncio.Task[bytes]) -> None:
        self.link = link
        self.handshake = handshake
        self.num_attaching = 0
        self.idle_timer: asyncio.TimerHandle | None = None

    @property
    def in_use(self) -> bool:
        return self.num_attaching > 0 or self.link.num_followed > 0


class LeaseClient:
    """All links of one worker that reads. The loop owns it."""

    def __init__(
        self,
        transfer: TransferThread,
        config: LeaseConfig,
        *,
        cluster_token: str,
        idle_close_s: float = IDLE_CLOSE_S,
        transport: str = DEFAULT_TRANSPORT,
        model_digest: str = "",
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        """`transport`, `model_digest` and `open_channel` are those of each `PeerLink`."""
        self._transfer = transfer
        self._idle_close_s = idle_close_s
        self._make_link = functools.partial(
            PeerLink,
            config=config,
            cluster_token=cluster_token,
            transport=transport,
            model_digest=model_digest,
            open_channel=open_channel,
        )
        self._entries: dict[Incarnation, _Entry] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_peers(self) -> int:
        """The number of open links."""
        return len(self._entries)

    @property
    def num_followed(self) -> int:
        """The number of followers of all leases, over all links."""
        return sum(entry.link.num_followed for entry in self._entries.values())

    async def attach(self, lease_id: LeaseId, ticket: LeaseTicket, *, deadline_s: float) -> FollowedLease:
        """Follow a lease, and connect to its lender's pool, so that it can be read. The caller closes the returned lease.

        Raises `LeaseGone` when the lender was replaced, `ReplicaLost` when it cannot be reached, `TransferFailed` when the
        transport cannot connect, `IncompatiblePeer`, and `DeadlineExceeded` when the request's `deadline_s` passes first.
        """
        async with self._linked(lease_id, ticket, deadline_s) as entry:
            await self._transfer.connect(ticket.incarnation, await self._handshake(entry))
            return await entry.link.follow(lease_id, ticket.prompt_len, ticket.proof)

    async def commit(
        self, lease_id: LeaseId, ticket: LeaseTicket, reader_id: ReaderId, commit: SendCommit, *, deadline_s: float
    ) -> FirstToken:
        """Commit a lease whose prompt is computed, and from which this worker reads nothing itself, and return token 0.

        Raises as `attach` and `FollowedLease.commit` do.
        """
        async with self._linked(lease_id, ticket, deadline_s) as entry:
            await self._handshake(entry)
            committed = await entry.link.commit(lease_id, ticket.proof, reader_id, commit)
        committed.check(lease_id, commit)
        if committed.first_token is None:
            raise TransferFailed(f"lease {lease_id} was committed, but {ticket.peer_address} did not tell token 0")
        return committed.first_token

    async def release(self, lease_id: LeaseId, ticket: LeaseTicket) -> None:
        """Give up a lease that was not committed, with one bounded try. It also expires by itself."""
        entry = self._entries.get(ticket.incarnation)
        if entry is not None:
            await entry.link.release(lease_id, ticket.proof)

    @contextlib.asynccontextmanager
    async def _linked(self, lease_id: LeaseId, ticket: LeaseTicket, deadline_s: float) -> AsyncIterator[_Entry]:
        """Give the link to a ticket's lender, which stays open for so long. Raises `DeadlineExceeded`."""
        if self._closed:
            raise ReplicaLost("the lease client is closed")
        if lease_id != ticket.lease_id:
            raise WrongTicket(f"the ticket is of lease {ticket.lease_id}, not of {lease_id}")
        entry = self._entry(ticket)
        entry.num_attaching += 1
        try:
            async with asyncio.timeout(deadline_s):
                yield entry
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{ticket.peer_address} was not ready to be read within {deadline_s:.1f} s") from exc
        finally:
            entry.num_attaching -= 1
            self._arm_idle_timer(entry)

    async def close(self) -> None:
        """Release every task, stream and channel. Followed leases fail with `ReplicaLost`. Idempotent."""
        self._closed = True
        for entry in list(self._entries.values()):
            self._drop(entry)
        await asyncio.gather(*self._closing)

    def _entry(self, ticket: LeaseTicket) -> _Entry:
        entry = self._entries.get(ticket.incarnation)
        if entry is None:
            link = self._make_link(ticket.incarnation, ticket.peer_address)
            handshake = asyncio.create_task(link.handshake())
            entry = self._entries[ticket.incarnation] = _Entry(link, handshake)
            handshake.add_done_callback(functools.partial(self._on_handshake_done, entry))
        return entry

    def _on_handshake_done(self, entry: _Entry, handshake: asyncio.Task[bytes]) -> None:
        """Forget the link of a failed handshake, so that the next attach makes a new one."""
        if handshake.cancelled() or handshake.exception() is not None:
            self._drop(entry)

    async def _handshake(self, entry: _Entry) -> bytes:
        """Return the answer to the link's one handshake, which concurrent attaches share."""
        try:
            return await asyncio.shield(entry.handshake)
        except asyncio.CancelledError:
            if entry.handshake.cancelled():  # `_drop` cancelled it, not the attach that waits here
                raise ReplicaLost(f"the link to {entry.link.address} is closed") from None
            raise

    def _arm_idle_timer(self, entry: _Entry) -> None:
        if entry.idle_timer is None and self._entries.get(entry.link.incarnation) is entry:
            loop = asyncio.get_running_loop()
            entry.idle_timer = loop.call_later(self._idle_close_s, self._on_idle_timer, entry)

    def _on_idle_timer(self, entry: _Entry) -> None:
        entry.idle_timer = None
        if entry.in_use:
            self._arm_idle_timer(entry)
        else:
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        """Forget a link now, and close it in the background."""
        if self._entries.get(entry.link.incarnation) is not entry:
            return
        del self._entries[entry.link.incarnation]
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        entry.handshake.cancel()
        self._transfer.disconnect(entry.link.incarnation)
        task = asyncio.create_task(entry.link.close(), name=f"close {entry.link.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
