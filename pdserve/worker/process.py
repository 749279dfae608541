"""`python -m prefill_worker` and `python -m decode_worker`: a worker without Ray."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable

import click

from pdserve.config import WorkerConfig, load
from pdserve.core.errors import ConfigError
from pdserve.observe.logs import setup_logging
from pdserve.worker.runtime import RunningWorker


def run(start: Callable[[WorkerConfig], RunningWorker], role: str) -> None:
    """The command line of one role; never returns."""

    @click.command(name=f"{role}_worker", help=f"Run one {role} worker until SIGTERM or Ctrl-C.")
    @click.option("--config", type=click.Path(dir_okay=False), required=True, help="YAML with WorkerConfig's settings.")
    @click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override one setting.")
    @click.option("--log-level", default="info", show_default=True)
    @click.option("--exit-with-parent", is_flag=True, help="Stop when standard input closes.")
    def command(config: str, overrides: tuple[str, ...], log_level: str, exit_with_parent: bool) -> None:
        setup_logging(log_level)
        try:
            worker_config = load(WorkerConfig, config, overrides)
            stop = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            if exit_with_parent:
                threading.Thread(target=_stop_at_eof, args=(stop,), daemon=True).start()
            status = _serve(start(worker_config), stop)
        except ConfigError as exc:
            print(f"error: {exc.message}", file=sys.stderr)
            status = 2
        sys.stdout.flush()
        sys.stderr.flush()
        # Where rdma-core is installed, a process that created a UCX backend crashes in its exit handlers; all that
        # needs cleaning has been cleaned by now.
        os._exit(status)

    command()


def _stop_at_eof(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def _serve(worker: RunningWorker, stop: threading.Event) -> int:
    ready = {"event": "ready", "address": worker.address, "pid": os.getpid(), "load_s": round(worker.load_s, 3)}
    print(json.dumps(ready), flush=True)
    while not stop.wait(0.2):
        status = worker.wait(0)
        if status is not None:
            return status
    worker.stop()
    return worker.wait(0) or 0
