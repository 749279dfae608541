"""The router's child process, without Ray: its line, its failures, its end."""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.router_process import RouterProcess
from pdserve.config import RouterConfig, RouterProcessConfig
from pdserve.core.errors import ConfigError

STANDIN = (sys.executable, str(Path(__file__).resolve().parent / "standin_router.py"))
ANY_PORTS = RouterConfig(http_port=0, grpc_port=0)


def make(folder: Path, router: RouterConfig = ANY_PORTS, command: tuple[str, ...] = STANDIN) -> RouterProcess:
    return RouterProcess(RouterProcessConfig(router, cluster_token="t"), folder=folder, log=folder / "log", command=command)


def test_ready_then_stopped_then_at_the_same_ports(tmp_path: Path) -> None:
    """(1) Start on any ports. (2) Stop. (3) Start again: the ports are those of the first time."""
    router = make(tmp_path)
    router.start()
    first = router.wait_ready(threading.Event())
    router.stop()
    router.stop()
    assert not psutil.pid_exists(first.pid)
    router.start()
    second = router.wait_ready(threading.Event())
    router.stop()
    assert (first.http, first.grpc, first.link) == (second.http, second.grpc, second.link)
    assert first.pid != second.pid


def test_settings_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    """They hold the cluster's token."""
    router = make(tmp_path)
    router.start()
    router.wait_ready(threading.Event())
    router.stop()
    assert (tmp_path / "router.yaml").stat().st_mode & 0o077 == 0


def test_busy_port_is_the_routers_own_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = make(tmp_path, RouterConfig(http_port=port, grpc_port=0))
        router.start()
        with pytest.raises(ConfigError, match=f"^--http-port {port} is in use$"):
            router.wait_ready(threading.Event())
        router.stop()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('error: no such thing')", "^no such thing$"),
        ("import sys; sys.exit(3)", "status 3 while starting"),
        ("print('hello')", "'hello' instead of its addresses"),
        ("print('{}')", "'{}' instead of its addresses"),
    ],
)
def test_a_router_that_fails_says_why(tmp_path: Path, script: str, message: str) -> None:
    router = make(tmp_path, command=(sys.executable, "-c", script))
    router.start()
    with pytest.raises(ClusterError, match=message):
        router.wait_ready(threading.Event())
    router.stop()


def test_waiting_ends_with_the_wish_to_stop_and_with_its_bound(tmp_path: Path) -> None:
    router = make(tmp_path, command=(sys.executable, "-c", "import sys; sys.stdin.read()"))
    router.start()
    stop = threading.Event()
    with pytest.raises(ClusterError, match="not ready after"):
        router.wait_ready(stop, timeout_s=0.2)
    stop.set()
    with pytest.raises(Interrupted):
        router.wait_ready(stop)
    router.stop()


def test_a_router_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"
    router = make(tmp_path, command=(sys.executable, "-c", script))
    router.start()
    with pytest.raises(ClusterError):
        router.wait_ready(threading.Event())
    pid = router.pid
    router.stop(timeout_s=0.2)
    assert not psutil.pid_exists(pid)
