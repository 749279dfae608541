"""Many workers without engines in one process, each behind the real worker's end of a link: stream, beats, and taking up again.

So a soak has hundreds of links on a small machine. The process stands in the place of a worker's own (`processes.Place`): the
ids of its workers begin with that worker's id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Final

from pdserve.config import WorkerConfig, load
from pdserve.core.worker import LINK_VERSIONS
from pdserve.observe.logs import setup_logging
from router.service.model import ServedModel
from testkit.fake_worker import DECODE, PREFILL, LightWorker
from testkit.processes import MODULE, Place

log = logging.getLogger(__name__)

LINKS: Final = "PDSERVE_TESTING_LINKS"
TOKEN_INTERVAL_S: Final = 0.0
HOLD_UP_LOOK_S: Final = 0.2
HOLD_UP_S: Final = 2.0  # beyond what four times the load explains
HELD_UP: Final = "this process was held up for "


def place(links: int) -> Place:
    """Return the place of a process with so many links."""
    return Place(env={LINKS: str(links)}, module="testkit.light_worker")


async def tell_hold_ups() -> None:
    """Log each time for which this process did not run, as far as it is longer than `HOLD_UP_S`. No process survives what its
    machine does to it, so a soak must know."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + HOLD_UP_LOOK_S
        await asyncio.sleep(HOLD_UP_LOOK_S)
        if (late_s := loop.time() - due_s) > HOLD_UP_S:
            log.warning("%s%.1f s", HELD_UP, late_s)


async def serve(config: WorkerConfig, count: int) -> None:
    """Serve `count` links until standard input closes."""
    card = ServedModel.load(config.engine).card
    # A connection to this port shows the router that the process of a broken stream lives.
    witness = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    workers = [
        LightWorker(
            PREFILL if os.environ[MODULE] == "prefill_worker" else DECODE,
            config.router_address,
            f"{config.worker_id}-{number}",
            config.cluster_token,
            card.fingerprint,
            vocab_size=card.vocab_size,
            link_version=LINK_VERSIONS.newest,
            pid=os.getpid(),
            incarnation=secrets.randbits(63),
            heartbeat_interval_s=config.heartbeat_interval_s,
            token_interval_s=TOKEN_INTERVAL_S,
            address=f"127.0.0.1:{witness.sockets[0].getsockname()[1]}",
            router_lost_s=config.router_lost_s,
        )
        for number in range(count)
    ]
    for worker in workers:
        await worker.start()
    holds = asyncio.create_task(tell_hold_ups())
    print(json.dumps({"event": "ready"}), flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    holds.cancel()


def main() -> None:
    """Serve as the environment and `--config FILE` say."""
    setup_logging("info")
    config = load(WorkerConfig, Path(sys.argv[sys.argv.index("--config") + 1]))
    asyncio.run(serve(config, int(os.environ[LINKS])))
    os._exit(0)  # nothing that a worker leaves behind is looked at


if __name__ == "__main__":
    main()
