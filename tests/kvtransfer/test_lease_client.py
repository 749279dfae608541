"""Following leases of a real server: handshake, watermark, renewal, silence, commit, release, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from lender import FIRST, TOKEN, Lender, first_token, lender, wait_watermark
from transfer_testing import new_incarnation

from kvtransfer.backends.fake import FakeFabric
from kvtransfer.lease_client import FollowedLease, LeaseClient
from kvtransfer.routed import pack_metadata
from pdserve.config import LeaseConfig
from pdserve.core.errors import DeadlineExceeded, IncompatiblePeer, LeaseGone, ReplicaLost, TransferFailed
from pdserve.core.ids import Incarnation, LeaseId, ReaderId
from pdserve.core.lease import FirstToken, LeaseState
from pdserve.core.reader import SendCommit
from pdserve.core.sampling import FinishReason

CONFIG = LeaseConfig(ttl_s=30.0, commit_timeout_s=5.0)
HASTY = LeaseConfig(ttl_s=1.2, commit_timeout_s=5.0)  # renews every 0.2 s

WATCHFUL = LeaseConfig(ttl_s=30.0, heartbeat_s=0.2, lost_s=4.0)  # a call may stand still with the machine for two seconds


class Connector:
    """Notes what a transfer thread would be asked."""

    def __init__(self) -> None:
        self.connected: list[Incarnation] = []
        self.disconnected: list[Incarnation] = []
        self.metadata = b""

    async def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        self.metadata = metadata
        self.connected.append(incarnation)

    def disconnect(self, incarnation: Incarnation) -> None:
        self.disconnected.append(incarnation)


@dataclass
class World:
    lender: Lender
    client: LeaseClient
    connector: Connector
    reader: ReaderId

    async def attach(self, prompt_len: int = 100, blocks: tuple[int, ...] = (1, 2)) -> FollowedLease:
        lease_id, ticket = self.lender.grant(blocks, prompt_len)
        return await self.client.attach(lease_id, ticket, deadline_s=30)

    def state(self, lease_id: LeaseId) -> LeaseState:
        """Of a lease that has ended."""
        (state,) = [lease.state for lease in self.lender.returned if lease.lease_id == lease_id]
        return state


@asynccontextmanager
async def world(config: LeaseConfig = CONFIG, *, token: str = TOKEN, idle_close_s: float = 60.0) -> AsyncIterator[World]:
    async with lender(FakeFabric()) as one:
        connector = Connector()
        own = new_incarnation()
        client = LeaseClient(connector, config, cluster_token=token, idle_close_s=idle_close_s)
        try:
            yield World(one, client, connector, ReaderId(own, 1))
        finally:
            await client.close()
        assert client.num_peers == 0


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    async def checked() -> None:
        await asyncio.wait_for(test(), 60)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=60)  # cancelled ones need a turn to end
        assert not [task for task in others if not task.done()]

    asyncio.run(checked())


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what changes is on the server's side and has no event
        await asyncio.sleep(0.005)


def test_watermark_and_first_token_arrive_by_push() -> None:
    """(1) Attach; (2) a chunk: the watermark moves; (3) the last chunk brings token 0; (4) commit; (5) nothing is left."""

    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            assert w.connector.metadata == pack_metadata({0: w.lender.peer.metadata})
            assert lease.watermark == 0
            w.lender.advance(lease.lease_id, 64)
            assert await wait_watermark(lease, 64) == 64
            first = FirstToken(7, FinishReason.STOP)
            w.lender.advance(lease.lease_id, 100, first)
            assert await first_token(lease) == first
            await lease.commit(w.reader, SendCommit(2))
            assert w.state(lease.lease_id) is LeaseState.COMMITTED
            lease.close()
            assert w.client.num_followed == 0
            assert w.lender.table.num_held == 0
            assert w.lender.calls.count["Renew"] == 1

    run(test)


def test_a_lease_that_was_ready_before_the_attach_is_known_at_once() -> None:
    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            w.lender.advance(lease_id, 100, FIRST)
            lease = await w.client.attach(lease_id, ticket, deadline_s=30)
            assert lease.watermark == 100
            assert await first_token(lease) == FIRST

    run(test)


def test_attaches_at_once_share_one_handshake_and_one_stream() -> None:
    async def test() -> None:
        async with world() as w:
            leases = await asyncio.gather(*(w.attach() for _ in range(8)))
            for lease in leases:
                w.lender.advance(lease.lease_id, 100, FIRST)
            await asyncio.gather(*(first_token(lease) for lease in leases))
            assert w.lender.calls.count["Handshake"] == 1
            assert w.lender.calls.count["Watch"] == 1
            assert w.client.num_peers == 1

    run(test)


def test_a_lost_push_costs_a_renewal_interval() -> None:
    """The watermark moves and nobody is told; Renew repeats it."""

    async def test() -> None:
        async with world(HASTY) as w:
            lease = await w.attach()
            w.lender.advance(lease.lease_id, 100, FIRST, push=False)
            assert await first_token(lease) == FIRST

    run(test)


def test_renewing_outlives_the_time_to_live() -> None:
    """The lender's clock runs ahead by 40 % of the time to live after each of six renewals."""

    async def test() -> None:
        async with world(HASTY) as w:
            lease = await w.attach()
            for number in range(2, 8):
                await eventually(lambda number=number: w.lender.calls.count["Renew"] >= number)  # type: ignore[misc]
                w.lender.skew_s += 0.4 * w.lender.table.ttl_s
                w.lender.expire_due()
            w.lender.advance(lease.lease_id, 100, FIRST)
            assert await first_token(lease) == FIRST

    run(test)


def test_a_lease_that_is_not_followed_any_more_expires() -> None:
    """(1) Follow, stop following; (2) no renewal comes any more, the lease expires, and its watch is dropped."""

    async def test() -> None:
        async with world(HASTY) as w:
            lease = await w.attach()
            lease.close()
            lease.close()
            await asyncio.sleep(2 * HASTY.renew_interval_s)
            renewals = w.lender.calls.count["Renew"]  # at most one more was under way
            assert renewals <= 2
            await asyncio.sleep(2 * HASTY.renew_interval_s)
            w.lender.skew_s += w.lender.table.ttl_s
            w.lender.expire_due()
            assert w.state(lease.lease_id) is LeaseState.EXPIRED
            assert w.lender.service.num_watched == 0
            assert w.lender.calls.count["Renew"] == renewals

    run(test)


def test_the_end_of_a_lease_reaches_its_reader() -> None:
    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            waiting = asyncio.create_task(first_token(lease))
            w.lender.table.release(lease.lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()
            with pytest.raises(LeaseGone):
                await waiting
            with pytest.raises(LeaseGone):
                await wait_watermark(lease, 0)
            with pytest.raises(LeaseGone):
                await lease.commit(w.reader, SendCommit(2))

    run(test)


def test_a_broken_watch_is_reopened() -> None:
    """(1) The first streams break; (2) a later one brings the push."""

    async def test() -> None:
        async with world() as w:
            w.lender.calls.failures["Watch"] = 3
            lease = await w.attach()
            await eventually(lambda: w.lender.calls.count.get("Watch") == 4)
            w.lender.advance(lease.lease_id, 100, FIRST)
            assert await first_token(lease) == FIRST

    run(test)


def test_a_silent_lender_is_lost_long_before_its_leases_expire() -> None:
    """Some lost renewals change nothing; silence for longer than the bound ends the wait."""

    async def test() -> None:
        async with world(WATCHFUL) as w:
            lease = await w.attach()
            w.lender.calls.failures["Renew"] = 2
            await eventually(lambda: w.lender.calls.count["Renew"] > 4)
            w.lender.advance(lease.lease_id, 50)
            assert await wait_watermark(lease, 50) == 50
            await w.lender.stop()
            with pytest.raises(ReplicaLost, match="no answer"):
                await first_token(lease)
            await w.lender.serve()

    run(test)


def test_a_lender_that_takes_calls_and_answers_none_is_lost() -> None:
    """As one that was stopped: its kernel still accepts. (1) It answers late, and stays; (2) it answers no more."""

    async def test() -> None:
        async with world(WATCHFUL) as w:
            lease = await w.attach()
            w.lender.calls.delay_s["Renew"] = 0.5
            await eventually(lambda: w.lender.calls.count["Renew"] > 4)
            assert lease.error is None
            w.lender.calls.delay_s["Renew"] = 60.0
            with pytest.raises(ReplicaLost, match="no answer"):
                await first_token(lease)

    run(test)


def test_attaching_over_a_link_that_has_fallen_silent_has_the_same_bound() -> None:
    async def test() -> None:
        async with world(WATCHFUL) as w:
            (await w.attach()).close()
            w.lender.calls.delay_s["Renew"] = 60.0
            lease = await w.attach()
            assert isinstance(lease.error, ReplicaLost)

    run(test)


def test_a_commit_whose_reply_is_lost_is_repeated_to_the_same_answer() -> None:
    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            w.lender.advance(lease.lease_id, 100, FIRST)
            await first_token(lease)
            w.lender.calls.drop_replies["Commit"] = 2
            await lease.commit(w.reader, SendCommit(2))
            assert w.lender.calls.count["Commit"] == 3

    run(test)


def test_a_commit_that_gets_no_answer_is_not_a_commit() -> None:
    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            w.lender.advance(lease.lease_id, 100, FIRST)
            w.lender.calls.drop_replies["Commit"] = 3
            with pytest.raises(ReplicaLost, match="chaos"):
                await lease.commit(w.reader, SendCommit(2))

    run(test)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_commit_of_too_few_or_many_blocks_is_refused(blocks: int) -> None:
    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            w.lender.advance(lease.lease_id, 100, FIRST)
            with pytest.raises(LeaseGone):
                await lease.commit(w.reader, SendCommit(blocks))

    run(test)


def test_only_one_of_two_readers_commits() -> None:
    """Two binds of one lease on one worker: the second is told GONE."""

    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            one, two = [await w.client.attach(lease_id, ticket, deadline_s=30) for _ in range(2)]
            assert w.client.num_followed == 2
            w.lender.advance(lease_id, 100, FIRST)
            await asyncio.gather(first_token(one), first_token(two))
            await one.commit(w.reader, SendCommit(2))
            with pytest.raises(LeaseGone):
                await two.commit(ReaderId(w.reader.incarnation, 2), SendCommit(2))

    run(test)


def test_release_ends_the_lease_and_never_raises() -> None:
    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            w.lender.calls.failures["Release"] = 1
            await lease.release()
            assert w.lender.table.num_held == 1
            await lease.release()
            await lease.release()
            assert w.state(lease.lease_id) is LeaseState.RELEASED

    run(test)


def test_a_replaced_lender_is_lease_gone() -> None:
    """(1) A lender grants and dies; (2) another takes its port; (3) the old ticket is LeaseGone; (4) a new one works."""

    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            await w.lender.stop()
            successor = Lender(type(w.lender.peer)(w.lender.peer.fabric), ttl_s=30.0)
            await successor.serve(int(w.lender.address.rpartition(":")[2]))
            try:
                with pytest.raises(LeaseGone, match="is now"):
                    await w.client.attach(lease_id, ticket, deadline_s=30)
                assert w.client.num_peers == 0
                lease = await w.client.attach(*successor.grant((3,), 5), deadline_s=30)
                assert lease.watermark == 0
            finally:
                await successor.stop()
                await w.lender.serve()

    run(test)


def test_a_ticket_of_another_incarnation_than_the_lease_is_refused() -> None:
    async def test() -> None:
        async with world() as w:
            _, ticket = w.lender.grant((1, 2), 100)
            with pytest.raises(LeaseGone, match="not of"):
                await w.client.attach(LeaseId(new_incarnation(), 1), ticket, deadline_s=30)

    run(test)


def test_a_lender_that_is_not_there_fails_the_attach_and_is_tried_again_later() -> None:
    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            await w.lender.stop()
            attaches = [w.client.attach(lease_id, ticket, deadline_s=30) for _ in range(3)]
            outcomes = await asyncio.gather(*attaches, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [ReplicaLost] * 3
            assert w.client.num_peers == 0
            await w.lender.serve(int(w.lender.address.rpartition(":")[2]))
            assert (await w.client.attach(lease_id, ticket, deadline_s=30)).watermark == 0

    run(test)


def test_an_attach_past_its_deadline_leaves_nothing_followed() -> None:
    async def test() -> None:
        async with world() as w:
            never = asyncio.Event()
            w.connector.connect = lambda *_: never.wait()  # type: ignore[method-assign, assignment, return-value]
            with pytest.raises(DeadlineExceeded, match="not ready"):
                await asyncio.wait_for(w.client.attach(*w.lender.grant((1, 2), 100), deadline_s=0.05), 30)
            assert w.client.num_followed == 0

    run(test)


def test_a_wrong_cluster_token_is_incompatible() -> None:
    async def test() -> None:
        async with world(token="another cluster's") as w:
            with pytest.raises(IncompatiblePeer, match="token"):
                await w.attach()

    run(test)


def test_an_unused_link_is_closed() -> None:
    """(1) Idle for long: link and connection go; (2) while a lease is followed they stay; (3) attaching again works."""

    async def test() -> None:
        async with world(idle_close_s=0.05) as w:
            lease = await w.attach()
            await asyncio.sleep(0.2)
            assert w.client.num_peers == 1
            lease.close()
            await eventually(lambda: w.client.num_peers == 0)
            assert w.connector.disconnected == [w.lender.peer.incarnation]
            again = await w.attach()
            assert w.lender.calls.count["Handshake"] == 2
            again.close()

    run(test)


def test_closing_the_client_ends_what_is_followed() -> None:
    async def test() -> None:
        async with world() as w:
            lease = await w.attach()
            waiting = asyncio.create_task(first_token(lease))
            await asyncio.sleep(0)
            await w.client.close()
            with pytest.raises(ReplicaLost):
                await waiting
            with pytest.raises(ReplicaLost):
                await lease.commit(w.reader, SendCommit(2))
            await lease.release()
            with pytest.raises(ReplicaLost):
                await w.attach()

    run(test)


def test_a_watermark_past_the_prompt_is_refused() -> None:
    """A lender whose idea of the lease differs from the ticket's must not be read from."""

    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 90)
            w.lender.table._held[lease_id].prompt_len = 100
            lease = await w.client.attach(lease_id, ticket, deadline_s=30)
            w.lender.advance(lease_id, 100, FIRST)
            with pytest.raises(TransferFailed, match="watermark"):
                await first_token(lease)

    run(test)


# A commit in one call, by a reader that reads nothing itself ---------------------------------------------------------------


def test_a_commit_in_one_call_tells_token_0_also_when_its_answers_are_lost() -> None:
    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            w.lender.advance(lease_id, 100, FIRST)
            w.lender.calls.drop_replies["Commit"] = 2
            for reader in (w.reader, w.reader):  # also in a call of its own
                assert await w.client.commit(lease_id, ticket, reader, SendCommit(2), deadline_s=30) == FIRST
            with pytest.raises(LeaseGone):
                await w.client.commit(lease_id, ticket, ReaderId(w.reader.incarnation, 2), SendCommit(2), deadline_s=30)
            assert (w.client.num_peers, w.client.num_followed) == (1, 0)

    run(test)


def test_a_commit_in_one_call_of_what_is_not_lent_is_refused() -> None:
    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            with pytest.raises(LeaseGone):
                await w.client.commit(lease_id, ticket, w.reader, SendCommit(2), deadline_s=30)  # it is not computed
            w.lender.advance(lease_id, 100, FIRST)
            for changes in ({"mac": bytes(32)}, {"prompt_len": 101}, {"lease_counter": ticket.lease_counter + 1}):
                forged = replace(ticket, **changes)
                with pytest.raises(LeaseGone):
                    await w.client.commit(forged.lease_id, forged, w.reader, SendCommit(2), deadline_s=30)
            assert await w.client.commit(lease_id, ticket, w.reader, SendCommit(2), deadline_s=30) == FIRST

    run(test)


@pytest.mark.parametrize("call", ["Handshake", "Commit"])
def test_a_commit_in_one_call_ends_at_its_deadline(call: str) -> None:
    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            w.lender.advance(lease_id, 100, FIRST)
            w.lender.calls.delay_s[call] = 60.0
            with pytest.raises(DeadlineExceeded):
                await w.client.commit(lease_id, ticket, w.reader, SendCommit(2), deadline_s=0.3)

    run(test)


def test_a_commit_in_one_call_ends_with_its_client() -> None:
    async def test() -> None:
        async with world() as w:
            lease_id, ticket = w.lender.grant((1, 2), 100)
            w.lender.advance(lease_id, 100, FIRST)
            w.lender.calls.delay_s["Commit"] = 60.0
            waiting = asyncio.create_task(w.client.commit(lease_id, ticket, w.reader, SendCommit(2), deadline_s=30))
            await eventually(lambda: w.lender.calls.count.get("Commit", 0) == 1)
            await w.client.close()
            with pytest.raises(ReplicaLost):
                await waiting

    run(test)
