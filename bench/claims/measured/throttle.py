"""A link of a chosen speed, for benchmarks: the transport `cma`, whose reads end only when the link would have carried them.

It is named in a setting as `bench.claims.measured.throttle:prepare`. The speed is read from a file at each read, so one cluster
serves all speeds in turns. Reads of one worker share its link and follow each other on it. The bytes are there early, and
nobody may use them before `poll` says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvtransfer.api import LocalRegion, RemoteRegion, TransportRead
from kvtransfer.backends.cma import CmaTransport
from pdserve.core.errors import ConfigError
from pdserve.core.ids import Incarnation, WorkerId

NAME: Final = "bench.claims.measured.throttle:prepare"
RATE_FILE: Final = "PDSERVE_BENCH_LINK_FILE"
"""The environment variable with the path of the file. The file holds one number: bytes a second; 0: the link is not limited."""


class _Slow(TransportRead):
    __slots__ = ("ends_s",)

    def __init__(self, peer: Incarnation, num_blocks: int, ends_s: float) -> None:
        super().__init__(peer, num_blocks)
        self.ends_s = ends_s


class ThrottledTransport(CmaTransport):
    """The transport `cma` behind a link of limited speed."""

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation, regions: Sequence[LocalRegion], rate_file: Path) -> None:
        """`rate_file`: see `RATE_FILE`."""
        super().__init__(worker_id, incarnation, regions)
        self._rate_file = rate_file
        self._free_s = 0.0  # the link is free from this time on

    def post_read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: LocalRegion,
    ) -> TransportRead:
        """Copy the blocks, and let the read end when the link would have carried them."""
        began_s = time.monotonic()
        super().post_read(peer, region, remote_blocks, local_blocks, into)
        rate = float(self._rate_file.read_text(encoding="ascii"))
        carried_s = len(remote_blocks) * sum(region.lengths) / rate if rate else 0.0
        self._free_s = max(began_s, self._free_s) + carried_s
        return _Slow(peer, len(local_blocks), self._free_s)

    def poll(self, handle: TransportRead) -> bool:
        """Tell whether the link has carried the read."""
        assert isinstance(handle, _Slow), "the read is of another transport"
        return time.monotonic() >= handle.ends_s


class _Make:
    """The function that makes the transport."""

    def __init__(self, rate_file: Path) -> None:
        self._rate_file = rate_file

    def __call__(self, worker_id: WorkerId, incarnation: Incarnation, regions: Sequence[LocalRegion]) -> ThrottledTransport:
        return ThrottledTransport(worker_id, incarnation, regions, self._rate_file)


def prepare(host: str, allow_public: bool) -> _Make:
    """Return the function that makes the transport. Raises `ConfigError` when no file with a speed is named."""
    path = os.environ.get(RATE_FILE, "")
    if not Path(path).is_file():
        raise ConfigError(f"{RATE_FILE} must name a file with bytes a second, got {path!r}")
    return _Make(Path(path))
