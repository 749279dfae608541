"""A process with a pool that others read over a named transport: prints where it is, then answers digests of blocks until
stdin ends."""

from __future__ import annotations

import json
import sys

from transfer_testing import Pool

from kvtransfer.backends.registry import prepare
from pdserve.core.ids import Incarnation, WorkerId


def main() -> None:
    name, *numbers = sys.argv[1:]
    incarnation, seed, num_blocks = map(int, numbers)
    pool = Pool(seed=seed, num_blocks=num_blocks)
    transport = prepare(name, "127.0.0.1", allow_public=False)(WorkerId("peer"), Incarnation(incarnation), [pool.region])
    region = pool.region
    hello = {"metadata": transport.metadata().hex(), "address": region.address}
    print(json.dumps(hello | {"num_blocks": region.num_blocks, "block_bytes": region.block_bytes}), flush=True)
    for line in sys.stdin:
        print(json.dumps(pool.digest(json.loads(line))), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
