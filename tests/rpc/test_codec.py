"""What crosses the wire comes back equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Incarnation, LeaseId, ReaderId
from pdserve.core.lease import FirstToken, LeaseView
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FINISH_BY_NUMBER, FinishReason, Placement, SamplingParams, TokenLogprobs, unpack_logprobs
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, peer_pb2

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
FINISH = st.none() | st.sampled_from(FinishReason)
LEASE_IDS = st.builds(LeaseId, U64.map(Incarnation), U64)


@st.composite
def sampling(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 1 << 31))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.just(0.0) | st.floats(1e-6, 2)),
        top_k=draw(st.integers(0, 1 << 31)),
        top_p=draw(st.floats(1e-6, 1)),
        min_p=draw(st.just(0.0) | st.floats(1e-6, 1)),
        seed=draw(U64),
        stop=tuple(draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=9), max_size=16))),
        stop_token_ids=tuple(draw(st.lists(U32, max_size=8))),
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0.01, 2)),
        logit_bias=tuple(sorted(draw(st.dictionaries(U32, st.floats(-100, 100), max_size=8)).items())),
        logprobs=draw(st.none() | st.integers(0, 20)),
    )


@given(sampling())
def test_sampling(params: SamplingParams) -> None:
    spec = RequestSpec((), params)
    wire = common_pb2.RequestSpec.FromString(codec.spec_to_wire(spec).SerializeToString())
    assert codec.spec_from_wire(wire) == spec


F32 = st.floats(-9999, 0, width=32)


@given(st.integers(0, 3).flatmap(lambda n: st.lists(st.tuples(F32, st.lists(st.tuples(U32, F32), min_size=n, max_size=n)))))
def test_logprobs(tokens: list[tuple[float, list[tuple[int, float]]]]) -> None:
    given_ones = tuple(TokenLogprobs(value, tuple(top)) for value, top in tokens)
    wire = codec.logprobs_to_wire(given_ones)
    assert (wire is None) == (not given_ones)
    wire = common_pb2.Logprobs.FromString(wire.SerializeToString()) if wire is not None else common_pb2.Logprobs()
    assert unpack_logprobs(wire, len(given_ones)) == given_ones


@pytest.mark.parametrize(
    ("chosen", "ids", "top"), [([], [], []), ([-1.0], [], []), ([-1.0] * 2, [1], [-1.0]), ([-1.0] * 2, [1], [-1.0, -2.0])]
)
def test_logprobs_of_another_number_of_tokens_are_refused(chosen: list[float], ids: list[int], top: list[float]) -> None:
    wire = common_pb2.Logprobs(chosen=chosen, top_ids=ids, top=top)
    with pytest.raises(ValueError, match=r"expected|zip"):
        unpack_logprobs(wire, 2)


def test_sampling_of_a_peer_is_checked() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        codec.spec_from_wire(common_pb2.RequestSpec())


@given(st.lists(U32))
def test_token_ids(ids: list[int]) -> None:
    packed = codec.pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert packed == b"".join(i.to_bytes(4, "little") for i in ids)
    assert codec.unpack_ids(packed) == tuple(ids)


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_half_a_token_id_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        codec.unpack_ids(b"x" * length)


@given(FINISH)
def test_finish_reasons(reason: FinishReason | None) -> None:
    assert codec.finish_from_wire(codec.finish_to_wire(reason)) is reason


@pytest.mark.parametrize("placement", [None, *Placement])
def test_placements(placement: Placement | None) -> None:
    assert codec.placement_from_wire(codec.placement_to_wire(placement)) is placement


def test_enums_are_mapped_whole() -> None:
    assert {codec.placement_to_wire(p) for p in [None, *Placement]} == set(common_pb2.Placement.values())
    assert {codec.finish_to_wire(r) for r in [None, *FinishReason]} == set(common_pb2.FinishReason.values())
    for read in (codec.placement_from_wire, codec.finish_from_wire):
        with pytest.raises(KeyError):
            read(77)


@given(LEASE_IDS, st.builds(ReaderId, U64.map(Incarnation), U64))
def test_lease_and_reader_ids(lease_id: LeaseId, reader_id: ReaderId) -> None:
    assert codec.lease_id_from_wire(codec.lease_id_to_wire(lease_id)) == lease_id
    assert codec.reader_id_from_wire(codec.reader_id_to_wire(reader_id)) == reader_id


@given(st.builds(LeaseView, LEASE_IDS, st.booleans(), U32, st.none() | st.builds(FirstToken, U32, FINISH)))
def test_lease_views(view: LeaseView) -> None:
    wire = peer_pb2.LeaseStatus.FromString(codec.lease_view_to_wire(view).SerializeToString())
    assert codec.lease_view_from_wire(wire) == view


def test_finish_reasons_have_the_numbers_of_the_wire() -> None:
    """The router's core reads them by number, since it must not load protobuf."""
    names = {number: None if reason is None else f"FINISH_REASON_{reason.name}" for number, reason in FINISH_BY_NUMBER.items()}
    wire = {value: name for name, value in common_pb2.FinishReason.items()}
    assert names == wire | {0: None}
