"""The simulated gRPC server."""

from __future__ import annotations

from typing import Any


class FakeServer:
    """A stand-in for grpc.aio.Server. Generated code registers its handlers here, and `FakeChannel` calls them."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: generated code registers the same handlers by the method below as well."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Add the handlers of a service, by name of the method."""
        for method, handler in handlers.items():
            self.handlers[f"/{service}/{method}"] = handler
