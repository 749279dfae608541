"""The settings of the router that say where metrics are, and what they show. They are a part of the section `router`.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

from dataclasses import dataclass
from typing import Final

from pdserve.core.settings.clients import ClientConfig
from pdserve.core.settings.types import Port

METRICS_PORT: Final = 9464  # OpenTelemetry's default for exporters to Prometheus


@dataclass(frozen=True, slots=True)
class MetricsConfig(ClientConfig):
    """The settings of metrics, with those of clients."""

    # Prometheus scrapes `/metrics` here, over HTTP. None is port 9464, or any free port if that is taken or `grpc_port` is 0.
    # False in `metrics_on_port` opens no such port.
    metrics_host: str = "127.0.0.1"
    metrics_port: Port | None = None
    metrics_on_port: bool = True
    # True also answers `/metrics` on the port for clients, with the same page.
    metrics_on_http: bool = True
    # True adds every worker to the pages of metrics, which then grow with the cluster. Otherwise the pools are shown as wholes,
    # and `/metrics?workers=1` shows the workers.
    metrics_per_worker: bool = False
