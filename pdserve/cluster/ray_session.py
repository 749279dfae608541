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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray._private import services

from pdserve.cluster import processes, ray_nodes, record
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.nodes import Node, NodeView
from pdserve.cluster.plan import LOCAL_HOST, local_environment, local_resources
from pdserve.cluster.ray_token import send_token_if_asked
from pdserve.config import ClusterConfig

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
        return None if self._private else ray_nodes.look

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
    cpus = math.ceil(sum(pool.num_cpus * pool.offered for pool in pools))
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
