"""A worker started without Ray: its one line, its exit statuses, and that it goes with its parent."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import MIB, EngineConfig, WorkerConfig, dump
from pdserve.testing.scripted_router import ScriptedRouter

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


@pytest.mark.parametrize("module", ["prefill_worker", "decode_worker"])
@pytest.mark.parametrize("ending", ["parent", signal.SIGTERM, signal.SIGINT])
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
        ("worker_id: w\nrouter_address: 127.0.0.1:1\nengine: {model: /nowhere}", ["/nowhere"]),
        ("worker_id: w\nrouter_address: 127.0.0.1:1\nengine: {model: tiny, kv_cache_memory: 64}", ["kv_cache_memory"]),
        ("worker_id: w\nrouter_address: 127.0.0.1:1\nhost: 192.0.2.1\nengine: {model: tiny}", ["192.0.2.1", "host", "port"]),
        ("worker_id: w", ["router_address"]),
        ("worker_id: w\nrouter_address: 127.0.0.1:1\ntyop: 1", ["tyop"]),
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
