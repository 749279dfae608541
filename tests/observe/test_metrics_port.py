"""The port for metrics, and the old place on the port for clients."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket

import pytest

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.http import metrics as metrics_module
from router.http import serve_http
from router.http.metrics import serve_metrics
from router.http.protocol import HttpServer
from router.parsing.parser import RequestParser
from tests.http.raw_http import exchange, head
from tests.seams.echo_router import EchoRouter

SETTINGS = RouterConfig(metrics_port=0)


async def served(settings: RouterConfig) -> HttpServer:
    return await serve_metrics(EchoRouter(), settings)


def test_the_port_has_metrics_and_nothing_else() -> None:
    async def run() -> None:
        server = await served(SETTINGS)
        base = f"http://127.0.0.1:{server.port}"
        page = await exchange(base, head("GET", "/metrics"))
        assert (page.status, b"worker=" in page.body) == (200, False)
        assert b"worker=" in (await exchange(base, head("GET", "/metrics?workers=1"))).body
        assert (await exchange(base, head("GET", "/v1/models"))).status == 404
        await server.close()

    asyncio.run(run())


def test_the_port_for_clients_may_go_without_metrics() -> None:
    async def run() -> None:
        settings = dataclasses.replace(SETTINGS, metrics_on_http=False)
        parser = RequestParser(1 << 20)
        server = await serve_http(EchoRouter(), parser, "127.0.0.1", 0, settings)
        assert (await exchange(f"http://127.0.0.1:{server.port}", head("GET", "/metrics"))).status == 404
        await server.close()
        parser.close()

    asyncio.run(run())


def test_a_port_that_was_asked_for_and_is_taken_is_an_error_and_the_default_one_is_a_wish(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=rf"router.metrics_port: port {port} of 127.0.0.1 is in use"):
                await serve_metrics(EchoRouter(), dataclasses.replace(SETTINGS, metrics_port=port))
            monkeypatch.setattr(metrics_module, "METRICS_PORT", port)
            server = await served(dataclasses.replace(SETTINGS, metrics_port=None))
            assert (await exchange(f"http://127.0.0.1:{server.port}", head("GET", "/metrics"))).status == 200
            await server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert "metrics are at port" in caplog.text
