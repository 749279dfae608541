"""A lender in a process of its own: pool, NIXL agent and lease service. Takes commands on stdin until it ends.

`grant BLOCK...` answers the lease's counter and the ticket; `advance COUNTER TOKENS [last]` answers nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import cast

from lender import FIRST, LAYOUT, Lender
from transfer_testing import FakePeer, Pool

from kvtransfer.api import Region
from kvtransfer.backends.nixl import NixlTransport
from pdserve.core.ids import Incarnation, LeaseId, WorkerId


@dataclass
class Peer:
    incarnation: Incarnation
    metadata: bytes
    region: Region
    pool: Pool


def handle(lender: Lender, words: list[str]) -> dict[str, object]:
    if words[0] == "grant":
        blocks = tuple(int(word) for word in words[1:])
        lease_id, ticket = lender.grant(blocks, len(blocks) * LAYOUT.block_size)
        return {"counter": lease_id.counter, "ticket": ticket.encode().hex()}
    if words[0] == "checksums":
        lender.checksums = True
        return {}
    if words[0] == "flip":
        lender.peer.pool.flip(int(words[1]))
        return {}
    if words[0] == "corrupt_blocks":
        return {"count": lender.service.corrupt_blocks}
    lease_id = LeaseId(lender.peer.incarnation, int(words[1]))
    if words[0] == "seal":
        lender.seal(lease_id)
        return {}
    lender.advance(lease_id, int(words[2]), FIRST if words[3:] == ["last"] else None)
    return {}


async def serve() -> None:
    incarnation = Incarnation(int(sys.argv[1]))
    pool = Pool(seed=int(sys.argv[2]))
    transport = NixlTransport(WorkerId("lender"), incarnation, [pool.region])
    lender = Lender(cast(FakePeer, Peer(incarnation, transport.metadata(), pool.region, pool)), ttl_s=30.0)
    await lender.serve()
    print(json.dumps({"address": lender.address}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(handle(lender, line.split())), flush=True)
    await lender.stop()
    transport.close()


if __name__ == "__main__":
    asyncio.run(serve())
