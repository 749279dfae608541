"""A forked process is what a process that was started afresh is, in all that tests look at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from testkit.zygote import Forked, Zygote

BOUND_S = 60.0
MODULE = "surroundings"

Starts = Callable[..., Forked]


@pytest.fixture(scope="module", autouse=True)
def heeded() -> Iterator[None]:
    """Children take SIGINT, although a shell lets what it runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def zygote(heeded: None) -> Zygote:
    return Zygote()


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(zygote: Zygote, log: Path) -> Iterator[Starts]:
    """Start forked processes. All have gone at the end."""
    forked: list[Forked] = []

    def started(end: str, env: Mapping[str, str] | None = None) -> Forked:
        with log.open("ab") as stderr:
            process = zygote.fork(MODULE, [end], env or environment(), stderr)
        assert process is not None
        forked.append(process)
        return process

    yield started
    for process in forked:
        process.kill()
        process.wait(BOUND_S)
        process.stdin.close()
        process.stdout.close()


def seen(process: Forked | subprocess.Popen[bytes]) -> dict[str, Any]:
    """What the process found around it."""
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_its_surroundings_are_those_of_a_process_that_was_started_afresh(start: Starts, log: Path) -> None:
    env = environment(PDSERVE_TESTING_WORD="here")
    forked, again = start("0", env), start("0", env)
    command = [sys.executable, "-m", MODULE, "0"]
    with (
        log.open("ab") as stderr,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=env) as fresh,
    ):
        expected, first, second = seen(fresh), seen(forked), seen(again)
    assert first["parent"] == os.getpid()
    numbers = {found.pop("random") for found in (expected, first, second)}
    assert first == second == expected
    assert len(numbers) == 3, "siblings would draw the same numbers"


@pytest.mark.parametrize(("end", "status"), [("0", 0), ("3", 3), ("raise", 1)])
def test_it_ends_when_stdin_closes_as_the_interpreter_does(start: Starts, log: Path, end: str, status: int) -> None:
    process = start(end)
    seen(process)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.stdin.close()
    assert process.wait(BOUND_S) == status == process.poll()
    assert "the last words" in log.read_text()
    assert ("KeyError: 'a bug'" in log.read_text()) == (end == "raise")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signals_end_it(start: Starts, number: signal.Signals) -> None:
    process = start("0")
    seen(process)
    process.send_signal(number)
    assert process.wait(BOUND_S) == -number
    process.send_signal(number)  # it has gone, and no other process gets it


def test_what_is_read_at_an_import_makes_a_process_one_to_start_afresh(
    zygote: Zygote, start: Starts, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("0")
    with log.open("ab") as stderr:
        assert zygote.fork(MODULE, ["0"], environment(OMP_NUM_THREADS="2"), stderr) is None
        assert zygote.fork(MODULE, ["0"], environment(UCX_TLS="tcp,self"), stderr) is None
        monkeypatch.chdir(tmp_path)
        assert zygote.fork(MODULE, ["0"], environment(), stderr) is None
