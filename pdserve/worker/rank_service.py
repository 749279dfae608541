"""The service of a rank with a KV pool of its own: two threads. One reads blocks, one sums, stages and converts them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

from kvtransfer.remote import RankReads
from pdserve.engine.gang.line import serve
from pdserve.engine.gang.rank import RankService
from pdserve.engine.kv.pool import KvPool
from pdserve.worker.kv_memory import RankKv

READS: Final = 0
"""The line of `RankReads`, which rank 0's transfer thread uses. A copy may hold it for long."""
MEMORY: Final = 1
"""The line of `RankKv`."""


def start(connections: Sequence[Connection], pool: KvPool) -> None:
    """Serve the lines of this rank, each in a thread of its own, until the process ends."""
    for connection, handler in zip(connections, (RankReads(), RankKv(pool)), strict=True):
        threading.Thread(target=serve, args=(connection, handler), name=type(handler).__name__, daemon=True).start()


RANK_SERVICE: Final = RankService(f"{start.__module__}:{start.__name__}", lines=2)
"""The order to serve these lines."""
