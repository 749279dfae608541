"""The simulated end of a connection that answers calls."""

from __future__ import annotations

from typing import Any


class FakeServer:
    """Stands where a grpc.aio.Server stands: generated code registers its handlers here."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass  # the registered ones below are the same

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for method, handler in handlers.items():
            self.handlers[f"/{service}/{method}"] = handler
