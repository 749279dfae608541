"""Ctrl-C at any moment, and worse: the command ends, and nothing of it is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pdserve.cluster.keeping.order import running_workers
from pdserve.cluster.record import ClusterRecord

pytestmark = pytest.mark.ray
UP = ("up", "--port", "0", "--decode", "1")
BOUND_S = 120.0


@pytest.mark.slow
def test_up_interrupted_while_ray_starts_stops_cleanly(run_command: Any) -> None:
    command = run_command(*UP)
    command.wait_for("Ray starting")
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    assert "Traceback" not in command.text
    command.assert_nothing_left()


@pytest.mark.slow
def test_demo_interrupted_while_streaming_cleans_up_and_says_so(run_command: Any) -> None:
    command = run_command("demo", "--decode", "1", STANDIN_PAUSE_S="1.5")
    command.wait_for(r"r0 \+0")
    command.signal(signal.SIGINT)
    assert command.end() == 130, command.text
    assert "nothing is left" in command.text
    command.assert_nothing_left()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(run_command: Any) -> None:
    command = run_command(*UP)
    command.wait_for("Ray starting")
    os.kill(command.child.pid, signal.SIGTERM)
    os.kill(command.child.pid, signal.SIGINT)
    assert command.end() == 130, command.text
    assert "stopped at once" in command.text
    command.assert_nothing_left()


@pytest.mark.slow  # test_real_up.py ends a real cluster by Ctrl-C, and lasting/test_stopping.py has SIGTERM
def test_sigterm_after_ray_has_started_is_ours(run_command: Any) -> None:
    command = run_command(*UP)
    command.wait_for("prefill-0 starting")
    os.kill(command.child.pid, signal.SIGTERM)
    assert command.end() == 0, command.text
    assert "SIGTERM received" not in command.text
    command.assert_nothing_left()


@pytest.mark.slow
def test_a_wrong_setting_that_a_worker_refuses_is_one_line_and_leaves_no_unnamed_log_folder(run_command: Any) -> None:
    command = run_command(*UP, "--set", "engine.threads=1001")
    assert command.end() == 2, command.text
    assert "error: threads: 1001 are too many here\n" in command.text
    assert "Traceback" not in command.text
    command.assert_nothing_left()


@pytest.mark.slow
def test_a_failure_names_the_log_folder_that_it_keeps(run_command: Any) -> None:
    command = run_command(*UP, "--set", "engine.threads=1002")
    assert command.end() == 1, command.text
    kept = re.search(r"logs kept in (\S+)", command.text)
    assert kept, command.text
    assert [str(entry) for entry in command.temporary.iterdir()] == [kept[1]]


@pytest.mark.slow
def test_an_output_that_is_closed_ends_nothing(short_tmp: Path) -> None:
    """As that of `pdserve up | tee log` when its tee ends. The workers come up all the same, and a signal ends all cleanly."""
    folder = short_tmp / "t"
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("run_cli.py")), *UP, "--name", "closed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert any(b"workers starting" in line for line in child.stdout)
        child.stdout.close()
        deadline = time.monotonic() + BOUND_S
        while len(running_workers(ClusterRecord.find("closed", folder / f"pdserve-{os.getuid()}"))) < 2:  # more lines were told
            if child.poll() is not None or time.monotonic() > deadline:
                child.kill()
                pytest.fail("the workers did not come")
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.wait(BOUND_S) == 0
        assert child.stderr is not None
        assert b"Traceback" not in child.stderr.read()
    assert list(folder.iterdir()) == []
