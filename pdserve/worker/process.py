"""A worker process without Ray: the commands `python -m prefill_worker` and `python -m decode_worker`."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

import click

from pdserve.config import WorkerConfig, load
from pdserve.core.errors import ConfigError
from pdserve.observe.logs import setup_logging
from pdserve.observe.title import set_title
from pdserve.worker.runtime import RunningWorker

LOOK_S: Final = 0.2


def run(start: Callable[[WorkerConfig], RunningWorker], role: str) -> None:
    """Run the command line of one role. It never returns: the process ends with the worker's exit status, or with 2 for a
    wrong setting."""

    @click.command(
        name=f"{role}_worker", help=f"Run one {role} worker. SIGTERM or Ctrl-C drains it; a second one stops it at once."
    )
    @click.option(
        "--config", type=click.Path(dir_okay=False), required=True, help="YAML file with the settings of WorkerConfig."
    )
    @click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override one setting.")
    @click.option("--log-level", default="info", show_default=True)
    @click.option("--exit-with-parent", is_flag=True, help="Stop when standard input closes.")
    def command(config: str, overrides: tuple[str, ...], log_level: str, exit_with_parent: bool) -> None:
        setup_logging(log_level)
        try:
            worker_config = load(WorkerConfig, config, overrides)
            set_title(worker_config.worker_id)
            drain, stop = threading.Event(), threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set() if drain.is_set() else drain.set())
            if exit_with_parent:
                threading.Thread(target=_stop_at_eof, args=(stop,), daemon=True).start()
            status = _serve(start(worker_config), drain, stop)
        except ConfigError as exc:
            print(f"error: {exc.message}", file=sys.stderr)
            status = 2
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        # If rdma-core is installed, a process that created a UCX backend crashes in its exit handlers. All clean-up that
        # is needed has been done here.
        os._exit(status)

    command()


def _stop_at_eof(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def _serve(worker: RunningWorker, drain: threading.Event, stop: threading.Event) -> int:
    """Serve until the worker ends by itself, which it also does when it has drained, or until `stop` is set. Return the exit
    status."""
    ready = {"event": "ready", "address": worker.address, "pid": os.getpid(), "load_s": round(worker.load_s, 3)}
    print(json.dumps(ready), flush=True)
    while not stop.wait(LOOK_S):
        if drain.is_set():
            worker.drain()
        status = worker.wait(0)
        if status is not None:
            return status
    worker.stop()
    return worker.wait(0) or 0
