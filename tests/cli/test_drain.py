"""`pdserve drain`: it says what is waited for, ends when the worker has left, and is clear about what it cannot do."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result

from pdserve.cli import main
from pdserve.client import AdminClient
from pdserve.cluster.router_process import Endpoints

WAIT_S = 60.0


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["drain", *arguments], catch_exceptions=False)


@contextmanager
def linked(endpoints: Endpoints, worker_id: str, *, stubborn: bool = False) -> Iterator[threading.Event]:
    """A worker that hangs up when it is told to drain, unless it is stubborn; the event says that it was told."""
    told, over = threading.Event(), threading.Event()
    host, _, port = endpoints.link.rpartition(":")
    link = socket.create_connection((host, int(port)), WAIT_S)
    link.settimeout(WAIT_S)
    link.sendall(json.dumps({"worker_id": worker_id, "address": "10.9.8.7:1", "pid": 1}).encode() + b"\n")

    def serve() -> None:
        with link:
            if link.recv(1):
                told.set()
            if stubborn:
                over.wait(WAIT_S)

    thread = threading.Thread(target=serve)
    thread.start()
    with AdminClient(endpoints.admin) as client:
        for _ in range(1000):
            if worker_id in {worker.hello.worker_id for worker in client.cluster_state().workers}:
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"{worker_id} was never linked")
    try:
        yield told
    finally:
        over.set()
        try:
            link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has hung up already
        thread.join(WAIT_S)


def test_it_ends_when_the_worker_has_left(endpoints: Endpoints) -> None:
    with linked(endpoints, "decode-6"), linked(endpoints, "decode-7") as told:
        result = run("decode-7", "--router", endpoints.admin)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "decode-7: waits for 2 requests, 30 blocks",
        "decode-7 has drained and left after 0.1 s",
    ]
    assert told.is_set()


def test_not_waiting_ends_while_the_worker_still_drains(endpoints: Endpoints) -> None:
    with linked(endpoints, "decode-6"), linked(endpoints, "decode-8", stubborn=True):
        result = run("decode-8", "--address", endpoints.admin, "--no-wait")
    assert (result.exit_code, result.stdout) == (0, "decode-8 is draining; `pdserve status` shows it\n")


def test_an_unknown_worker_is_one_line_that_names_those_that_are_there(endpoints: Endpoints) -> None:
    result = run("moon", "--router", endpoints.admin)
    assert result.exit_code == 1
    assert result.stderr == "error: worker_id: 'moon' is not linked; linked: decode-0 (NOT_FOUND)\n"


def test_a_host_is_drained_of_all_its_workers_and_of_nobody_elses(endpoints: Endpoints) -> None:
    with linked(endpoints, "decode-5") as first, linked(endpoints, "prefill-5") as second:
        assert run("--on-host", "10.9.8.6", "--router", endpoints.admin).exit_code == 0
        assert not first.is_set()
        result = run("--on-host", "10.9.8.7", "--router", endpoints.admin)
    assert result.exit_code == 0
    assert first.is_set()
    assert second.is_set()
    assert result.stdout.count("has drained and left") == 2


@pytest.mark.parametrize("arguments", [(), ("decode-0", "--on-host", "h")])
def test_exactly_one_way_of_saying_which_worker(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["drain", *arguments])
    assert result.exit_code == 2
    assert "either WORKER or --on-host" in result.stderr
