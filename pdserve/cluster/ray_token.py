"""The token of a Ray cluster. The cluster is asked before it is joined, and gets our token only if it wants one.

Ray alone sends a token only when no address is named, needs 20 s to say that a token is missing, and loses every actor
when a token goes to a cluster that takes none (measured with Ray 2.60).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import grpc
from ray import _raylet
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from pdserve.cluster.errors import ClusterError

ASK_TIMEOUT_S: Final = 5.0
METHOD: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # its request is empty, and every Ray answers it
_COMPILED: Final[Any] = _raylet  # this module has no type stubs
WHERE: Final = "on a node of that cluster `ray get-auth-token` prints it"


def send_token_if_asked(address: str) -> None:
    """Prepare this process for joining Ray at `address` (host:port). Raises `ClusterError` that says what to set."""
    takes_none = _admits(address, {})
    if takes_none is None:  # no answer of Ray without encryption came; joining will tell why
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        return
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if takes_none:
        if mode.lower() == "token":
            raise ClusterError(f"Ray at {address} takes no token: unset RAY_AUTH_MODE, which is {mode}")
        return
    if mode and mode.lower() != "token":
        raise ClusterError(f"Ray at {address} wants its token: unset RAY_AUTH_MODE, which is {mode}, and set RAY_AUTH_TOKEN")
    loader = _COMPILED.AuthenticationTokenLoader.instance()
    if not loader.has_token(ignore_auth_mode=True):
        raise ClusterError(
            f"Ray at {address} wants its token: set RAY_AUTH_TOKEN=TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it; {WHERE}"
        )
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if _admits(address, loader.get_token_for_http_header()) is False:
        raise ClusterError(f"Ray at {address} refuses the token of {_source()}: it is another cluster's; {WHERE}")


def _admits(address: str, headers: Mapping[str, str]) -> bool | None:
    """Tell whether Ray at `address` accepts a call with these headers. None: the answer does not tell."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        metadata = tuple((name.lower(), value) for name, value in headers.items())
        try:
            channel.unary_unary(METHOD, bytes, bytes)(b"", timeout=ASK_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as exc:
            return False if exc.code() is grpc.StatusCode.UNAUTHENTICATED else None
    return True


def _source() -> str:
    """Return the place from which Ray took the token. Ray looks in this order."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
