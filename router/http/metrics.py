"""The port for metrics, apart from clients: a scrape waits for no client, and clients reach no metrics there.

It serves cached pages, with the bounds of the port for clients: few connections, and a head of bounded size and time.
"""

from __future__ import annotations

import logging
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdserve.config import METRICS_PORT, RouterConfig
from pdserve.core.errors import ConfigError
from router.api.router_api import RouterApi
from router.http.protocol import ConnectionTable, HttpServer, start_server
from router.http.reply import RunningCalls

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS: Final = 16
"""Two scrapers, their spares and a few people. The connection that has waited longest gives way to a new one."""
FLAG: Final = "router.metrics_port"


def metrics_route(api: RouterApi, limits: RouterConfig) -> Route:
    """Return the route of the metrics. `?workers=1` asks for every worker."""

    async def metrics(request: Request) -> Response:
        per_worker = request.query_params.get("workers") in ("1", "true")
        return Response(await api.metrics_page(per_worker=per_worker), media_type=MEDIA_TYPE)

    return Route(PATH, metrics)


async def serve_metrics(api: RouterApi, settings: RouterConfig) -> HttpServer:
    """Listen and serve until the result is closed.

    Raises `ConfigError` naming the setting of a port that was asked for and is taken. The default port is a wish: where it is
    taken, any free one serves.
    """
    app = Starlette(routes=[metrics_route(api, settings)])

    async def start(port: int) -> HttpServer:
        table = ConnectionTable(MAX_CONNECTIONS)
        return await start_server(app, RunningCalls(), settings.metrics_host, port, settings, table, FLAG)

    port = settings.metrics_port
    if port is not None or not settings.grpc_port:
        return await start(port or 0)
    try:
        return await start(METRICS_PORT)
    except ConfigError as exc:
        server = await start(0)
        logger.warning("%s; metrics are at port %d", exc.message, server.port)
        return server
