"""The cluster of a measurement: a stand-in for `pdserve up`, a real child process, is always stopped."""

from __future__ import annotations

import os
import sys

import psutil
import pytest

from pdserve.client import own_cluster
from pdserve.client.own_cluster import OwnCluster
from pdserve.core.errors import ConfigError, Unavailable

SERVES = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print('gRPC   127.0.0.1:7001'); print('admin  127.0.0.1:7003'); print('ready; Ctrl-C stops it', flush=True)
time.sleep(600)
"""
STUBBORN = SERVES.replace("sys.exit(0)", "None")


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.parametrize("text", [SERVES, STUBBORN])
def test_the_child_says_its_addresses_and_is_gone_afterwards(text, monkeypatch):
    monkeypatch.setattr(own_cluster, "STOP_S", 0.3)
    before = children()
    with OwnCluster(1, 3, None, program=program(text)) as cluster:
        assert (cluster.address, cluster.admin_address) == ("127.0.0.1:7001", "127.0.0.1:7003")
        (child,) = [one for one in children() if one not in before]
        assert child.cmdline()[-10:] == [
            "--prefill", "1", "--decode", "3", "--http-port", "0", "--grpc-port", "0", "--admin-port", "0",
        ]  # fmt: skip
    assert not child.is_running()


def test_a_cluster_that_ends_by_itself_is_an_error_when_asked():
    before = children()
    with OwnCluster(1, 1, None, program=program(SERVES)) as cluster:
        cluster.check()
        (child,) = [one for one in children() if one not in before]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its status stays for the cluster to read
        with pytest.raises(Unavailable, match="by itself with status -9: gRPC"):
            cluster.check()


def test_an_error_inside_stops_it_too():
    before = children()
    with pytest.raises(KeyboardInterrupt), OwnCluster(1, 1, None, program=program(SERVES)):
        raise KeyboardInterrupt
    assert children() == before


def test_a_wrong_setting_is_told_as_one():
    with (
        pytest.raises(ConfigError, match="error: no such model"),
        OwnCluster(1, 1, None, program=program("print('error: no such model'); raise SystemExit(2)")),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('error: no room')", "ended with status 0 before it was ready: error: no room"),
        ("print('ready;', flush=True); import time; time.sleep(600)", "printed no address of gRPC"),
        ("import time; time.sleep(600)", "was not ready after 0.2 s: it printed nothing"),
    ],
)
def test_a_cluster_that_does_not_start_is_an_error_and_leaves_nothing(text, said, monkeypatch):
    monkeypatch.setattr(own_cluster, "STOP_S", 0.3)  # a shell ignores SIGINT for what it runs in the background
    monkeypatch.setattr(own_cluster, "START_S", 0.2 if "not ready" in said else 60.0)
    before = children()
    with pytest.raises(Unavailable, match=said), OwnCluster(1, 1, None, program=program(text)):
        pass
    assert children() == before
