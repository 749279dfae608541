"""vLLM's KV events, in the keys by which the router names the blocks of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from pdserve.core.block_hash import block_hashes, chain_salt, key_of
from pdserve.worker.vllm.kv_events import EngineKeys

RECORDED = json.loads((Path(__file__).parent / "recorded" / "kv_event_block_stored.json").read_text())
SIZE = 4


def keys_of(tokens: list[int], size: int, salt: str = "") -> list[int]:
    return [key_of(one) for one in block_hashes(tokens, size, salt=chain_salt(b"model", salt))]


def stored(names: list[int], tokens: list[int], parent: int | None = None, **changes: Any) -> dict[str, Any]:
    extra = [None] * len(names)
    return {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens, "block_size": SIZE,
        "extra_keys": extra, "group_idx": 0, **changes,
    }  # fmt: skip


def take(keys: EngineKeys, number: int, *events: dict[str, Any]) -> tuple[set[int], set[int]]:
    keys.message(number, msgpack.packb([0.0, list(events), 0]))
    changes = keys.take()
    return (set(), set()) if changes is None else (set(changes.added), set(changes.removed))


def test_a_recorded_event_names_the_blocks_of_its_prompt():
    keys = EngineKeys(b"model", 128, 100)
    keys.message(0, bytes.fromhex(RECORDED["payload_hex"]))
    tokens = RECORDED["batch"][1][0]["token_ids"]
    assert set(keys.take().added) == set(keys_of(tokens, 128))
    assert keys.count == 2
    assert keys.take() is None


def test_blocks_come_and_go_under_their_own_names():
    keys, tokens = EngineKeys(b"model", SIZE, 100), list(range(12))
    first, second, third = keys_of(tokens, SIZE)
    assert take(keys, 0, stored([71], tokens[:4])) == ({first}, set())
    assert take(keys, 1, stored([72, 73], tokens[4:], parent=71)) == ({second, third}, set())
    assert take(keys, 2, stored([71], tokens[:4])) == (set(), set())
    assert take(keys, 3, {"type": "BlockRemoved", "block_hashes": [72, 99]}) == (set(), {second})
    assert take(keys, 4, {"type": "AllBlocksCleared"}, {"type": "NewKind"}) == (set(), {first, third})
    assert keys.count == 0


def test_a_salt_names_other_blocks_and_other_extras_name_none():
    keys, tokens = EngineKeys(b"model", SIZE, 100), list(range(4))
    assert take(keys, 0, stored([1], tokens, extra_keys=[["tenant"]])) == (set(keys_of(tokens, SIZE, "tenant")), set())
    for number, changes in enumerate(
        ({"extra_keys": [["image", 3]]}, {"block_size": 8}, {"group_idx": 1}, {"parent_block_hash": 55}, {"token_ids": [1, 2]}),
        1,
    ):
        assert take(keys, number, stored([number + 1], tokens, **changes)) == (set(), set())


def test_after_a_gap_nothing_is_believed():
    keys, tokens = EngineKeys(b"model", SIZE, 100), list(range(8))
    first, second = keys_of(tokens, SIZE)
    take(keys, 0, stored([1, 2], tokens))
    assert take(keys, 2, stored([2], tokens[4:], parent=1)) == (set(), {first, second})
    assert take(keys, 0, stored([1], tokens[:4])) == ({first}, set()), "a server that has started anew"


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x01", msgpack.packb([1.0]), msgpack.packb([1.0, [5]]), msgpack.packb([0, [{}]])]
)
def test_nonsense_is_refused(payload: bytes):
    keys = EngineKeys(b"model", SIZE, 100)
    (first,) = keys_of(list(range(4)), SIZE)
    take(keys, 0, stored([1], list(range(4))))
    with pytest.raises(ValueError, match="KV event"):
        keys.message(1, payload)
    assert keys.take().removed == (first,), "it may have told that the block has gone"
    keys.message(2, msgpack.packb([0.0, [], 0]))


def test_the_blocks_of_an_earlier_server_are_dropped():
    keys, tokens = EngineKeys(b"model", SIZE, 100), list(range(8))
    first, _ = keys_of(tokens, SIZE)
    take(keys, 0, stored([1], tokens[:4]))
    keys.restart(1)
    assert keys.take().removed == (first,)
    assert take(keys, 1, stored([2], tokens[4:], parent=1)) == (set(), set()), "a message of the next server was lost"
    assert take(keys, 2, stored([1], tokens[:4])) == ({first}, set())
    assert take(keys, 3, stored([2], tokens[4:], parent=1)) == (set(), {first}), "it has one block"
