"""pdserve: a disaggregated prefill/decode LLM serving cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.client.asynchronous import AsyncClient
    from pdserve.client.blocking import Client
    from pdserve.client.llm import LLM
    from pdserve.client.params import SamplingParams
    from pdserve.client.results import RequestOutput
    from pdserve.client.retries import Retries

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncClient", "Client", "RequestOutput", "Retries", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncClient": "asynchronous",
    "Client": "blocking",
    "LLM": "llm",
    "RequestOutput": "results",
    "Retries": "retries",
    "SamplingParams": "params",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import pdserve` loads neither grpc nor a part of the server."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pdserve.client.{_HOMES[name]}"), name)
