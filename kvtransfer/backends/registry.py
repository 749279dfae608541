"""The transports that a worker knows by name. A name's module is loaded only when the name is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvtransfer.api import LocalRegion, Transport
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.plugins import resolve

SETTING: Final = "transfer.transport"
BUILTINS: Final = {name: f"kvtransfer.backends.{name}:prepare" for name in ("nixl", "cma", "fake")}
"""The function of each name. It takes `host` and `allow_public`, and returns a `MakeTransport`."""

MakeTransport = Callable[[WorkerId, Incarnation, Sequence[LocalRegion]], Transport]
"""A function that makes the transport of one worker over its KV pool, which is one region for each KV group. The transfer
thread calls it once."""


def prepare(name: str, host: str, *, allow_public: bool) -> MakeTransport:
    """Return the function that makes the transport `name`, which is a built-in one or `module:function`.

    A worker calls this before it loads its model, so a transport checks here what the machine and the settings must allow.
    `host` is the address that the worker binds; `allow_public` True lets it be one that other machines reach.

    Raises `ConfigError` for an unknown name, and when the transport does not allow the settings.
    """
    make: MakeTransport = resolve(name, BUILTINS, SETTING)(host, allow_public)
    return make
