"""Direct requests beside those of the router: the same role serves both, and neither hears or loses what is the other's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from test_role_steps import FIRST, Bench, bench, bind, cancel, prefill, run

from decode_worker.role import DecodeRole
from pdserve.core.block_hash import prompt_hash
from pdserve.core.errors import Overloaded, Unavailable
from pdserve.core.ids import FIRST_DIRECT_HANDLE, BlockId, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.engine.schedule.collect import Advance, OutputToken
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.worker.host import Host, HostedRole, request_hash
from pdserve.worker.messages import Lent, ReserveResult, ReturnLease, StepEvents
from pdserve.worker.openengine.direct import DirectRequest, DirectRequests, Ending
from prefill_worker.role import PrefillRole

SPEC = RequestSpec((5, 6, 7), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))


def both(make_role: Callable[[Host], HostedRole[Any]]) -> tuple[Bench, DirectRequests]:
    """Make a role whose answers part, and that has one request of the router."""
    directs: list[DirectRequests] = []

    def make(host: Host) -> HostedRole[Any]:
        directs.append(DirectRequests(host.send, max_num_seqs=2))
        host.send = directs[0].send
        return make_role(host)

    made = bench(make)
    directs[0].role = made.role
    return made, directs[0]


def opened(directs: DirectRequests, name: str = "r") -> DirectRequest:
    request = directs.open(name, asyncio.get_running_loop().time() + 60)
    assert request is not None
    return request


def told(request: DirectRequest) -> list[Any]:
    """Return what a request was told until now."""
    queue = request._told
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_answers_part_by_their_handles() -> None:
    """(1) A request of the router and a direct one share a step. (2) Each side gets its own row. (3) So in a step of one."""

    async def story() -> None:
        worker, directs = both(DecodeRole)
        worker.role.on_command(bind(FIRST))
        request = opened(directs)
        directs.bind(request, SPEC, 60.0, local_prefill=True)
        worker.role.on_step(StepEvents(reserved=tuple(ReserveResult(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2))))
        worker.role.on_step(StepEvents(tokens=tuple(OutputToken(SeqId(seq), 0, 3, None) for seq in (1, 2))))
        worker.role.on_step(StepEvents(tokens=(OutputToken(SeqId(2), 1, 3, None),)))
        reserved, *rows = told(request)
        assert reserved.handle == request.handle == FIRST_DIRECT_HANDLE
        assert [row.index for row in rows] == [0, 1]
        assert worker.rows() == [(FIRST, 0)]
        assert [m.reserved.handle for m in worker.said if m.HasField("reserved")] == [FIRST]
        assert len(worker.said) == 2, "no empty batch goes to the router"
        assert directs.role is not None
        worker.role.drop_all()
        assert worker.role.idle

    run(story)


@pytest.mark.parametrize("make_role", [DecodeRole, PrefillRole])
def test_a_lost_link_costs_the_requests_of_the_router_alone(make_role: Any) -> None:
    """The count of commands that the router asks for knows nothing of direct ones, either."""

    async def story() -> None:
        worker, directs = both(make_role)
        request = opened(directs)
        if make_role is DecodeRole:
            worker.role.on_command(bind(FIRST))
            directs.bind(request, SPEC, 60.0, local_prefill=True)
        else:
            worker.role.on_command(prefill(FIRST))
            directs.prefill(request, SPEC)
        host = worker.role._host
        assert host.counted.last_handle(SeqId(2)) == FIRST
        worker.role.on_link_lost()
        assert not worker.role.has(FIRST)
        assert worker.role.has(request.handle)
        assert not worker.role.idle
        directs.end(request, cancel=True)
        assert worker.role.idle
        await worker.role.close()

    run(story)


def test_a_constraint_that_is_compiled_outlives_a_lost_link() -> None:
    async def story() -> None:
        worker, directs = both(DecodeRole)
        request = opened(directs)
        spec = RequestSpec(SPEC.prompt_ids, SPEC.sampling, constraint=Constraint(ConstraintKind.REGEX, "a"))
        directs.bind(request, spec, 60.0, local_prefill=True)
        worker.role.on_link_lost()
        failed = await request.next()
        assert isinstance(failed, link_pb2.RequestFailed), "this role compiles none, and says so"
        await worker.role.close()

    run(story)


def test_a_lease_that_ends_before_token_0_is_told_and_one_that_is_computed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1) Each chunk renews the lease, since nobody reads it yet. (2) When it expires all the same, the request is told."""

    async def story() -> None:
        worker, directs = both(PrefillRole)
        role: Any = worker.role
        now = [0.0]
        monkeypatch.setattr(role, "_clock", lambda: now[0])
        request = opened(directs)
        directs.prefill(request, SPEC)
        role.on_step(StepEvents(lent=(Lent(SeqId(1), ((BlockId(1),),)),)))
        ttl_s = role._table.ttl_s
        for computed in (1, 2):
            now[0] += 0.75 * ttl_s
            role.on_step(StepEvents(advanced=(Advance(SeqId(1), computed),)))
            role.on_tick()
        assert role.leases_held == 1
        now[0] += 1.5 * ttl_s
        role.on_tick()
        assert role.leases_held == 0
        started, failed = told(request)
        assert started.ticket
        assert failed.reason == common_pb2.ERROR_REASON_LEASE_GONE
        assert worker.commands.count(ReturnLease(SeqId(1))) == 1
        assert worker.said == [], "the router hears of none of it"
        assert role.idle

    run(story)


def test_requests_are_bounded_and_their_names_are_their_own() -> None:
    async def story() -> None:
        worker, directs = both(DecodeRole)
        first = opened(directs, "a")
        assert directs.open("a", 0) is None
        others = [opened(directs, f"b{i}") for i in range(directs.limit - 1)]
        with pytest.raises(Overloaded, match="8 direct requests"):
            directs.open("c", 0)
        assert (directs.abort("a"), directs.abort("nobody")) == (True, None)
        assert told(first) == [Ending.ABORTED]
        directs.end(first, cancel=True)
        assert directs.abort("a") is False
        assert len({one.handle for one in (first, *others)}) == directs.limit
        directs.close()
        assert all(told(one) == [Ending.CLOSED] for one in others)
        with pytest.raises(Unavailable):
            directs.open("d", 0)
        assert worker.said == []

    run(story)


def test_the_router_is_never_answered_for_a_handle_that_is_not_its_own() -> None:
    """A direct request that has ended may still be answered by a step that was under way."""

    async def story() -> None:
        worker, directs = both(DecodeRole)
        request = opened(directs)
        directs.bind(request, SPEC, 60.0, local_prefill=True)
        directs.end(request, cancel=False)
        worker.role.on_step(StepEvents(reserved=(ReserveResult(SeqId(1), ((BlockId(1),),)),)))
        worker.role.on_step(StepEvents(tokens=(OutputToken(SeqId(1), 0, 3, None),)))
        assert worker.said == []
        worker.role.on_command(cancel(request.handle))
        assert worker.role.idle

    run(story)


def test_a_drained_worker_refuses_a_direct_request_also_without_a_router() -> None:
    async def story() -> None:
        for make_role in (DecodeRole, PrefillRole):
            worker, directs = both(make_role)
            worker.role._host.draining = True
            request = opened(directs)
            if make_role is DecodeRole:
                directs.bind(request, SPEC, 60.0, local_prefill=True)
            else:
                directs.prefill(request, SPEC)
            (answer,) = told(request)
            assert isinstance(answer, link_pb2.Refused)

    run(story)


def test_the_name_of_a_prompt_covers_the_constraint() -> None:
    """Under another constraint than that of token 0 an output may have ended before it goes on."""
    ids, forms = b"\x05\0\0\0", [Constraint(ConstraintKind.REGEX, "a"), Constraint(ConstraintKind.REGEX, "b"), None]
    specs = [RequestSpec((5,), SPEC.sampling, constraint=one, cache_salt=salt) for one in forms for salt in ("", "s")]
    assert len({request_hash(ids, one) for one in specs}) == len(specs)
    assert request_hash(ids, RequestSpec((5,), SPEC.sampling)) == prompt_hash(ids, "")
