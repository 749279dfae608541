"""The blocks that a server of vLLM shares among prompts, as it tells of them by its KV events, in pdserve's own keys.

vLLM names blocks by hashes of its own, and each event has the tokens of its blocks. So the chain of pdserve's hashes is
computed here from these tokens, and the router finds the blocks under the names that it gives to prompts."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
import zmq.asyncio

from pdserve.config import MIB
from pdserve.core.block_hash import BlockHash, KeyChanges, PublishedKeys, chain_salt, next_hash, root_hash

log = logging.getLogger(__name__)

TOPIC: Final = b"kv"
MAX_MESSAGE_BYTES: Final = 64 * MIB
"""A message with the tokens of a prompt of ten million tokens is smaller."""
_NUMBER_BYTES: Final = 8
_PARTS: Final = 3


class EngineKeys:
    """The keys of the blocks that a server shares. Each message has a number; after a gap all keys are dropped, since nobody
    knows which blocks have gone."""

    def __init__(self, model_name: bytes, block_size: int, num_blocks: int) -> None:
        """`model_name` is what the router's salts name the weights by: the digest of the model. A server that tells of more
        than its `num_blocks` has not told of all that has gone, so all keys are dropped."""
        self._num_blocks = num_blocks
        self._model_name = model_name
        self._block_size = block_size
        self._published = PublishedKeys(1)
        self._known: dict[Any, BlockHash] = {}  # by vLLM's hash
        self._next = 0

    @property
    def count(self) -> int:
        """The number of blocks that are shared."""
        return len(self._known)

    def take(self) -> KeyChanges | None:
        """Return what has changed since the last call. None: nothing has."""
        return self._published.take()

    def restart(self, num_blocks: int) -> None:
        """Drop all keys, because another server follows, which has `num_blocks` and counts its messages from 0."""
        self._clear()
        self._num_blocks = num_blocks
        self._next = 0

    def message(self, number: int, payload: bytes) -> None:
        """Take a message. What it says of blocks that cannot be named here is left out: they only have no key.

        Raises ValueError for what is no message.
        """
        if number != self._next:
            if number:  # 0: the server has started anew
                log.warning(
                    "vLLM's KV events %s to %s are lost: its shared blocks are unknown for a while", self._next, number - 1
                )
            self._clear()
        self._next = number + 1
        try:
            batch = msgpack.unpackb(payload, strict_map_key=False)
            for event in batch[1]:
                self._event(event)
                if len(self._known) > self._num_blocks:
                    log.warning("vLLM tells of more shared blocks than its %s: they are unknown for a while", self._num_blocks)
                    self._clear()
        except (msgpack.exceptions.UnpackException, ValueError, KeyError, TypeError, IndexError, struct.error) as exc:
            self._clear()  # what it said of blocks that have gone is unknown
            raise ValueError(f"a KV event of vLLM cannot be read: {exc!r:.100}") from exc

    def _event(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "BlockStored":
            self._stored(event)
        elif kind == "BlockRemoved":
            for name in event["block_hashes"]:
                self._remove(name)
        elif kind == "AllBlocksCleared":
            self._clear()

    def _stored(self, event: Mapping[str, Any]) -> None:
        names, token_ids = event["block_hashes"], event["token_ids"]
        if event["block_size"] != self._block_size or event.get("group_idx"):
            return
        parent = self._parent(event)
        for index, name in enumerate(names):
            part = token_ids[index * self._block_size : (index + 1) * self._block_size]
            if parent is None or len(part) != self._block_size:
                return
            parent = next_hash(parent, struct.pack(f"<{self._block_size}I", *part))
            if name not in self._known:
                self._known[name] = parent
                self._published.publish(parent)

    def _parent(self, event: Mapping[str, Any]) -> BlockHash | None:
        """Return the hash before the first block of an event. None: it is unknown, or depends on more than tokens and a
        salt."""
        if (parent := event["parent_block_hash"]) is not None:
            return self._known.get(parent)
        extra: Sequence[Any] = (event.get("extra_keys") or [None])[0] or ()
        if len(extra) > 1 or not all(isinstance(one, str) for one in extra):
            return None
        return root_hash(chain_salt(self._model_name, extra[0] if extra else ""))

    def _remove(self, name: Any) -> None:
        if (known := self._known.pop(name, None)) is not None:
            self._published.remove(known)

    def _clear(self) -> None:
        for name in list(self._known):
            self._remove(name)


class EventSocket:
    """The socket on which a server tells its KV events. It listens before the server starts, which connects to it."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is tcp://HOST:PORT. Raises `zmq.ZMQError` where the port is taken."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self._socket.bind(endpoint)

    async def next(self) -> tuple[int, bytes]:
        """Wait for a message, and return its number and content. Raises ValueError for one without them."""
        parts = await self._socket.recv_multipart()
        if len(parts) != _PARTS or len(parts[1]) != _NUMBER_BYTES:
            raise ValueError(f"a KV event of vLLM has {len(parts)} parts")
        return int.from_bytes(parts[1], "big"), parts[2]

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()
        self._context.term()
