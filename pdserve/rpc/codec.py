"""The translation between wire messages and core types. Values that come from a peer or a client are checked here.

Clocks of two machines are never compared, so each time of a story is sent relative to one that both sides know.
"""

from __future__ import annotations

import dataclasses
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar, cast

from google.protobuf.message import Message

from pdserve.core.block_hash import KEY_BYTES, MAX_DELTA_KEYS, PrefixDelta
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Incarnation, LeaseId, ReaderId
from pdserve.core.kv_layout import Shortage
from pdserve.core.lease import FirstToken, LeaseView
from pdserve.core.limits import field_types
from pdserve.core.request_spec import RequestSpec
from pdserve.core.roofline import Utilisation
from pdserve.core.sampling import FINISH_BY_NUMBER, FinishReason, Placement, SamplingParams, TokenLogprobs
from pdserve.core.slo import ClassDemand, DemandCounts
from pdserve.core.speculation import MAX_DRAFTS, DraftCounts
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.core.worker import MOST_HOT, ExpertLoad, HotExpert, Role, WorkerHello, WorkerLoad
from pdserve.rpc.v1 import common_pb2, decode_pb2, inference_pb2, link_pb2, peer_pb2, story_pb2

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)
Converter = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""One function that writes the value of a field to its message, and one that reads it back."""

_BY_TYPE: Final[dict[Any, Converter]] = {
    tuple[str, ...]: (tuple, tuple),
    tuple[int, ...]: (tuple, tuple),
    tuple[tuple[int, float], ...]: (dict, lambda entries: tuple(sorted(entries.items()))),
}


class FieldCodec(Generic[Value, Wire]):
    """Writes values of the dataclass `kind` as messages of the type `wire`, and reads them back. A new field is named in the
    dataclass and in `proto/` only.

    Numbers, texts and booleans are copied. None is written as a field that is not set. A boolean whose default is true is true
    in a message that does not have it, as older senders write. `special` has the converters of fields
    that have another form on the wire. An AssertionError tells that the two types do not have the same fields.
    """

    def __init__(self, kind: type[Value], wire: type[Wire], **special: Converter) -> None:
        types = field_types(kind)
        assert set(types) == set(wire.DESCRIPTOR.fields_by_name), f"{kind.__name__} and its message differ"
        self._kind, self._wire = kind, wire
        self._names = tuple(types)
        self._read = attrgetter(*types)
        self._special = {name: _BY_TYPE[one] for name, one in types.items() if one in _BY_TYPE} | special
        self._optional = tuple(name for name, one in types.items() if type(None) in getattr(one, "__args__", ()))
        self._true = tuple(one.name for one in dataclasses.fields(cast(Any, kind)) if one.default is True)

    def to_wire(self, value: Value) -> Wire:
        """Return the message of a value."""
        return self._wire(**self.to_fields(value))

    def to_fields(self, value: Value) -> dict[str, Any]:
        """Return the fields of the message, as the constructor of a message around it takes them.

        protobuf serialises and parses a whole message that a constructor gets, but not such fields. Zeros and empty values are
        left out, since the message has them anyway: it is most of the time that a constructor takes.
        """
        named = zip(self._names, self._read(value), strict=True)
        fields = {name: one for name, one in named if one or (one is not None and name in self._optional)}
        for name in self._true:
            fields.setdefault(name, False)
        for name, (write, _) in self._special.items():
            if name in fields:
                fields[name] = write(fields[name])
        return fields

    def from_wire(self, message: Wire) -> Value:
        """Return the value of a message. Raises what the dataclass and the converters raise."""
        fields = dict(zip(self._names, self._read(message), strict=True))
        for name in self._optional:
            if not message.HasField(name):
                fields[name] = None
        for name in self._true:
            if not message.HasField(name):
                fields[name] = True
        for name, (_, read) in self._special.items():
            if fields[name] is not None:
                fields[name] = read(fields[name])
        return self._kind(**fields)


_FINISH_TO_WIRE = {reason: cast(common_pb2.FinishReason, number) for number, reason in FINISH_BY_NUMBER.items()}

_PLACEMENT_FROM_WIRE = {
    common_pb2.PLACEMENT_UNSPECIFIED: None,
    common_pb2.PLACEMENT_AUTO: Placement.AUTO,
    common_pb2.PLACEMENT_DISAGGREGATED: Placement.DISAGGREGATED,
    common_pb2.PLACEMENT_COLOCATED: Placement.COLOCATED,
}
_PLACEMENT_TO_WIRE = {placement: wire for wire, placement in _PLACEMENT_FROM_WIRE.items()}


def pack_ids(ids: tuple[int, ...] | list[int]) -> bytes:
    """Pack token ids as little-endian uint32. For long prompts it costs a tenth of a varint field."""
    packed = array("I", ids)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Unpack token ids from little-endian uint32. Raises ValueError when the length is not a multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def _pack_keys(keys: Sequence[int]) -> bytes:
    packed = array("Q", keys)
    assert packed.itemsize == KEY_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_keys(data: bytes) -> tuple[int, ...]:
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def prefix_delta_to_wire(delta: PrefixDelta) -> link_pb2.PrefixDelta:
    """Write the changes of a worker's keys as a message."""
    added, removed = _pack_keys(delta.added), _pack_keys(delta.removed)
    return link_pb2.PrefixDelta(number=delta.number, added=added, removed=removed, digest=delta.digest, full=delta.full)


def prefix_delta_from_wire(wire: link_pb2.PrefixDelta) -> PrefixDelta:
    """Read the changes of a worker's keys. Raises ValueError for a part of a key, and for more than `MAX_DELTA_KEYS`."""
    num_keys = (len(wire.added) + len(wire.removed)) // KEY_BYTES
    if num_keys > MAX_DELTA_KEYS:
        raise ValueError(f"{num_keys} keys; at most {MAX_DELTA_KEYS} are allowed")
    return PrefixDelta(wire.number, _unpack_keys(wire.added), _unpack_keys(wire.removed), wire.digest, wire.full)


def finish_to_wire(reason: FinishReason | None) -> common_pb2.FinishReason:
    """Return the number of a finish reason. None, not finished, becomes UNSPECIFIED."""
    return _FINISH_TO_WIRE[reason]


def finish_from_wire(wire: int) -> FinishReason | None:
    """Return the finish reason of a number; None: not finished. Raises KeyError for a number that is not in the enum."""
    return FINISH_BY_NUMBER[wire]


def placement_from_wire(wire: int) -> Placement | None:
    """Return the placement of a number; None: the cluster's default. Raises KeyError for a number not in the enum."""
    return _PLACEMENT_FROM_WIRE[wire]  # type: ignore[index]


def placement_to_wire(placement: Placement | None) -> common_pb2.Placement:
    """Return the number of a placement. None, the cluster's default, becomes UNSPECIFIED."""
    return _PLACEMENT_TO_WIRE[placement]


def constraint_to_fields(constraint: Constraint) -> dict[str, Any]:
    """Write a constraint as the fields of its message."""
    if constraint.kind is ConstraintKind.CHOICE:
        return {constraint.kind.value: {"texts": constraint.choices}}
    return {constraint.kind.value: constraint.text or True}


def constraint_from_wire(wire: common_pb2.StructuredOutputs) -> Constraint:
    """Read a constraint. Raises `InvalidRequest`, also for a kind that this version does not know."""
    name = wire.WhichOneof("kind")
    if name is None or (name == "json_object" and not wire.json_object):
        raise InvalidRequest("must name one kind of constraint that this version knows", field=FIELD)
    kind = ConstraintKind(name)
    if kind is ConstraintKind.JSON_OBJECT:
        return Constraint(kind)
    if kind is ConstraintKind.CHOICE:
        return Constraint(kind, choices=tuple(wire.choice.texts))
    return Constraint(kind, getattr(wire, name))


_SAMPLING: Final = FieldCodec(SamplingParams, common_pb2.SamplingParams)
_SPEC: Final = FieldCodec(
    RequestSpec,
    common_pb2.RequestSpec,
    prompt_ids=(pack_ids, unpack_ids),
    sampling=(_SAMPLING.to_fields, _SAMPLING.from_wire),
    constraint=(constraint_to_fields, constraint_from_wire),
)


def spec_to_wire(spec: RequestSpec) -> common_pb2.RequestSpec:
    """Write a request as a message."""
    return _SPEC.to_wire(spec)


def spec_to_fields(spec: RequestSpec) -> dict[str, Any]:
    """Return the fields of a request's message, as the constructor of a message around it takes them."""
    return _SPEC.to_fields(spec)


def spec_from_wire(wire: common_pb2.RequestSpec) -> RequestSpec:
    """Read a request. Raises `InvalidRequest`, and ValueError for half a token id."""
    return _SPEC.from_wire(wire)


_ROLES: Final = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}
_ROLES_FROM_WIRE: Final = {wire: role for role, wire in _ROLES.items()}


def role_to_wire(role: Role) -> common_pb2.Role:
    """Return the number of a role."""
    return _ROLES[role]


def role_from_wire(wire: int) -> Role:
    """Return the role of a number. Raises KeyError for a number that is not in the enum, and for UNSPECIFIED."""
    return _ROLES_FROM_WIRE[wire]  # type: ignore[index]


def _counts_to_fields(counts: BlockCounts) -> dict[str, int]:
    return {**counts._asdict(), "unaccounted": max(0, counts.unaccounted)}


def _counts_from_wire(wire: common_pb2.BlockCounts) -> BlockCounts:
    return BlockCounts(wire.total, wire.free, wire.cached, wire.held, wire.quarantined)


def _experts_to_fields(load: ExpertLoad) -> dict[str, Any]:
    return dataclasses.asdict(load)


def _experts_from_wire(wire: common_pb2.ExpertLoad) -> ExpertLoad:
    """Read the spread of tokens. More than `MOST_HOT` experts are dropped."""
    hottest = tuple([HotExpert(one.layer, one.expert, one.imbalance) for one in wire.hottest[:MOST_HOT]])
    return ExpertLoad(wire.choices, wire.imbalance, wire.worst_imbalance, hottest)


def drafts_to_fields(counts: DraftCounts) -> dict[str, Any]:
    """Write counts of drafts as the fields of their message, for a message around it."""
    return {**counts._asdict(), "num_accepted_tokens_per_pos": counts.num_accepted_tokens_per_pos[:MAX_DRAFTS]}


_HELLO: Final = FieldCodec(
    WorkerHello,
    common_pb2.WorkerHello,
    role=(_ROLES.__getitem__, role_from_wire),
    refuses=(list, tuple),
    undivided=(list, tuple),
    unresumed=(list, tuple),
)
_LOAD: Final = FieldCodec(
    WorkerLoad,
    common_pb2.WorkerLoad,
    blocks=(_counts_to_fields, _counts_from_wire),
    experts=(_experts_to_fields, _experts_from_wire),
    speculation=(drafts_to_fields, DraftCounts.told),
)


def hello_to_wire(hello: WorkerHello) -> common_pb2.WorkerHello:
    """Write the state of a worker that does not change as a message."""
    return _HELLO.to_wire(hello)


def hello_to_fields(hello: WorkerHello) -> dict[str, Any]:
    """Write the state of a worker that does not change as the fields of its message, for a message around it."""
    return _HELLO.to_fields(hello)


def hello_from_wire(wire: common_pb2.WorkerHello) -> WorkerHello:
    """Read the state of a worker that does not change. Raises KeyError for a message without a role."""
    return _HELLO.from_wire(wire)


def load_to_wire(load: WorkerLoad) -> common_pb2.WorkerLoad:
    """Write the present state of a worker as a message."""
    return _LOAD.to_wire(load)


def load_to_fields(load: WorkerLoad) -> dict[str, Any]:
    """Write the present state of a worker as the fields of its message, for a message around it."""
    return _LOAD.to_fields(load)


def load_from_wire(wire: common_pb2.WorkerLoad) -> WorkerLoad:
    """Read the present state of a worker."""
    return _LOAD.from_wire(wire)


_CLASS: Final = FieldCodec(ClassDemand, inference_pb2.ClassDemand)
_DEMAND: Final = FieldCodec(
    DemandCounts,
    inference_pb2.Demand,
    classes=(
        lambda classes: [_CLASS.to_wire(one) for one in classes],
        lambda wire: tuple(_CLASS.from_wire(one) for one in wire),
    ),
)


def demand_to_wire(demand: DemandCounts) -> inference_pb2.Demand:
    """Write the load of clients as a message."""
    return _DEMAND.to_wire(demand)


def demand_from_wire(wire: inference_pb2.Demand) -> DemandCounts:
    """Read the load of clients."""
    return _DEMAND.from_wire(wire)


def utilisation_to_fields(one: Utilisation) -> dict[str, float | None]:
    """Write the utilisation of a worker as the fields of its message. None: the field is not set."""
    return {"busy": one.busy, "mfu": one.mfu, "mbu": one.mbu}


def logprobs_to_wire(tokens: Sequence[TokenLogprobs]) -> common_pb2.Logprobs | None:
    """Write the log-probabilities of consecutive tokens. Each has the same number of likeliest tokens. No tokens: None."""
    if not tokens:
        return None
    return common_pb2.Logprobs(
        chosen=[token.logprob for token in tokens],
        top_ids=[token_id for token in tokens for token_id, _ in token.top],
        top=[logprob for token in tokens for _, logprob in token.top],
    )


def shortage_to_wire(shortage: Shortage | None) -> decode_pb2.KvShortage | None:
    """Convert the KV group without room. None stays None."""
    return None if shortage is None else decode_pb2.KvShortage(**dataclasses.asdict(shortage))


def shortage_from_wire(wire: decode_pb2.NoRoom) -> Shortage | None:
    """Return the KV group that a refused bind names. None: it names none."""
    if not wire.HasField("shortage"):
        return None
    said = wire.shortage
    return Shortage(said.group, said.blocks_needed, said.blocks_free, said.window)


def lease_id_to_wire(lease_id: LeaseId) -> common_pb2.LeaseId:
    """Write a lease id as a message."""
    return common_pb2.LeaseId(incarnation=lease_id.incarnation, counter=lease_id.counter)


def lease_id_from_wire(wire: common_pb2.LeaseId) -> LeaseId:
    """Read a lease id."""
    return LeaseId(Incarnation(wire.incarnation), wire.counter)


def reader_id_to_wire(reader_id: ReaderId) -> common_pb2.ReaderId:
    """Write a reader id as a message."""
    return common_pb2.ReaderId(incarnation=reader_id.incarnation, counter=reader_id.counter)


def reader_id_from_wire(wire: common_pb2.ReaderId) -> ReaderId:
    """Read a reader id."""
    return ReaderId(Incarnation(wire.incarnation), wire.counter)


def lease_view_to_wire(view: LeaseView) -> peer_pb2.LeaseStatus:
    """Write the status of a lease as a message."""
    return peer_pb2.LeaseStatus(
        lease_id=lease_id_to_wire(view.lease_id),
        state=peer_pb2.LEASE_STATE_HELD if view.held else peer_pb2.LEASE_STATE_GONE,
        watermark=view.watermark,
        first_token=first_token_to_wire(view.first_token),
    )


def lease_view_from_wire(wire: peer_pb2.LeaseStatus) -> LeaseView:
    """Read the status of a lease. Raises KeyError for a finish reason that is not in the enum."""
    first = first_token_from_wire(wire)
    return LeaseView(lease_id_from_wire(wire.lease_id), wire.state == peer_pb2.LEASE_STATE_HELD, wire.watermark, first)


def first_token_to_wire(first: FirstToken | None) -> peer_pb2.FirstToken | None:
    """Write token 0 as a message, if it is known."""
    if first is None:
        return None
    return peer_pb2.FirstToken(id=first.token_id, finish_reason=finish_to_wire(first.finish_reason))


def first_token_from_wire(wire: peer_pb2.LeaseStatus | peer_pb2.CommitResponse) -> FirstToken | None:
    """Read the token 0 of an answer. None: it has none. Raises KeyError for a finish reason that is not in the enum."""
    if not wire.HasField("first_token"):
        return None
    return FirstToken(wire.first_token.id, finish_from_wire(wire.first_token.finish_reason))


Entry = tuple[float, str, tuple[tuple[str, str | int | float], ...]]
"""The time of an entry in seconds, its kind, and its fields: an `Entry` of `pdserve.observe.story`, which is a tuple."""


def entries_to_wire(entries: Iterable[Entry], *, since_s: float) -> list[story_pb2.StoryEntry]:
    """Return the messages of entries, with times relative to `since_s`. Real numbers keep six significant digits."""
    return [
        story_pb2.StoryEntry(
            at_s=at_s - since_s,
            kind=kind,
            fields=[
                story_pb2.StoryField(name=name, value=f"{value:.6g}" if isinstance(value, float) else str(value))
                for name, value in fields
            ],
        )
        for at_s, kind, fields in entries
    ]


def entries_from_wire(entries: Iterable[story_pb2.StoryEntry], *, since_s: float) -> tuple[Entry, ...]:
    """Return the entries of messages, with times on the reader's clock: `since_s` is the time that they are relative to."""
    return tuple([(e.at_s + since_s, e.kind, tuple([(f.name, f.value) for f in e.fields])) for e in entries])
