"""The simulated gRPC server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeServer:
    """A stand-in for grpc.aio.Server. Generated code registers its handlers here, and `FakeChannel` calls them."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.stopped = False
        self.on_stop: dict[object, Callable[[], object]] = {}
        """The functions that end the running calls, one for each call."""

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: generated code registers the same handlers by the method below as well."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Add the handlers of a service, by name of the method."""
        for method, handler in handlers.items():
            self.handlers[f"/{service}/{method}"] = handler

    def stop(self) -> None:
        """End all calls at once and refuse new ones, as `stop(grace=None)` does. Idempotent."""
        self.stopped = True
        ends, self.on_stop = list(self.on_stop.values()), {}
        for end in ends:
            end()
