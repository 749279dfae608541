"""Our connection to Ray: a private Ray that lives and dies with us, or a running Ray cluster that we only join.

A private Ray is bound to the thread that starts it: the kernel kills its processes when that thread ends, so that thread
must outlive the cluster. Nothing is left even when our process is killed. Nothing per token passes through Ray, so its
object store gets the smallest size that Ray accepts.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
import ray
from ray import _raylet
from ray._private import services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.core.generated import autoscaler_pb2, common_pb2

from pdserve.cluster import processes, record
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.nodes import Node, NodeView, Request
from pdserve.cluster.plan import LOCAL_HOST, local_environment, local_resources
from pdserve.config import ClusterConfig
from pdserve.core.settings.labels import LabelSelector

OBJECT_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB
STOP_TIMEOUT_S = 5.0
DIAL_TIMEOUT_S = 5.0
NEEDED: Final = ("gcs_server", "raylet")
NICENESS: Final = "RAY_worker_niceness"  # a node of Ray reads it when it starts; the default is 15


class RaySession:
    """One connection to Ray. `connect` makes it, and the same thread must `close` it."""

    def __init__(self, private: Path | None, restore: ExitStack) -> None:
        self._private = private
        self._restore = restore
        self._needed: list[psutil.Process] = []  # the processes without which a private Ray is lost

    @classmethod
    def connect(cls, config: ClusterConfig, private: Path, cluster_name: str = "") -> RaySession:
        """Start or join Ray. `private` is the folder for a private Ray, whose processes are marked as the cluster's.

        Raises `ClusterError` when neither succeeds.
        """
        local = config.address == "local"
        session = cls(private if local else None, ExitStack())
        session._set_environment(record.mark_of(cluster_name) | record.tie_to(private) if local else {}, local)
        try:
            ray.init(**(_own(config, private) if local else _visit(config)))
        except (RuntimeError, OSError, OverflowError, ValueError, ray.exceptions.RayError) as exc:
            session.close()
            raise ClusterError(_explain(config, exc)) from exc
        except ClusterError:
            session.close()
            raise
        session._needed = [process for process in session._processes() if process.name() in NEEDED]
        return session

    def _set_environment(self, marks: dict[str, str], local: bool) -> None:
        """Set the environment variables that Ray reads. `close` restores them, but for the token.

        They turn usage statistics off. A private Ray also gets a token of its own, since Ray would otherwise leave one in
        the home folder, its workers get the niceness of ordinary processes, unless the operator has set another, and they
        inherit the variables of `local_environment`, and the marks by which they are found if this process is killed.
        Ray reads its token once in a process, so the token stays until the process ends. RAY_AUTH_MODE, which Ray itself
        writes into the environment, is restored.
        """
        wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        if local:
            wanted |= {NICENESS: os.environ.get(NICENESS, "0"), **local_environment(), **marks}
        if local and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        for name in (*wanted, "RAY_AUTH_MODE"):
            self._restore.callback(_set, name, os.environ.get(name))
        os.environ.update(wanted)
        logging.getLogger("ray").setLevel(logging.ERROR)

    @property
    def lost(self) -> bool:
        """Tell whether a private Ray has lost a process that it needs. Ray's library takes a minute to say so."""
        return not all(map(processes.alive, self._needed))

    @property
    def look(self) -> Callable[[], NodeView | None] | None:
        """A function that looks at the nodes of the joined cluster. None for a private Ray, where every worker fits."""
        return None if self._private else look

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the joined cluster; none for a private Ray, or when Ray does not answer."""
        view = self.look() if self.look else None
        return view.nodes if view else ()

    @property
    def node_host(self) -> str:
        """The address at which other nodes of the Ray cluster reach this machine; loopback for a private Ray."""
        return LOCAL_HOST if self._private else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Leave Ray. A private Ray is ended: its processes are waited for, and its folder is removed. Idempotent."""
        ours = self._processes()
        ray.shutdown()
        processes.kill(processes.wait_gone(ours, STOP_TIMEOUT_S))
        processes.wait_gone(ours, STOP_TIMEOUT_S)
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)
        self._restore.close()

    def _processes(self) -> list[psutil.Process]:
        """Return the processes of a private Ray: all that name its session's folder, and all that these started.

        The router's process is none of them: its settings lie beside that folder.
        """
        return processes.with_argument(str(self._private / "session_"), os.getpid()) if self._private else []


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _own(config: ClusterConfig, private: Path) -> dict[str, Any]:
    """Return the arguments of `ray.init` for a private Ray that offers exactly what the workers ask for.

    Ray starts an idle process for each CPU that it offers, so it offers no more CPUs than that.
    """
    pools = (config.prefill, config.decode)
    cpus = math.ceil(sum(pool.num_cpus * config.engine_for(pool).ranks * pool.offered for pool in pools))
    gpus = math.ceil(sum(pool.num_gpus * pool.offered for pool in pools))
    return {
        "address": "local",
        "include_dashboard": False,
        "_temp_dir": str(private),
        "_node_ip_address": LOCAL_HOST,
        "num_cpus": cpus,
        **({"num_gpus": gpus} if gpus else {}),
        "resources": local_resources(config),
        "object_store_memory": OBJECT_STORE_BYTES,
        "namespace": "pdserve",
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    }


def _visit(config: ClusterConfig) -> dict[str, Any]:
    """Return the arguments of `ray.init` for joining a cluster. `auto` becomes the address that Ray itself would take."""
    address = services.canonicalize_bootstrap_address(config.address)
    if address is None:
        raise ConnectionError("no Ray runs on this machine")
    host, _, port = address.rpartition(":")
    # To fail early: Ray would try an address where nobody answers for over a minute and ignore signals.
    socket.create_connection((host.strip("[]"), int(port)), DIAL_TIMEOUT_S).close()
    send_token_if_asked(address)
    return {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}


def _explain(config: ClusterConfig, exc: Exception) -> str:
    reason = " ".join(str(exc).split())[:300]
    if config.address == "local":
        return f"cannot start Ray: {reason}"
    address = os.environ.get("RAY_ADDRESS", "auto") if config.address == "auto" else config.address
    said = f"cannot join Ray at {address}"
    if any(
        isinstance(each, ray.exceptions.AuthenticationError) for each in (exc, exc.__cause__)
    ):  # Ray hides this error behind another one
        return f"{said}: it wants its token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    if "when trying to resolve node to connect to" in reason:
        return f"{said}: this machine is none of its nodes; make it one with `ray start --address={address}`"
    return f"{said}: {reason}; start one with `ray start --head`, or use --address local"


# The token of a Ray cluster. The cluster is asked before it is joined, and gets our token only if it wants one.
#
# Ray alone sends a token only when no address is named, needs 20 s to say that a token is missing, and loses every actor
# when a token goes to a cluster that takes none (measured with Ray 2.60).

ASK_TIMEOUT_S: Final = 5.0
METHOD: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # its request is empty, and every Ray answers it
_COMPILED: Final[Any] = _raylet  # it has no type stubs
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


# The nodes of the Ray cluster that this process has joined, in one look at what Ray's control service knows.

LOOK_TIMEOUT_S: Final = 5.0
_PROTOCOL: Final[Any] = autoscaler_pb2  # these modules have no type stubs
_COMMON: Final[Any] = common_pb2
_NOT_IN: Final = _COMMON.LABEL_OPERATOR_NOT_IN
MOST_PENDING: Final = 1000  # requests that are alike and kept at most; other users of the cluster may have any number
_USABLE: Final = (_PROTOCOL.RUNNING, _PROTOCOL.IDLE)  # neither dead nor draining


def look() -> NodeView | None:
    """Ask Ray for its nodes. None means that Ray does not answer now, so nothing can be said about them."""
    address = str(ray.get_runtime_context().gcs_address)
    reply = _PROTOCOL.GetClusterStatusReply()
    try:
        reply.ParseFromString(_COMPILED.GcsClient(address).get_cluster_status(timeout_s=LOOK_TIMEOUT_S))
    except ray.exceptions.RayError:
        return None
    return view_of(reply, address)


def view_of(reply: Any, address: str) -> NodeView:
    """Translate a `GetClusterStatusReply` of Ray's control service."""
    state = reply.autoscaling_state
    return NodeView(
        address=address,
        nodes=tuple(_node(state) for state in reply.cluster_resource_state.node_states if state.status in _USABLE),
        pending=tuple(
            _request(each.request)
            for each in reply.cluster_resource_state.pending_resource_requests
            for _ in range(min(each.count, MOST_PENDING))
        ),
        autoscaled=reply.HasField("autoscaling_state"),  # only an autoscaler writes it
        coming=tuple(
            sorted({each.ray_node_type_name for each in (*state.pending_instances, *state.pending_instance_requests)})
        ),
        takes_token=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",  # Ray or the operator has set it
        hopeless=tuple(dict(request.resources_bundle) for request in state.infeasible_resource_requests),
    )


def _request(request: Any) -> Request:
    selectors = {
        (rule.label_key, LabelSelector(rule.operator == _NOT_IN, tuple(sorted(rule.label_values))))
        for selector in request.label_selectors[:1]  # the others are fallbacks, and our requests have none
        for rule in selector.label_constraints
    }
    return frozenset(request.resources_bundle.items()), frozenset(selectors)


def _node(state: Any) -> Node:
    return Node(
        node_id=state.node_id.hex(),
        host=state.node_ip_address,
        total=dict(state.total_resources),
        free=dict(state.available_resources),
        labels=dict(state.labels),
    )
