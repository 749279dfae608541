"""The transport of foreign engines, which hand KV over by themselves: it moves nothing.

Workers of such engines compare its name at their handshake, like that of any transport, so that none of them is paired with a
worker that copies blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtransfer.api import AnyRegion, TransportRead
from pdserve.core.errors import InternalBug
from pdserve.core.ids import Incarnation


class EngineTransport:
    """A transport without connections and reads."""

    def metadata(self) -> bytes:
        """Return no bytes: there is nothing to connect to."""
        return b""

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Do nothing: the engines connect by themselves."""

    def disconnect(self, incarnation: Incarnation) -> None:
        """Do nothing."""

    def post_read(
        self,
        peer: Incarnation,
        region: AnyRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: AnyRegion,
    ) -> TransportRead:
        """Raise `InternalBug`: only the engines read."""
        raise InternalBug("a worker of a foreign engine was asked to copy KV blocks")

    def poll(self, handle: TransportRead) -> bool:
        """Raise `InternalBug`: there is no read."""
        raise InternalBug("a worker of a foreign engine has no reads")

    def close(self) -> None:
        """Do nothing."""
