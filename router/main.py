"""One router process: resolve the model's tokenizer, listen, serve until told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable

import click
import grpc

from pdserve.checkpoint.card import ModelCard, resolve_dtype
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig, RouterProcessConfig, load
from pdserve.core.errors import ConfigError
from pdserve.core.kv_layout import fit_max_model_len
from pdserve.observe.logs import configure_logging
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import link_pb2_grpc
from pdserve.text.tokenizer import Tokenizer
from router.grpc_front import bind, start_grpc
from router.http import serve_http
from router.link import LinkService
from router.service import RouterService


def make_service(config: RouterProcessConfig) -> RouterService:
    """Raises `ConfigError`."""
    engine = config.engine
    directory = resolve(engine.model)
    card = ModelCard.load(directory)
    layout = card.kv_layout(engine.block_size, resolve_dtype(engine.dtype))
    pool_tokens = engine.kv_cache_memory // layout.block_bytes * engine.block_size
    return RouterService(
        config.router,
        card,
        Tokenizer.load(directory),
        layout,
        model_name=_model_name(engine, card),
        max_model_len=fit_max_model_len(engine.max_model_len, card.max_position, pool_tokens),
    )


def _model_name(engine: EngineConfig, card: ModelCard) -> str:
    """What clients call the model: as told, else a Hugging Face id as it was given, else the model's own name."""
    if engine.served_model_name:
        return engine.served_model_name
    is_id = "/" in engine.model and not os.path.exists(engine.model)
    return engine.model if is_id else card.name


async def serve(config: RouterProcessConfig, stop: asyncio.Event, on_ready: Callable[[dict[str, object]], None]) -> None:
    """Until `stop`. Raises `ConfigError` for a port that cannot be had."""
    service = make_service(config)
    router = config.router
    link_host = router.link_host or router.host
    links = grpc.aio.server(options=server_options())
    link_pb2_grpc.add_WorkerLinkServicer_to_server(LinkService(service, cluster_token=config.cluster_token), links)
    link_port = bind(links, link_host, router.link_port, "--link-port")
    await links.start()
    timekeeper = asyncio.create_task(service.run())
    closing: list[Callable[[], object]] = []
    try:
        clients, grpc_port = await start_grpc(service, router.host, router.grpc_port)
        closing.append(lambda: clients.stop(1.0))
        http = await serve_http(service, router.host, router.http_port, stalled_client_s=router.stalled_client_s)
        closing.append(http.close)
        on_ready(
            {
                "event": "ready",
                "http": f"{router.host}:{http.port}",
                "grpc": f"{router.host}:{grpc_port}",
                "link": f"{router.advertise_host or link_host}:{link_port}",
                "pid": os.getpid(),
            }
        )
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((stopping, timekeeper), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if timekeeper.done():
            timekeeper.result()  # raises what ended it: a router that keeps no time must not live on
    finally:
        timekeeper.cancel()
        await asyncio.gather(*(close() for close in closing), links.stop(None), return_exceptions=True)  # type: ignore[call-overload]


async def _serve_until_signal(config: RouterProcessConfig, exit_with_parent: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_parent:
        loop.add_reader(sys.stdin.fileno(), _stop_at_eof, loop, stop)
    await serve(config, stop, lambda ready: print(json.dumps(ready), flush=True))


def _stop_at_eof(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()


@click.command(name="router", help="Run one router until SIGTERM or Ctrl-C.")
@click.option("--config", type=click.Path(dir_okay=False), help="YAML with RouterProcessConfig's settings.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override one setting.")
@click.option("--log-level", default="info", show_default=True)
@click.option("--exit-with-parent", is_flag=True, help="Stop when standard input closes.")
def main(config: str | None, overrides: tuple[str, ...], log_level: str, exit_with_parent: bool) -> None:
    try:
        configure_logging(log_level)
        asyncio.run(_serve_until_signal(load(RouterProcessConfig, config, overrides), exit_with_parent))
    except ConfigError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        raise SystemExit(2) from exc
