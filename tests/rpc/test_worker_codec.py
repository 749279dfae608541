"""The state of a worker has one shape: each field of it crosses the wire, and every message of a worker embeds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.blocks import BlockCounts
from pdserve.core.limits import field_types
from pdserve.core.sampling import SamplingParams
from pdserve.core.speculation import MAX_DRAFTS, NO_COUNTS, DraftCounts
from pdserve.core.worker import MOST_HOT, ExpertLoad, HotExpert, Role, WorkerHello, WorkerLoad
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot
from pdserve.rpc import codec
from pdserve.rpc.codec import FieldCodec
from pdserve.rpc.v1 import common_pb2, inference_pb2, link_pb2
from router.grpc.cluster_state import cluster_state_to_wire

NUMBERS = st.integers(0, (1 << 31) - 1)
FLOATS = st.floats(0, 1e9)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: NUMBERS,
    float: FLOATS,
    str: st.text(st.characters(codec="utf-8"), min_size=1),
    tuple[str, ...]: st.lists(st.text(st.characters(codec="utf-8"), min_size=1)).map(tuple),
    Role: st.sampled_from(Role),
    ExpertLoad | None: st.none()
    | st.builds(
        ExpertLoad,
        NUMBERS,
        FLOATS,
        FLOATS,
        st.lists(st.builds(HotExpert, NUMBERS, NUMBERS, FLOATS), max_size=MOST_HOT).map(tuple),
    ),
    DraftCounts | None: st.none()
    | st.builds(DraftCounts, NUMBERS, NUMBERS, NUMBERS, st.lists(NUMBERS, max_size=MAX_DRAFTS).map(tuple)),
    BlockCounts: st.lists(st.integers(0, 1 << 20), min_size=4, max_size=4).map(lambda n: BlockCounts(sum(n), *n)),
}


def built(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Return values in which every field varies, so that a new field needs no line here."""
    types = {name: getattr(one, "__supertype__", one) for name, one in field_types(kind).items()}
    return st.builds(kind, **{name: VALUES[one] for name, one in types.items()})


@given(built(WorkerHello))
def test_every_field_that_does_not_change_crosses_the_wire(hello: WorkerHello) -> None:
    wire = common_pb2.WorkerHello.FromString(codec.hello_to_wire(hello).SerializeToString())
    assert codec.hello_from_wire(wire) == hello


@given(built(WorkerLoad))
def test_every_field_of_a_load_crosses_the_wire(load: WorkerLoad) -> None:
    wire = common_pb2.WorkerLoad.FromString(codec.load_to_wire(load).SerializeToString())
    assert codec.load_from_wire(wire) == load


@given(built(WorkerHello), built(WorkerLoad))
def test_operators_see_the_same_messages_that_the_worker_sent(hello: WorkerHello, load: WorkerLoad) -> None:
    snapshot = WorkerSnapshot(hello, load, 0.5, 3, draining=True, not_ready_reason="it drains")
    (state,) = cluster_state_to_wire(ClusterSnapshot(1, 0, 0, (snapshot,)), 16).workers
    sent = link_pb2.WorkerMessage(hello=codec.hello_to_wire(hello)), link_pb2.WorkerMessage(heartbeat=codec.load_to_wire(load))
    assert (state.hello, state.load) == (sent[0].hello, sent[1].heartbeat)
    assert (state.ready, state.draining, state.heartbeat_age_s, state.requests_placed) == (False, True, 0.5, 3)


def test_a_negative_count_of_lost_blocks_is_told_as_none() -> None:
    """More blocks than there are is a bug of ours as well, but uint32 cannot hold it, and a worker must go on beating."""
    assert codec.load_to_wire(WorkerLoad(BlockCounts(4, 5, 0, 0, 0))).blocks.unaccounted == 0


def test_a_worker_that_names_more_hot_experts_than_it_may_is_cut() -> None:
    many = ExpertLoad(1, 1.0, 1.0, (HotExpert(1, 2, 3.0),) * (MOST_HOT + 5))
    wire = codec.load_to_wire(WorkerLoad(BlockCounts(4, 4, 0, 0, 0), experts=many))
    assert codec.load_from_wire(wire).experts == ExpertLoad(1, 1.0, 1.0, many.hottest[:MOST_HOT])


def test_a_worker_that_drafts_and_has_not_drafted_yet_is_no_worker_that_does_not() -> None:
    wire = codec.load_to_wire(WorkerLoad(BlockCounts(4, 4, 0, 0, 0), speculation=DraftCounts()))
    assert codec.load_from_wire(common_pb2.WorkerLoad.FromString(wire.SerializeToString())).speculation == DraftCounts()


def older(message: type[Message], leaves_out: Mapping[str, str]) -> type[Message]:
    """Return the message as a release has it that lacks some fields: their names by those of their messages."""
    pool = DescriptorPool()
    files = {file.name: file for root in (link_pb2, common_pb2) for file in (root.DESCRIPTOR, *root.DESCRIPTOR.dependencies)}
    for file in sorted(files.values(), key=lambda one: len(one.dependencies)):
        copied = FileDescriptorProto()
        file.CopyToProto(copied)
        for one in copied.message_type:
            for field in [field for field in one.field if leaves_out.get(one.name) == field.name]:
                one.field.remove(field)
            if one.name in leaves_out:  # `optional` gives each field a oneof of its own
                del one.oneof_decl[:]
                for field in one.field:
                    field.ClearField("oneof_index")
                    field.ClearField("proto3_optional")
        pool.Add(copied)
    return GetMessageClass(pool.FindMessageTypeByName(message.DESCRIPTOR.full_name))


def test_a_side_of_an_older_release_reads_what_it_knows_beside_drafts() -> None:
    """A router without drafts takes a row and a heartbeat of a worker that tells of them, and the other way round."""
    counts = common_pb2.DraftCounts(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=2, num_accepted_tokens_per_pos=(1, 1))
    lacks = {"StepRow": "speculation", "WorkerLoad": "speculation"}
    row = link_pb2.StepRow(handle=3, index=2, ids=[7], text=b"x", speculation=counts)
    load = common_pb2.WorkerLoad(running_sequences=4, speculation=counts)
    for whole, name in ((row, "ids"), (load, "running_sequences")):
        made = older(type(whole), lacks)
        assert "speculation" not in made.DESCRIPTOR.fields_by_name
        read = made.FromString(whole.SerializeToString())
        assert getattr(read, name) == getattr(whole, name)
        read.DiscardUnknownFields()
        back = type(whole).FromString(read.SerializeToString())
        assert not back.HasField("speculation")
        assert DraftCounts.told(back.speculation) == NO_COUNTS


@pytest.mark.parametrize("message", [common_pb2.WorkerLoad, inference_pb2.WorkerState])
def test_a_message_that_lacks_a_field_of_its_dataclass_is_found_at_once(message: type[Any]) -> None:
    with pytest.raises(AssertionError, match="SamplingParams and its message differ"):
        FieldCodec(SamplingParams, message)
