"""What one engine step means to the requests of a role, with the engine's side played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from decode_worker.role import DecodeRole
from kvtransfer.api import KvRegion, Region
from pdserve.config import WorkerConfig
from pdserve.core.ids import BlockId, Incarnation, SeqId
from pdserve.core.kv_layout import KvSpec, Shortage
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, SamplingParams
from pdserve.core.speculation import DraftCounts
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.engine.schedule.collect import Advance, OutputToken
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, decode_pb2, link_pb2, prefill_pb2
from pdserve.worker.host import Host, HostedRole, OutputStream, WorkKind, WorkStories
from pdserve.worker.messages import Abort, Command, Lent, ReserveResult, ReturnLease, StepEvents
from prefill_worker.role import PrefillRole
from router.core.events import LinkId, NoRoom
from router.workers.wire import event_from_wire
from sim.faults.oracle import CARD, MAX_MODEL_LEN, TOKENIZER
from sim.faults.worker import LAYOUT
from sim.world.server import FakeServer

FIRST, SECOND = 11, 12
"""Handles; the first is the one that breaks."""
PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
SPEC = codec.spec_to_wire(RequestSpec(PROMPT, PARAMS))


@dataclass
class Bench:
    """A role on a host that only notes what it is told."""

    role: HostedRole
    commands: list[Command] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)

    def rows(self) -> list[tuple[int, int]]:
        return [(row.handle, row.index) for m in self.said if m.HasField("step_batch") for row in m.step_batch.rows]

    def failures(self) -> list[tuple[int, int]]:
        failed = [m.request_failed for m in self.said if m.HasField("request_failed")]
        return [(one.handle, one.reason) for one in failed]


def bench(make_role: Callable[[Host], HostedRole]) -> Bench:
    made = Bench(cast(Any, None))
    host = Host(
        config=WorkerConfig("w", "router:1"),
        card=CARD,
        kv_spec=KvSpec((LAYOUT,)),
        regions=(KvRegion.of(LAYOUT, Region(1 << 20, 16, LAYOUT.block_bytes)),),
        tokenizer=TOKENIZER,
        max_model_len=MAX_MODEL_LEN,
        incarnation=Incarnation(7),
        transport="nixl",
        transfer=cast(Any, None),
        agent_metadata=b"",
        address="w:1",
        server=cast(Any, FakeServer()),
        submit=made.commands.append,
        send=made.said.append,
    )
    made.role = make_role(host)
    return made


def bind(handle: int) -> link_pb2.RouterMessage:
    command = decode_pb2.Bind(handle=handle, spec=SPEC, local_prefill=True)
    return link_pb2.RouterMessage(bind=command)


def prefill(handle: int) -> link_pb2.RouterMessage:
    return link_pb2.RouterMessage(prefill=prefill_pb2.Prefill(handle=handle, spec=SPEC))


def cancel(handle: int) -> link_pb2.RouterMessage:
    return link_pb2.RouterMessage(cancel=link_pb2.Cancel(handle=handle))


def break_at(patch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def planted(self: Any, *args: Any, **fields: Any) -> Any:
        if broken(self, *args):
            raise ValueError("planted")
        return real(self, *args, **fields)

    patch.setattr(owner, name, planted)


def of_first(stream: OutputStream, *_: Any) -> bool:
    return stream._handle == FIRST


def tokens(index: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(SeqId(seq), index, 3, None) for seq in (1, 2))


BUG = common_pb2.ERROR_REASON_INTERNAL_BUG


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_token_whose_text_fails_costs_its_request_and_no_other_row_of_the_step(monkeypatch):
    """(1) Two requests decode. (2) The text of one token raises. (3) That request fails; the other's row goes out, with
    those of later steps."""

    async def story() -> None:
        decode = bench(DecodeRole)
        for handle in (FIRST, SECOND):
            decode.role.on_command(bind(handle))
        decode.role.on_step(StepEvents(reserved=tuple(ReserveResult(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2))))
        decode.role.on_step(StepEvents(tokens=tokens(0)))
        break_at(monkeypatch, OutputStream, "push", of_first)
        decode.role.on_step(StepEvents(tokens=tokens(1)))
        decode.role.on_step(StepEvents(tokens=tokens(2)))
        assert decode.rows() == [(FIRST, 0), (SECOND, 0), (SECOND, 1), (SECOND, 2)]
        assert decode.failures() == [(FIRST, BUG)]
        assert decode.commands[-1] == Abort(SeqId(1))
        last = OutputToken(SeqId(2), 3, 3, FinishReason.LENGTH)
        decode.role.on_step(StepEvents(tokens=(last,)))
        assert decode.role.idle
        await decode.role.close()

    run(story)


def test_the_last_token_takes_the_drafts_of_its_request_along_whoever_knows_that_it_is_the_last():
    """(1) The engine knows of one request's end, and tells of the drafts of both with every token: it does not know which one
    completes a stop string. (2) Only the rows with an end have them."""
    counts = {1: DraftCounts(2, 8, 5, (2, 2, 1)), 2: DraftCounts(1, 4, 0)}

    async def story() -> None:
        decode = bench(DecodeRole)
        stopping = codec.spec_to_wire(
            RequestSpec(PROMPT, SamplingParams(max_tokens=9, stop=(TOKENIZER.token_bytes(3).decode(),)))
        )
        for handle, spec in ((FIRST, stopping), (SECOND, SPEC)):
            bound = decode_pb2.Bind(handle=handle, spec=spec, local_prefill=True)
            decode.role.on_command(link_pb2.RouterMessage(bind=bound))
        decode.role.on_step(StepEvents(reserved=tuple(ReserveResult(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2))))
        drawn = [
            OutputToken(SeqId(1), 0, 4, None, speculation=counts[1]),
            OutputToken(SeqId(1), 1, 3, None, speculation=counts[1]),
            OutputToken(SeqId(1), 2, 4, None, speculation=counts[1]),  # it was right as well, and comes after the stop string
            OutputToken(SeqId(2), 0, 4, None, speculation=counts[2]),
            OutputToken(SeqId(2), 1, 4, FinishReason.LENGTH, speculation=counts[2]),
        ]
        decode.role.on_step(StepEvents(tokens=tuple(drawn)))
        rows = [row for m in decode.said if m.HasField("step_batch") for row in m.step_batch.rows]
        told = [(row.handle, row.index, DraftCounts.told(row.speculation)) for row in rows if row.HasField("speculation")]
        assert told == [(FIRST, 1, counts[1]), (SECOND, 1, counts[2])]
        assert decode.commands[-1] == Abort(SeqId(1))
        assert decode.role.idle
        await decode.role.close()

    run(story)


def test_a_reservation_that_fails_costs_its_request_and_no_other_of_the_step(monkeypatch):
    async def story() -> None:
        decode = bench(DecodeRole)
        for handle in (FIRST, SECOND):
            decode.role.on_command(bind(handle))
        break_at(monkeypatch, DecodeRole, "_reserved", lambda role, request, result: request.handle == FIRST)
        decode.role.on_step(
            StepEvents(
                reserved=tuple(ReserveResult(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2)),
                tokens=(OutputToken(SeqId(2), 0, 3, None),),
            )
        )
        assert [m.reserved.handle for m in decode.said if m.HasField("reserved")] == [SECOND]
        assert decode.rows() == [(SECOND, 0)]
        assert decode.failures() == [(FIRST, BUG)]
        await decode.role.close()

    run(story)


@pytest.mark.parametrize("fails_at", [WorkKind.FINISHED, WorkKind.NO_ROOM])
def test_a_request_whose_end_fails_is_reported_and_forgotten(monkeypatch, fails_at):
    """(1) The last token of a request comes, or its reservation is refused. (2) What its story should say raises. (3) The
    router hears that the request failed, and the other request of the step gets what is its own."""

    async def story() -> None:
        decode = bench(DecodeRole)
        for handle in (FIRST, SECOND):
            decode.role.on_command(bind(handle))
        refused = fails_at is WorkKind.NO_ROOM
        reserved = (ReserveResult(SeqId(1), None if refused else ((BlockId(1),),)), ReserveResult(SeqId(2), ((BlockId(2),),)))
        name = decode.role._by_handle[FIRST].request_id
        decode.role._by_handle[SECOND].request_id = "other"
        break_at(monkeypatch, WorkStories, "note", lambda self, request_id, kind: request_id == name and kind is fails_at)
        decode.role.on_step(StepEvents(reserved=reserved))
        if not refused:
            decode.role.on_step(StepEvents(tokens=tuple(OutputToken(SeqId(n), 0, 3, FinishReason.LENGTH) for n in (1, 2))))
            assert decode.rows() == [(SECOND, 0)]
        assert decode.failures() == [(FIRST, BUG)]
        assert FIRST not in decode.role._by_handle
        await decode.role.close()

    run(story)


@pytest.mark.parametrize("role", [DecodeRole, PrefillRole])
def test_a_loss_that_cannot_be_reported_keeps_no_other_loss_from_its_router(monkeypatch, role):
    async def story() -> None:
        worker = bench(role)
        for handle in (FIRST, SECOND):
            worker.role.on_command(bind(handle) if role is DecodeRole else prefill(handle))
        break_at(monkeypatch, role, "_fail", lambda self, request, error: request.handle == FIRST)
        worker.role.on_step(StepEvents(failed=(SeqId(1), SeqId(2))))
        assert worker.failures() == [(SECOND, common_pb2.ERROR_REASON_NUMERICAL_ERROR)]
        await worker.role.close()

    run(story)


@pytest.mark.parametrize("failing", ["grant", "advance", "token"])
def test_a_prefill_that_fails_tells_why_before_its_lease_ends_and_leaves_the_others_of_the_step_alone(monkeypatch, failing):
    """Wherever in the step it fails: its blocks carry a lease's references, which go back exactly once, when the router has
    heard of the failure."""

    async def story() -> None:
        lender = bench(PrefillRole)
        for handle in (FIRST, SECOND):
            lender.role.on_command(prefill(handle))
        if failing == "grant":
            break_at(monkeypatch, PrefillRole, "_ticket", lambda role, lease_id, lent, request: lent.seq_id == 1)
        elif failing == "advance":
            break_at(monkeypatch, PrefillRole, "_advance", lambda role, request, computed: request.handle == FIRST)
        else:
            break_at(monkeypatch, OutputStream, "push", of_first)
        lender.role.on_step(StepEvents(lent=tuple(Lent(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2))))
        lender.role.on_step(StepEvents(advanced=tuple(Advance(SeqId(seq), 2) for seq in (1, 2))))
        lender.role.on_step(StepEvents(tokens=tokens(0)))
        assert lender.rows() == [(SECOND, 0)]
        assert lender.failures() == [(FIRST, BUG)]
        assert lender.role.leases_held == 2
        lender.role.on_command(cancel(FIRST))
        assert lender.commands.count(ReturnLease(SeqId(1))) == 1
        assert lender.commands.count(Abort(SeqId(1))) == 1
        assert lender.role.leases_held == 1
        lender.role.on_link_lost()
        assert lender.role.idle
        assert lender.commands.count(ReturnLease(SeqId(2))) == 1
        await lender.role.close()

    run(story)


@pytest.mark.parametrize("role", [DecodeRole, PrefillRole])
def test_a_sequence_without_numbers_fails_its_request_and_no_other_of_the_step(role):
    async def story() -> None:
        worker = bench(role)
        for handle in (FIRST, SECOND):
            worker.role.on_command(bind(handle) if role is DecodeRole else prefill(handle))
        worker.role.on_step(
            StepEvents(
                lent=() if role is DecodeRole else tuple(Lent(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2)),
                reserved=tuple(ReserveResult(SeqId(seq), ((BlockId(seq),),)) for seq in (1, 2)) if role is DecodeRole else (),
                failed=(SeqId(1),),
                tokens=(OutputToken(SeqId(2), 0, 3, None),),
            )
        )
        assert worker.rows() == [(SECOND, 0)]
        assert worker.failures() == [(FIRST, common_pb2.ERROR_REASON_NUMERICAL_ERROR)]
        worker.role.on_link_lost()
        assert worker.commands.count(ReturnLease(SeqId(1))) == (role is PrefillRole)
        assert worker.role.idle
        await worker.role.close()

    run(story)


def test_tokens_of_a_sequence_that_fails_in_the_same_step_come_before_its_failure():
    """Right drafts before a row without numbers: the tokens are good, and a replay starts behind them."""

    async def story() -> None:
        worker = bench(DecodeRole)
        worker.role.on_command(bind(FIRST))
        worker.role.on_step(StepEvents(reserved=(ReserveResult(SeqId(1), ((BlockId(1),),)),)))
        worker.role.on_step(StepEvents(failed=(SeqId(1),), tokens=(OutputToken(SeqId(1), 0, 3, None),)))
        kinds = [message.WhichOneof("body") for message in worker.said]
        assert kinds[-2:] == ["step_batch", "request_failed"]
        assert worker.rows() == [(FIRST, 0)]
        await worker.role.close()

    run(story)


def test_a_grant_that_fails_before_there_is_a_lease_returns_the_references_too(monkeypatch):
    async def story() -> None:
        lender = bench(PrefillRole)
        lender.role.on_command(prefill(FIRST))
        break_at(monkeypatch, PrefillRole, "_grant", lambda role, request, lent: True)
        lender.role.on_step(StepEvents(lent=(Lent(SeqId(1), ((BlockId(1),),)),)))
        assert lender.commands[1:] == [Abort(SeqId(1)), ReturnLease(SeqId(1))]
        assert lender.failures() == [(FIRST, BUG)]
        assert lender.role.idle
        await lender.role.close()

    run(story)


def attach(handle: int) -> link_pb2.RouterMessage:
    return link_pb2.RouterMessage(attach=decode_pb2.Attach(handle=handle))


FOREIGN = [(PrefillRole, bind), (PrefillRole, attach), (DecodeRole, prefill)]


@pytest.mark.parametrize(("role", "command"), FOREIGN, ids=lambda item: item.__name__)
def test_a_command_of_the_other_role_fails_its_request_and_touches_nothing(role, command):
    """A router that knows a worker by its last role must hear of it: a request without an answer would wait for ever."""

    async def story() -> None:
        made = bench(role)
        made.role.on_command(command(FIRST))
        assert made.failures() == [(FIRST, common_pb2.ERROR_REASON_UNAVAILABLE)]
        assert made.commands == []
        assert made.role.idle
        await made.role.close()

    asyncio.run(story())


@pytest.mark.parametrize("role", [PrefillRole, DecodeRole])
def test_a_command_of_a_newer_router_is_no_request(role):
    async def story() -> None:
        made = bench(role)
        made.role.on_command(link_pb2.RouterMessage())
        assert made.said == []
        await made.role.close()

    asyncio.run(story())


@pytest.mark.parametrize("command", [bind, prefill])
def test_a_worker_that_drains_refuses_and_begins_nothing(command):
    """A router that knows no `Refused` is told in the way that it knows."""

    async def story() -> None:
        for link_version, answer in ((0, "no_room" if command is bind else "request_failed"), (1, "refused")):
            worker = bench(DecodeRole if command is bind else PrefillRole)
            host = cast(Any, worker.role)._host
            host.draining, host.link_version = True, link_version
            worker.role.on_command(command(FIRST))
            (said,) = worker.said
            assert said.WhichOneof("body") == answer
            assert getattr(said, answer).handle == FIRST
            assert not worker.commands
            assert worker.role.idle

    run(story)


@pytest.mark.parametrize("command", [bind, prefill])
@pytest.mark.parametrize("drains", [True, False])
def test_a_worker_that_drains_while_a_grammar_is_compiled_begins_nothing(command, drains):
    """The request had come before the drain, and the router hears that nothing has begun."""

    async def story() -> None:
        worker = bench(DecodeRole if command is bind else PrefillRole)
        role = cast(Any, worker.role)
        role._compilations._start_grammar = lambda constraint: None
        message = command(FIRST)
        constrained = RequestSpec(PROMPT, PARAMS, constraint=Constraint(ConstraintKind.REGEX, "a"))
        getattr(message, message.WhichOneof("body")).spec.CopyFrom(codec.spec_to_wire(constrained))
        role.on_command(message)
        assert not role.idle
        role._host.draining, role._host.link_version = drains, 1
        await asyncio.gather(*role._compilations._tasks.values())
        assert [said.WhichOneof("body") for said in worker.said] == ["refused"] * drains
        assert len(worker.commands) == 1 - drains
        assert role.idle == drains
        await role.close()

    run(story)


def test_a_refused_bind_names_the_kv_group_that_has_no_room():
    """(1) The engine has no room in its second group. (2) NoRoom says so, in a form that the router reads. (3) Without a slot
    for a sequence, it names no group."""

    async def story() -> None:
        decode = bench(DecodeRole)
        lacking = Shortage(1, 70, 12, window=1024)
        for handle, seq, shortage in ((FIRST, 1, lacking), (SECOND, 2, None)):
            decode.role.on_command(bind(handle))
            decode.role.on_step(StepEvents(reserved=(ReserveResult(SeqId(seq), None, shortage=shortage),)))
        heard = [event_from_wire(LinkId(1), said) for said in decode.said]
        assert [(type(event), event.handle, event.shortage) for event in heard if isinstance(event, NoRoom)] == [
            (NoRoom, FIRST, lacking),
            (NoRoom, SECOND, None),
        ]
        assert decode.role.idle
        await decode.role.close()

    run(story)
