"""A worker started without Ray: its one line, its exit statuses, and that it goes with its parent."""

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pdserve.config import MIB, EngineConfig, WorkerConfig, dump
from pdserve.engine.native import library
from testkit.processes import Process
from testkit.scripted_router import ScriptedRouter

pytestmark = pytest.mark.cluster

WAIT_S = 60
ENGINE = EngineConfig(model="tiny", kv_cache_memory=MIB, max_model_len=64, threads=1)


def start(module: str, path: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, "--config", str(path), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.parametrize(
    ("module", "ending"),
    [
        pytest.param(
            "prefill_worker", signal.SIGTERM, marks=pytest.mark.slow
        ),  # a cluster's two roles: test_worker_death_real.py
        ("decode_worker", "parent"),
        pytest.param("prefill_worker", "parent", marks=pytest.mark.slow),
        pytest.param("decode_worker", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("prefill_worker", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("decode_worker", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_it_says_one_line_when_ready_and_exits_0_when_told_to_stop(tmp_path, module, ending):
    with ScriptedRouter() as router:
        path = tmp_path / "worker.yaml"
        path.write_text(dump(WorkerConfig("w", router.address, ENGINE)))
        process = start(module, path, "--exit-with-parent")
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert ready["event"] == "ready"
            assert ready["pid"] == process.pid
            assert router.worker("w").hello.address == ready["address"]
            assert psutil.Process(process.pid).cmdline()[0] == "pdserve: w"
            assert psutil.Process(process.pid).environ()["OMP_NUM_THREADS"] == "1", "the environment stays to be read"
            if ending != "parent":
                process.send_signal(ending)
                assert process.wait(WAIT_S) == 0
            out, err = process.communicate(timeout=WAIT_S)  # closes its standard input
            assert process.returncode == 0, err
            assert out == ""
            assert "memory: weights" in err
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            pytest.param(text, words, marks=pytest.mark.slow)
            for text, words in (
                ("worker_id: w\nrouter_address: 127.0.0.1:1\nengine: {model: /nowhere}", ["/nowhere"]),
                ("worker_id: w", ["router_address"]),
                ("worker_id: w\nrouter_address: 127.0.0.1:1\nengine: {model: tiny, kv_cache_memory: 64}", ["kv_cache_memory"]),
                ("worker_id: w\nrouter_address: 127.0.0.1:1\ntyop: 1", ["tyop"]),
                (
                    "worker_id: w\nrouter_address: 127.0.0.1:1\ncluster_token: t\nhost: 198.51.100.1\nallow_public_bind: true",
                    ["host 198.51.100.1", "set host to an address of this machine"],
                ),
            )
        ),
        (
            "worker_id: w\nrouter_address: 127.0.0.1:1\ncluster_token: t\nhost: 198.51.100.1",
            ["host 198.51.100.1", "allow_public_bind"],
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_2(tmp_path, text, words):
    path = tmp_path / "worker.yaml"
    path.write_text(text)
    process = start("decode_worker", path)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith("error: ")
    assert all(word in err.splitlines()[-1] for word in words)
    assert "Traceback" not in err


@pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")
def test_a_forced_instruction_set_is_told_to_the_router(tmp_path, monkeypatch):
    monkeypatch.setenv(library.ISA, "avx2")
    with ScriptedRouter() as router:
        path = tmp_path / "worker.yaml"
        path.write_text(dump(WorkerConfig("w", router.address, replace(ENGINE, dtype="bfloat16"))))
        process = start("decode_worker", path, "--exit-with-parent")
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert router.worker("w").hello.isa == "avx2"
            _, err = process.communicate(timeout=WAIT_S)
            assert "compiled bfloat16 (AVX2, " in err
        finally:
            process.kill()
            process.communicate()


def test_an_unknown_instruction_set_is_one_line_and_2(tmp_path, monkeypatch):
    monkeypatch.setenv(library.ISA, "sse9")
    path = tmp_path / "worker.yaml"
    path.write_text(dump(WorkerConfig("w", "127.0.0.1:1", replace(ENGINE, dtype="bfloat16"))))
    process = start("decode_worker", path)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, err
    assert err.splitlines()[-1].startswith(
        "error: PDSERVE_ISA must be one of amx, avx512_bf16, avx512, avx2, amx_emulated, none, got 'sse9'"
    )


def test_a_port_that_is_taken_is_one_line_and_2(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = Process("decode_worker", WorkerConfig("w", "127.0.0.1:1", ENGINE, port=port), tmp_path, "w")
        assert process.popen.wait(WAIT_S) == 2, process.log()
        process.stop()
    assert f"cannot listen on 127.0.0.1:{port}" in process.log().splitlines()[-1]


@pytest.mark.parametrize("transports", [None, pytest.param("tcp,self", marks=pytest.mark.slow)], ids=["cma", "tcp"])
def test_a_worker_listens_on_loopback_and_nowhere_else(tmp_path, transports, monkeypatch):
    """Whoever reached the transport's port could end the worker with 77 bytes: all sockets of a real one, on every
    interface."""
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    process = Process("decode_worker", WorkerConfig("w", "127.0.0.1:1", ENGINE), tmp_path, "w")
    try:
        process.wait_ready()
        rows = psutil.Process(process.popen.pid).net_connections("inet")
        open_to = [ipaddress.ip_address(row.laddr.ip) for row in rows if row.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]
        own = [(address.ipv4_mapped or address) if address.version == 6 else address for address in open_to]
        assert len(own) >= 2, "the transport and the peer services"
        assert all(address.is_loopback for address in own), own
    finally:
        process.stop()
