"""The transports that a worker knows by name. A name's module is loaded only when the name is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from kvtransfer.api import LocalRegion, Region, Transport
from pdserve.core.errors import ConfigError
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.plugins import resolve

SETTING: Final = "transfer.transport"
BUILTINS: Final = {name: f"kvtransfer.backends.{name}:prepare" for name in ("nixl", "cma", "fake")}
"""The function of each name. It takes `host` and `allow_public`, and returns a `MakeTransport`."""

MakeTransport = Callable[[WorkerId, Incarnation, Sequence[LocalRegion]], Transport[Region]]
"""A function that makes the transport of one process over its KV pool, which is at most one region for each KV group. The
transfer thread calls it once. The incarnation names the process: see `kvtransfer.routed.rank_id`."""


def prepare(name: str, host: str, *, allow_public: bool) -> MakeTransport:
    """Return the function that makes the transport `name`, which is a built-in one or `module:function`.

    A worker calls this before it loads its model, so a transport checks here what the machine and the settings must allow.
    `host` is the address that the worker binds; `allow_public` True lets it be one that other machines reach.

    Raises `ConfigError` for an unknown name, when the transport does not allow the settings, and when the operator's own
    function raises or returns something else.
    """
    function = resolve(name, BUILTINS, SETTING)
    if name in BUILTINS:
        return function(host, allow_public)  # type: ignore[no-any-return]  # resolve() knows no types
    return _own(name, function, host, allow_public)


def _own(name: str, function: Callable[..., Any], host: str, allow_public: bool) -> MakeTransport:
    try:
        make = function(host, allow_public)
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:  # it is the operator's code
        raise ConfigError(f"{SETTING} is {name!r}, and this function raised {type(exc).__name__}: {exc}") from exc
    if not callable(make):
        raise ConfigError(f"{SETTING} is {name!r}, and this function returned {make!r:.80}, which makes no transport")
    return make  # type: ignore[no-any-return]  # callable() narrows to a function of any result
