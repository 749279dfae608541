"""Finding what was left behind: each kind of thing, and nothing that is somebody else's."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from pdserve.cluster import leftovers, processes
from pdserve.cluster.folders import SOCKET_PATH_LIMIT, Folders
from pdserve.cluster.leftovers import Before
from pdserve.core.errors import ConfigError

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


def test_nothing_new_is_nothing_left(tmp_path: Path) -> None:
    assert not Before.now().compare([tmp_path / "gone"], [], [])


def test_each_kind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "END_TIMEOUT_S", 0.1)
    before = Before.now()
    segment = leftovers.SHARED_MEMORY / f"pdserve-test-{uuid.uuid4().hex}"
    segment.write_bytes(b"x")
    child = subprocess.Popen(SLEEP)
    try:
        with socket.create_server(("127.0.0.1", 0)) as port:
            left = before.compare([tmp_path], [f"127.0.0.1:{port.getsockname()[1]}"], [])
    finally:
        child.kill()
        child.wait()
        segment.unlink()
    kinds = sorted(line.split()[0] for line in left.found)
    assert kinds == ["folder", "port", "process", "shared"]
    assert str(child.pid) in "".join(left.found)


def test_a_segment_in_use_by_others_is_not_ours() -> None:
    before = Before.now()
    segment = leftovers.SHARED_MEMORY / f"pdserve-test-{uuid.uuid4().hex}"
    segment.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0):
            assert not before.compare([], [], [])
    finally:
        segment.unlink()


def test_a_semaphore_of_others_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was mapped under a name that it no longer has. The process that holds it is found, being a child of this one."""
    monkeypatch.setattr(leftovers, "END_TIMEOUT_S", 0.1)
    script = "import multiprocessing as m; lock = m.get_context('spawn').Lock(); print(lock._semlock.name, flush=True); input()"
    before = Before.now()
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip().removeprefix("/")
        assert (leftovers.SHARED_MEMORY / f"sem.{name}").exists()
        left = before.compare([], [], [])
    assert {line.split()[0] for line in left.found} == {"process"}


def test_a_number_used_again_is_another_process() -> None:
    child = subprocess.Popen(SLEEP)
    try:
        process = next(p for p in processes.descendants(os.getpid()) if p.pid == child.pid)
        assert processes.alive(process)
        assert 0 <= processes.age_s(child.pid) < 600
        earlier = psutil.Process(child.pid)
        earlier._ident = (child.pid, earlier._ident[1] - 1)  # as one that had this number and has ended
        assert not processes.alive(earlier)
        processes.kill([earlier])
        assert child.poll() is None
        processes.kill([process])
        assert not processes.wait_gone([process], 60.0)
        assert child.wait() == -signal.SIGKILL, "its exit status was left for us"
        assert not processes.alive(process)
    finally:
        child.kill()
        child.wait()


def test_processes_are_found_by_their_argument_with_their_children() -> None:
    mark = uuid.uuid4().hex
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)']); '{mark}'"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        while len(found := processes.with_argument(mark, os.getpid())) < 2:
            assert child.poll() is None
        assert child.pid in [process.pid for process in found]
    finally:
        processes.kill(processes.with_argument(mark, os.getpid()))
        child.wait()


def test_folders_stay_short_and_logs_survive_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * SOCKET_PATH_LIMIT)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folders = Folders.create(None)
    assert len(str(folders.private)) < 40
    (folders.logs / "worker.log").write_text("why")
    folders.remove(keep_logs=True)
    assert not folders.private.exists()
    assert folders.logs.exists()
    folders.remove(keep_logs=False)
    assert not folders.logs.exists()


def test_given_log_folder_is_kept(tmp_path: Path) -> None:
    folders = Folders.create(str(tmp_path / "logs"))
    folders.remove(keep_logs=False)
    assert folders.logs.is_dir()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="--log-dir"):
        Folders.create(str(file / "below"))
