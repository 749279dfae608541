"""Our connection to Ray: a private one that lives and dies with us, or a running cluster that we only visit.

A private Ray is bound to the thread that starts it: the kernel kills its processes when that thread ends, so this
thread must outlive the cluster (and nothing is left when our process is killed). Nothing per token passes through
Ray, so its object store gets the least it accepts.
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

from pdserve.cluster import processes, ray_nodes
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.nodes import Node, View
from pdserve.cluster.plan import local_resources
from pdserve.cluster.ray_token import send_token_if_asked
from pdserve.config import ClusterConfig

LOCAL_HOST = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB
STOP_TIMEOUT_S = 5.0
DIAL_TIMEOUT_S = 5.0
NICENESS: Final = "RAY_worker_niceness"  # read by Ray's node when it starts; its default is 15


class RaySession:
    """Made by `connect`; `close` it in the same thread."""

    def __init__(self, private: Path | None, restore: ExitStack) -> None:
        self._private = private
        self._restore = restore

    @classmethod
    def connect(cls, config: ClusterConfig, private: Path) -> RaySession:
        """Start or join Ray. `private` is the folder of a Ray of our own. Raises `ClusterError`."""
        local = config.address == "local"
        session = cls(private if local else None, ExitStack())
        session._set_environment(local)
        try:
            ray.init(**(_own(config, private) if local else _visit(config)))
        except (RuntimeError, OSError, OverflowError, ValueError, ray.exceptions.RayError) as exc:
            session.close()
            raise ClusterError(_explain(config, exc)) from exc
        except ClusterError:
            session.close()
            raise
        return session

    def _set_environment(self, local: bool) -> None:
        """No usage statistics; for a private Ray a token of its own, or Ray would leave one in the home folder, and workers
        that share the cores as any other process does, unless the operator says otherwise.

        Ray reads its token once in a process, so ours stays until the process ends. Its mode, which Ray writes into the
        environment, does not.
        """
        wanted = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        if local:
            wanted[NICENESS] = os.environ.get(NICENESS, "0")
        if local and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        for name in (*wanted, "RAY_AUTH_MODE"):
            self._restore.callback(_set, name, os.environ.get(name))
        os.environ.update(wanted)
        logging.getLogger("ray").setLevel(logging.ERROR)

    @property
    def look(self) -> Callable[[], View | None] | None:
        """At the nodes of the cluster that was joined; a private Ray has one, where every worker fits."""
        return None if self._private else ray_nodes.look

    def nodes(self) -> tuple[Node, ...]:
        view = self.look() if self.look else None
        return view.nodes if view else ()

    @property
    def node_host(self) -> str:
        """This machine as the other nodes of the Ray cluster reach it; loopback for a Ray of our own."""
        return LOCAL_HOST if self._private else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Leave Ray; end a private one, wait for its processes and remove its folder. Idempotent."""
        ours = self._processes()
        ray.shutdown()
        processes.kill(processes.wait_gone(ours, STOP_TIMEOUT_S))
        processes.wait_gone(ours, STOP_TIMEOUT_S)
        if self._private:
            shutil.rmtree(self._private, ignore_errors=True)
        self._restore.close()

    def _processes(self) -> list[psutil.Process]:
        """Of a private Ray: all that name its session's folder, and what these started; the router lives beside it."""
        return processes.with_argument(str(self._private / "session_"), os.getpid()) if self._private else []


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _own(config: ClusterConfig, private: Path) -> dict[str, Any]:
    """Arguments of `ray.init` for a Ray that offers exactly what the workers ask for.

    Ray starts an idle process for each CPU that it offers, so it offers none that nobody asked for.
    """
    pools = (config.prefill, config.decode)
    cpus = math.ceil(sum(pool.num_cpus * pool.replicas for pool in pools))
    gpus = math.ceil(sum(pool.num_gpus * pool.replicas for pool in pools))
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
    """`auto` becomes the address that Ray itself would take, so that both kinds are joined in the same way."""
    address = services.canonicalize_bootstrap_address(config.address)
    if address is None:
        raise ConnectionError("no Ray runs on this machine")
    _dial(address)
    send_token_if_asked(address)
    return {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}


def _dial(address: str) -> None:
    """Ray itself would try an address that nobody answers for more than a minute, deaf to signals."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), DIAL_TIMEOUT_S).close()


def _explain(config: ClusterConfig, exc: Exception) -> str:
    reason = " ".join(str(exc).split())[:300]
    if config.address == "local":
        return f"cannot start Ray: {reason}"
    address = os.environ.get("RAY_ADDRESS", "auto") if config.address == "auto" else config.address
    said = f"cannot join Ray at {address}"
    if any(
        isinstance(each, ray.exceptions.AuthenticationError) for each in (exc, exc.__cause__)
    ):  # Ray hides it behind another
        return f"{said}: it wants its token; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
    if "when trying to resolve node to connect to" in reason:
        return f"{said}: this machine is none of its nodes; make it one with `ray start --address={address}`"
    return f"{said}: {reason}; start one with `ray start --head`, or use --address local"
