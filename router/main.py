"""The router process. It reads its configuration, listens on five ports, reports that on stdout, and stops cleanly on SIGTERM
and SIGINT: it refuses new requests, and streams may end. A second signal, or the end of stdin, stops it at once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import uvloop

from pdserve.config import RouterProcessConfig, load
from pdserve.core.errors import ConfigError
from pdserve.observe.logs import setup_logging
from pdserve.observe.title import set_title
from router.grpc.admin import AdminServer
from router.grpc.front import GrpcFront
from router.http import serve_http
from router.http.metrics import serve_metrics
from router.parsing.parser import RequestParser
from router.recording.recorder import Recorder
from router.service.descriptors import raise_limit, share_of_admins, share_of_clients, share_of_links
from router.service.model import ServedModel
from router.service.service import RouterService
from router.workers.link import LinkThread

logger = logging.getLogger(__name__)

EXIT_CONFIG: Final = 2
GRPC_CONNECTIONS: Final = 4096
"""The gRPC port has so many connections where the settings name no number: gRPC takes its limits at the start, before a worker
has joined. A connection has many calls."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a router until a signal comes. Exits with `EXIT_CONFIG` and a message on stderr after a `ConfigError`."""
    args = _parse(argv)
    set_title("router")
    try:
        setup_logging(args.log_level, file=args.log_file)
        config = load(RouterProcessConfig, args.config, args.set)
        model = ServedModel.load(config.engine, config.router.chat_template)
        gc.freeze()  # else the garbage collector holds the loop for 40 ms whenever it walks over all that is loaded
        uvloop.run(_run(config, model, exit_with_parent=args.exit_with_parent))
    except ConfigError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m router", description="Run one pdserve router.")
    parser.add_argument("--config", metavar="FILE", help="YAML file with the settings of RouterProcessConfig")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="override a setting, such as router.grpc_port=0"
    )
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error")
    parser.add_argument("--log-file", type=Path, help="the file that is stderr: it is copied and emptied when it is large")
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when stdin ends")
    return parser.parse_args(argv)


async def _run(config: RouterProcessConfig, model: ServedModel, *, exit_with_parent: bool) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    def stop_at_once() -> None:
        hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    async with contextlib.AsyncExitStack() as stack:
        if exit_with_parent:
            await stack.enter_async_context(_stdin_watched(stop_at_once))
        ready, wind_down = await stack.enter_async_context(serve(config, model, on_broken=stop_at_once))
        print(json.dumps(ready), flush=True)
        await stop.wait()
        logger.info("stopping")
        await wind_down(hurry)


@contextlib.asynccontextmanager
async def serve(
    config: RouterProcessConfig, model: ServedModel, *, on_broken: Callable[[], object] = lambda: None
) -> AsyncIterator[tuple[dict[str, object], Callable[[asyncio.Event], Awaitable[None]]]]:
    """Run a router, and yield what it prints once it listens, and the function that winds it down: streams end within
    `router.drain_s`, or until the given event is set. Everything is closed however this ends. `on_broken` is called when the
    router cannot go on and its starter should start another.

    Raises `ConfigError` for a port that is taken, naming its flag.
    """
    settings = config.router
    link_host = settings.link_host or settings.host
    descriptors = raise_limit()
    max_connections = share_of_clients(descriptors, settings.max_connections)
    links = LinkThread(config.cluster_token, share_of_links(descriptors, max_connections), return_s=settings.heartbeat_lost_s)
    seed = secrets.randbits(64)
    recorder = Recorder(settings, model.card.fingerprint, seed) if settings.record_file is not None else None
    service = RouterService(settings, model, links=links, notes=recorder, seed=seed)
    async with contextlib.AsyncExitStack() as stack:
        if recorder is not None:
            stack.callback(recorder.close)
        service.start()
        stack.push_async_callback(service.close)
        parser = RequestParser(settings.max_body_bytes)
        stack.callback(parser.close)

        stack.push_async_callback(links.close)
        link_port = await links.start(service.hear, link_host, settings.link_port, on_broken)

        grpc_connections = min(max_connections, settings.max_connections or GRPC_CONNECTIONS)
        front = GrpcFront(service, parser, grpc_connections)
        stack.push_async_callback(front.close)
        await front.start(settings.host, settings.grpc_port)

        admin = AdminServer(service, config.cluster_token, share_of_admins(descriptors))
        stack.push_async_callback(admin.close)
        await admin.start(settings.admin_host, settings.admin_port_or_default)

        limits = settings
        if settings.max_connections is not None:
            limits = dataclasses.replace(settings, max_connections=max_connections)
        http = await serve_http(service, parser, settings.host, settings.http_port, limits, max_connections)
        stack.push_async_callback(http.close)

        metrics = await serve_metrics(service, settings)
        stack.push_async_callback(metrics.close)

        ready: dict[str, object] = {
            "event": "ready",
            "http": f"{settings.host}:{http.port}",
            "grpc": f"{settings.host}:{front.port}",
            "admin": f"{settings.admin_host}:{admin.port}",
            "metrics": f"{settings.metrics_host}:{metrics.port}",
            "link": f"{settings.advertise_host or link_host}:{link_port}",
            "pid": os.getpid(),
        }
        yield ready, lambda hurry: service.wind_down(settings.drain_s, hurry)


@contextlib.asynccontextmanager
async def _stdin_watched(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Call `stop` when stdin ends. The parent holds the other end, so stdin ends with the parent, however the parent dies."""
    try:
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: _EndOfFile(stop), sys.stdin)
    except (ValueError, OSError) as exc:
        raise ConfigError("--exit-with-parent needs a pipe as stdin that the parent holds") from exc
    try:
        yield
    finally:
        transport.close()


class _EndOfFile(asyncio.Protocol):
    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop

    def eof_received(self) -> bool:
        self._stop()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
