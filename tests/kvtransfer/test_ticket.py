"""A ticket survives the trip, and nothing else that arrives is ever mistaken for one."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.api import KvRegion, Region, TransferDevice
from kvtransfer.ticket import MAX_TICKET_BYTES, EngineTicket, InvalidTicket, Ticket, WrongTicket
from pdserve.core.block_hash import prompt_hash
from pdserve.core.errors import IncompatiblePeer, TransferFailed
from pdserve.core.ids import NULL_BLOCK, BlockId, Incarnation, LeaseId
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup, KvShare, KvSpec, gqa_group

SECRET = b"the lender's own"
LAYOUT = gqa_group(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
LATENT = KvGroup((30, 31), ((1, 512), (1, 64)), 16, "int8", window=128)
SPEC = KvSpec((LAYOUT, LATENT))
TICKET = Ticket(
    incarnation=Incarnation(0xFEDCBA9876543210),
    lease_counter=3,
    peer_address="127.0.0.1:40123",
    kv_spec=SPEC,
    regions=(
        KvRegion.of(LAYOUT, Region(0x7F0000000000, 100, LAYOUT.block_bytes)),
        KvRegion.of(LATENT, Region(0x7F8000000000, 80, LATENT.block_bytes)),
    ),
    block_tables=((BlockId(7), BlockId(99), BlockId(0)), (BlockId(4), BlockId(5), BlockId(79))),
    prompt_len=33,
    prompt_hash=prompt_hash(b"a prompt", "a salt"),
    checksums=True,
).with_mac(SECRET)
FIELDS = (
    "version", "incarnation", "lease_counter", "peer_address", "block_size", "groups", "prompt_len", "prompt_hash", "checksums",
    "mac",
)  # fmt: skip
GROUP_FIELDS = ("layers", "planes", "dtype", "window", "num_blocks", "parts", "block_ids")
PART_FIELDS = ("rank", "part_layers", "heads", "address", "device")


def shared(group: KvGroup, ranks: int, address: int, num_blocks: int, device: TransferDevice) -> KvRegion:
    """A region of ranks that share the heads, as far as there are heads."""
    heads = min(ranks, group.num_kv_heads)
    shares = [
        KvShare(
            rank, range(group.num_layers), range(group.num_kv_heads * rank // heads, group.num_kv_heads * (rank + 1) // heads)
        )
        for rank in range(heads)
    ]
    parts = [(share, Region(address + share.rank, num_blocks, share.of(group).block_bytes, device)) for share in shares]
    return KvRegion(group, tuple(parts))


tickets = st.builds(
    lambda incarnation, host, port, layout, address, ids, tail, device, groups, ranks: Ticket(
        incarnation=Incarnation(incarnation),
        lease_counter=1 + incarnation % 1000,
        peer_address=f"{host}:{port}",
        kv_spec=KvSpec(tuple(dataclasses.replace(layout, layers=(1000 + g,) if g else layout.layers) for g in range(groups))),
        regions=tuple(
            shared(dataclasses.replace(layout, layers=(1000 + g,)) if g else layout, ranks, address + g, max(ids) + 1, device)
            for g in range(groups)
        ),
        block_tables=(tuple(BlockId(i) for i in ids),) * groups,
        prompt_len=(len(ids) - 1) * layout.block_size + 1 + tail % layout.block_size,
        prompt_hash=bytes([tail % 256]) * 32,
        checksums=tail % 2 == 0,
    ).with_mac(bytes([port % 256])),
    st.integers(0, (1 << 64) - 1),
    st.sampled_from(["localhost", "10.1.2.3", "[::1]", "worker-0.pool"]),
    st.integers(1, 65535),
    st.builds(gqa_group, *[st.integers(1, 128)] * 3, st.integers(1, 64), st.sampled_from(["float32", "bfloat16", "float16"])),
    st.integers(1, 1 << 47),
    st.lists(st.integers(0, 1 << 16), min_size=1, max_size=50, unique=True),
    st.integers(0, 1 << 10),
    st.sampled_from([TransferDevice(), TransferDevice("cuda", 3)]),
    st.integers(1, 16),
    st.integers(1, 8),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


def decode(data: bytes) -> Ticket | None:
    """None: refused as it should be. Any other exception fails the test."""
    try:
        return Ticket.decode(data)
    except (TransferFailed, IncompatiblePeer):
        return None


def encode_with(group: int = 0, **changes: Any) -> bytes:
    fields = list(msgpack.unpackb(TICKET.encode()))
    for name, value in changes.items():
        if name in FIELDS:
            fields[FIELDS.index(name)] = value
        elif name in GROUP_FIELDS:
            fields[FIELDS.index("groups")][group][GROUP_FIELDS.index(name)] = value
        else:
            parts = fields[FIELDS.index("groups")][group][GROUP_FIELDS.index("parts")]
            parts[0][PART_FIELDS.index(name)] = value
    packed = msgpack.packb(fields)
    assert isinstance(packed, bytes)
    return packed


@settings(deadline=None)
@given(tickets)
def test_what_is_encoded_is_decoded(ticket: Ticket) -> None:
    assert Ticket.decode(ticket.encode()) == ticket


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_ticket(data: bytes) -> None:
    assert decode(data) is None


@settings(deadline=None)
@given(anything)
def test_no_other_value_is_a_ticket(value: Any) -> None:
    assert decode(msgpack.packb(value)) is None


@settings(deadline=None)
@given(st.sampled_from((*FIELDS, *GROUP_FIELDS, *PART_FIELDS)), st.integers(0, 1), anything)
def test_a_field_of_any_value_is_refused_or_sound(name: str, group: int, value: Any) -> None:
    """Whatever stands in a field, a ticket that is accepted holds together."""
    ticket = decode(encode_with(group, **{name: value}))
    if ticket is not None:
        for table, region in zip(ticket.block_tables, ticket.regions, strict=True):
            assert len(table) == ticket.kv_spec.blocks_for(ticket.prompt_len)
            assert all(0 <= block < region.num_blocks for block in table)
        assert Ticket.decode(ticket.encode()) == ticket


@settings(deadline=None)
@given(st.data())
def test_a_damaged_ticket_raises_nothing_else(data: st.DataObject) -> None:
    encoded = bytearray(TICKET.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decode(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_len": 32},
        {"prompt_len": 49},
        {"prompt_len": 0},
        {"block_ids": [7, 100, 0]},
        {"block_ids": [7, -1, 0]},
        {"block_ids": [7, 7, 0]},
        {"block_ids": [7, 1.0, 0]},
        {"block_ids": [7, True, 0]},
        {"block_ids": []},
        {"num_blocks": 0},
        {"address": 0},
        {"address": (1 << 64) - 1},
        {"incarnation": -1},
        {"peer_address": "nowhere"},
        {"peer_address": ":80"},
        {"peer_address": "host:0"},
        {"peer_address": "host:99999"},
        {"peer_address": "ho\nst:80"},
        {"peer_address": "h" * 300 + ":80"},
        {"device": ["tpu", 0]},
        {"device": ["cuda", -1]},
        {"device": ["cpu"]},
        {"rank": -1},
        {"rank": 64},
        {"part_layers": [0, 0]},
        {"part_layers": [0, 1]},
        {"part_layers": [1, 0]},
        {"part_layers": [0, 31]},
        {"heads": [0, 4]},
        {"heads": [1, 3]},
        {"heads": 3},
        {"parts": []},
        {"parts": [[0]]},
        {"block_size": 0},
        {"block_size": 1 << 40},
        {"layers": []},
        {"layers": [1, 0]},
        {"layers": [0, 0]},
        {"layers": [-1]},
        {"layers": [4096]},
        {"layers": list(range(4097))},
        {"layers": [True]},
        {"layers": [8, 30]},
        {"planes": []},
        {"planes": [[3, 64]] * 9},
        {"planes": [[3, 64, 1]]},
        {"planes": [[0, 64]]},
        {"planes": [[3, 1 << 40]]},
        {"planes": [[3, 1.0]]},
        {"window": 0},
        {"window": "all"},
        {"groups": []},
        {"groups": [[]]},
        {"groups": [1, 2]},
        {"lease_counter": 0},
        {"prompt_hash": b"short"},
        {"checksums": 1},
        {"mac": b""},
    ],
)
def test_what_does_not_hold_together_is_refused(changes: dict[str, Any]) -> None:
    for group in (0, 1):
        with pytest.raises(InvalidTicket):
            Ticket.decode(encode_with(group, **({"layers": [0]} if group and changes == {"layers": [8, 30]} else changes)))


def test_too_many_groups_are_refused() -> None:
    """Each of them alone would be sound."""
    group = list(msgpack.unpackb(TICKET.encode())[FIELDS.index("groups")][0])
    rank, _, *memory = group[GROUP_FIELDS.index("parts")][0]
    group[GROUP_FIELDS.index("parts")] = [[rank, [0, 1], *memory]]
    groups = [[[layer], *group[1:]] for layer in range(17)]
    assert Ticket.decode(encode_with(groups=groups[:16])).num_blocks == 3
    with pytest.raises(InvalidTicket, match="list of 1 to 16"):
        Ticket.decode(encode_with(groups=groups))


def test_another_version_says_so_whatever_follows() -> None:
    with pytest.raises(IncompatiblePeer, match="version 5"):
        Ticket.decode(msgpack.packb([5, {"a": "new"}, "format"]))


def test_an_unknown_dtype_is_incompatible_and_not_garbage() -> None:
    with pytest.raises(IncompatiblePeer, match="float8"):
        Ticket.decode(encode_with(1, dtype="float8_e4m3"))


def test_an_oversized_ticket_is_refused_unread() -> None:
    with pytest.raises(InvalidTicket, match="limit"):
        Ticket.decode(b"\x00" * (MAX_TICKET_BYTES + 1))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidTicket):
        Ticket.decode(b"\x91" * 100_000)


def test_layouts_of_other_shapes_never_pair() -> None:
    for other in (
        gqa_group(60, 3, 64, 16, "bfloat16"),
        gqa_group(30, 6, 64, 16, "bfloat16"),
        gqa_group(30, 3, 128, 16, "bfloat16"),
        gqa_group(30, 3, 64, 32, "bfloat16"),
    ):
        with pytest.raises(IncompatiblePeer, match=r"127\.0\.0\.1:40123"):
            TICKET.check_layout(KvSpec((other, dataclasses.replace(LATENT, layers=(100,), block_size=other.block_size))))
    for spec in (KvSpec((LAYOUT,)), KvSpec((LATENT, LAYOUT)), KvSpec((LAYOUT, dataclasses.replace(LATENT, window=None)))):
        with pytest.raises(IncompatiblePeer):
            TICKET.check_layout(spec)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_layouts_that_store_the_same_numbers_in_another_way_do_pair(dtype: str) -> None:
    TICKET.check_layout(KvSpec((LAYOUT, dataclasses.replace(LATENT, dtype=dtype))))
    TICKET.check_layout(KvSpec((dataclasses.replace(LAYOUT, dtype=dtype), LATENT)))


RANKS = [[0, [0, 30], [0, 1], 1 << 40, ["cpu", 0]], [1, [0, 30], [1, 3], 1 << 41, ["cpu", 0]]]


def test_the_ranks_of_a_ticket_have_each_head_of_each_layer_once() -> None:
    (first, second), _ = (region.parts for region in Ticket.decode(encode_with(parts=RANKS)).regions)
    assert first == (KvShare(0, range(30), range(1)), Region(1 << 40, 100, LAYOUT.block_bytes // 3))
    assert second == (KvShare(1, range(30), range(1, 3)), Region(1 << 41, 100, LAYOUT.block_bytes * 2 // 3))
    for place, value in [(0, 0), (1, [0, 29]), (1, [1, 30]), (2, [0, 2]), (2, [2, 3]), (2, [0, 3])]:
        other = [RANKS[0], [*RANKS[1][:place], value, *RANKS[1][place + 1 :]]]
        with pytest.raises(InvalidTicket, match="shares of 2 ranks"):
            Ticket.decode(encode_with(parts=other))


def test_regions_and_size_follow_the_layout() -> None:
    ticket = Ticket.decode(TICKET.encode())
    assert [region.block_bytes for region in ticket.regions] == [360 * 1024, LATENT.block_bytes]
    assert ticket.kv_bytes == 3 * (360 * 1024 + LATENT.block_bytes)


NEAR = dataclasses.replace(LATENT, window=9)
WINDOWED = dataclasses.replace(
    TICKET, prompt_len=40, kv_spec=KvSpec((LAYOUT, NEAR)),
    regions=(TICKET.regions[0], KvRegion.of(NEAR, Region(0x7F8000000000, 80, LATENT.block_bytes))),
    block_tables=(TICKET.block_tables[0], (NULL_BLOCK, NULL_BLOCK, BlockId(79))),
).with_mac(SECRET)  # fmt: skip
"""The window begins with the third block: token 40 sees the tokens from 32 on."""


def test_dead_blocks_are_not_in_a_ticket() -> None:
    fields = msgpack.unpackb(WINDOWED.encode())
    assert [group[-1] for group in fields[FIELDS.index("groups")]] == [[7, 99, 0], [79]]
    assert Ticket.decode(WINDOWED.encode()) == WINDOWED
    assert WINDOWED.kv_bytes == 3 * LAYOUT.block_bytes + LATENT.block_bytes


@pytest.mark.parametrize(("prompt_len", "block_ids"), [(40, [5, 79]), (40, [4, 5, 79]), (40, []), (39, [79]), (48, [-1, 79])])
def test_a_ticket_that_disagrees_about_dead_blocks_is_refused(prompt_len: int, block_ids: list[int]) -> None:
    fields = msgpack.unpackb(WINDOWED.encode())
    fields[FIELDS.index("groups")][1][-1] = block_ids
    fields[FIELDS.index("prompt_len")] = prompt_len
    with pytest.raises(InvalidTicket):
        Ticket.decode(msgpack.packb(fields))


@pytest.mark.parametrize("table", [(4, 5, 79), (NULL_BLOCK, 5, 79), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK)])
def test_a_lender_writes_no_ticket_with_other_blocks_than_the_live_ones(table: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTicket):
        dataclasses.replace(WINDOWED, block_tables=(WINDOWED.block_tables[0], tuple(map(BlockId, table))))


def test_a_ticket_of_another_lease_or_prompt_is_refused_before_anything_is_read() -> None:
    TICKET.check_request(TICKET.lease_id, prompt_hash(b"a prompt", "a salt"))
    with pytest.raises(WrongTicket, match="of lease"):
        TICKET.check_request(LeaseId(TICKET.incarnation, 4), TICKET.prompt_hash)
    for other in (prompt_hash(b"another", "a salt"), prompt_hash(b"a prompt", ""), prompt_hash(b"lta prompt", "a sa")):
        with pytest.raises(WrongTicket, match="another prompt"):
            TICKET.check_request(TICKET.lease_id, other)


def test_salt_and_prompt_are_not_run_together() -> None:
    assert prompt_hash(b"bc", "a") != prompt_hash(b"c", "ab")


def test_workers_that_do_not_agree_on_checksums_are_never_paired() -> None:
    TICKET.check_checksums(True)
    with pytest.raises(IncompatiblePeer, match=r"lease.kv_checksum is on at 127.0.0.1:40123 and off at this worker"):
        TICKET.check_checksums(False)


WIDER = dataclasses.replace(LATENT, window=64)
CHANGES: dict[str, Any] = {
    "incarnation": Incarnation(1),
    "lease_counter": 4,
    "peer_address": "127.0.0.1:40124",
    "kv_spec": KvSpec((LAYOUT, WIDER)),
    "regions": (TICKET.regions[0], KvRegion.of(LATENT, Region(0x7F8000000000, 81, LATENT.block_bytes))),
    "block_tables": (TICKET.block_tables[0], (BlockId(5), BlockId(4), BlockId(79))),
    "prompt_len": 34,
    "prompt_hash": bytes(32),
    "checksums": False,
    "mac": bytes(32),
    "version": 5,
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Ticket)])
def test_each_field_counts_for_the_mac_and_for_the_proof(name: str) -> None:
    changes = {name: CHANGES[name]}
    if name == "kv_spec":  # the regions say it, too
        changes["regions"] = (TICKET.regions[0], KvRegion.of(WIDER, TICKET.regions[1].parts[0][1]))
    changed = dataclasses.replace(TICKET, **changes)
    assert changed.proof != TICKET.proof
    assert name == "mac" or changed.with_mac(SECRET).mac != TICKET.mac


def test_only_the_lender_can_make_the_mac() -> None:
    assert TICKET.with_mac(SECRET) == TICKET
    assert TICKET.with_mac(b"another").proof != TICKET.proof


ENGINE_TICKET = EngineTicket(
    incarnation=Incarnation(0xFEDCBA9876543210),
    lease_counter=3,
    peer_address="127.0.0.1:40123",
    prompt_len=33,
    prompt_hash=prompt_hash(b"a prompt", "a salt"),
    num_blocks=3,
    params=b'{"remote_host": "127.0.0.1"}',
).with_mac(SECRET)


def test_a_ticket_of_engines_is_sealed_and_read_like_any_other():
    read = EngineTicket.decode(ENGINE_TICKET.encode())
    assert read == ENGINE_TICKET
    assert read.proof == ENGINE_TICKET.proof
    read.check_request(ENGINE_TICKET.lease_id, ENGINE_TICKET.prompt_hash)
    with pytest.raises(WrongTicket, match="another prompt"):
        read.check_request(ENGINE_TICKET.lease_id, prompt_hash(b"another", ""))
    with pytest.raises(WrongTicket, match="of lease"):
        read.check_request(LeaseId(TICKET.incarnation, 4), ENGINE_TICKET.prompt_hash)
    changed = dataclasses.replace(ENGINE_TICKET, params=b"{}")
    assert changed.proof != ENGINE_TICKET.proof


def test_each_kind_of_worker_refuses_the_tickets_of_the_other():
    with pytest.raises(IncompatiblePeer, match="version 1001"):
        Ticket.decode(ENGINE_TICKET.encode())
    with pytest.raises(IncompatiblePeer, match="version 4"):
        EngineTicket.decode(TICKET.encode())


@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("value", [None, -1, "x", b"x", 1 << 70, [], True])
def test_a_ticket_of_engines_with_a_wrong_field_is_refused(place, value):
    fields = list(msgpack.unpackb(ENGINE_TICKET.encode(), use_list=False))
    if place == 7 and value == b"x":
        return  # any bytes may be the engines' own
    fields[place] = value if value != 1 << 70 else (1 << 64) - 1
    if (place, value) in ((1, 1 << 70), (2, 1 << 70)):
        return  # these numbers have 64 bits
    with pytest.raises((InvalidTicket, IncompatiblePeer)):
        EngineTicket.decode(msgpack.packb(fields))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_ticket_of_engines_are_refused(data):
    with pytest.raises((InvalidTicket, IncompatiblePeer)):
        EngineTicket.decode(data)
