"""The link over which a reader calls one incarnation of one lender: Handshake, Watch, Renew, Commit, Release.

The state of a lease comes in two ways, on purpose. Watch pushes it at once. Renew repeats it, in one batch for all leases
every second. So a broken Watch costs a renewal interval and never a request. Renew is also the heartbeat: a lender that
answers no Renew for `lost_s` is lost, long before its leases expire. The router has the same rule for workers. A lender
that is only busy answers late and is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import grpc.aio

from kvtransfer.lease.followed import Committed, FollowedLease
from kvtransfer.lease.service import MAX_RENEWALS, versions_differ
from pdserve.config import LeaseConfig
from pdserve.core.errors import IncompatiblePeer, InternalBug, LeaseGone, Overloaded, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import Incarnation, LeaseId, ReaderId
from pdserve.core.lease import CommitAnswer
from pdserve.core.reader import SendCommit
from pdserve.core.worker import PEER_VERSIONS, VersionRange, digests_differ
from pdserve.rpc import codec
from pdserve.rpc.channel import open_channel, token_metadata, translate
from pdserve.rpc.v1 import peer_pb2, peer_pb2_grpc

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
REWATCH_MIN_S: Final = 0.05
CLOCK_SLACK_S: Final = 0.05  # gRPC's timer may fire a little before ours; a call that used all its time must end after it
DEFAULT_TRANSPORT: Final = "nixl"  # workers of the first releases name none
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
        """Send Commit up to `commit_tries` times, and return the answer. Raises `ReplicaLost` or `LeaseGone` when none came."""
        request = peer_pb2.CommitRequest(
            lease_id=codec.lease_id_to_wire(lease_id),
            reader_id=codec.reader_id_to_wire(reader_id),
            blocks=commit.blocks,
            first=commit.first,
            group_sums=[peer_pb2.GroupSums(sums=group) for group in commit.sums],
            proof=proof,
        )
        failure: PdserveError | None = None
        for number in range(self._config.commit_tries):
            await asyncio.sleep(COMMIT_PAUSE_S * number)
            try:
                response = await self._call(self._lease.Commit, request, self._config.commit_timeout_s)
            except _PASSING as exc:
                failure = exc
            else:
                answer = _ANSWERS.get(response.result, CommitAnswer.GONE)  # so counts an answer that only newer lenders know
                return Committed(answer, response.rotted_blocks if response.HasField("rotted_blocks") else None)
        if isinstance(failure, ReplicaLost):
            raise failure
        raise LeaseGone(f"lease {lease_id}: no answer to Commit in {self._config.commit_tries} tries: {failure}")

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
        interval_s = self._config.renew_interval_s
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
        timeout_s = max(left_s, self._config.renew_interval_s) + CLOCK_SLACK_S
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
            pause_s = min(2 * pause_s, self._config.renew_interval_s)

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
