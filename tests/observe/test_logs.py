"""The log of a process: nobody who logs waits for it, and its file stays small, whoever writes to it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.observe import log_files, logs
from pdserve.observe.log_files import CONTAINER_STDOUT, KEPT, STDOUT, log_file, open_log
from pdserve.observe.logs import MAX_WAITING_BYTES, WrittenByThread

BOUND_S = 60.0
SMALL = 4096


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be large that have a few KiB."""
    monkeypatch.setattr(log_files, "MAX_BYTES", SMALL)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("test")  # no logger of the process: pytest has handlers there
    yield logger
    for handler in logger.handlers:
        handler.flush()


def say(logger: logging.Logger, lines: list[str]) -> threading.Thread:
    """Log from a thread, which a test can find waiting."""
    thread = threading.Thread(target=lambda: [logger.info("%s", line) for line in lines], daemon=True)
    thread.start()
    thread.join(BOUND_S)
    return thread


def test_who_logs_does_not_wait_for_a_pipe_that_nobody_reads(logger: logging.Logger) -> None:
    """(1) A pipe takes 64 KiB, and 16 MiB are logged. (2) Once somebody reads, the lines that waited come, and then the number
    of the others."""
    reading, writing = os.pipe()
    logger.addHandler(WrittenByThread(writing))
    lines = [f"{number} {'x' * 1000}" for number in range(16_000)]
    assert not say(logger, lines).is_alive(), "whoever logs waits for the reader"
    got, lost = 0, 0
    with os.fdopen(reading) as pipe:
        for line in pipe:
            if " lines of the log are lost" in line:
                lost = int(line.split()[0])
                break
            got += 1
            if got == len(lines):
                break
    os.close(writing)
    assert lost
    assert got + lost == len(lines)
    assert got > MAX_WAITING_BYTES // 2000


def test_a_file_is_emptied_and_no_line_is_lost(small: None, tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "worker.log"
    with open_log(path) as file:
        logger.addHandler(WrittenByThread(file.fileno(), path))
        for number in range(KEPT * 30):
            logger.info("line %d %s", number, "x" * 80)
        logger.handlers[0].flush()
    parts = [path.with_name(f"worker.log.{number}") for number in range(KEPT, 0, -1)]
    said = "".join(part.read_text() for part in (*parts, path) if part.exists()).splitlines()
    assert [line.split()[-2] for line in said] == [str(number) for number in range(KEPT * 30)]
    assert path.stat().st_size < 2 * SMALL


def test_a_log_keeps_its_bound_for_ever(small: None, tmp_path: Path, logger: logging.Logger) -> None:
    path = tmp_path / "worker.log"
    with open_log(path) as file:
        logger.addHandler(WrittenByThread(file.fileno(), path))
        for _ in range(20):
            logger.info("%s", "x" * SMALL)
        logger.handlers[0].flush()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["worker.log", *(f"worker.log.{n}" for n in range(1, KEPT + 1))]
    assert all(one.stat().st_size <= 2 * SMALL for one in tmp_path.iterdir())


def test_what_a_child_and_a_library_write_is_bounded_too(small: None, tmp_path: Path, logger: logging.Logger) -> None:
    """Both have the file open, and go on in the one that was emptied."""
    path = tmp_path / "worker.log"
    with open_log(path) as file:
        logger.addHandler(WrittenByThread(file.fileno(), path))
        for _ in range(10):
            subprocess.run([sys.executable, "-c", f"print('c' * {SMALL})"], stdout=file, check=True)
            os.write(file.fileno(), b"n" * SMALL + b"\n")
            logger.info("a line")
            logger.handlers[0].flush()
        os.write(file.fileno(), b"the end\n")
    assert path.read_text().endswith("the end\n")
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 2 * (KEPT + 2) * SMALL


def test_a_large_file_of_an_earlier_process_is_emptied_at_the_start(small: None, tmp_path: Path) -> None:
    """A process that dies at its start, again and again, never comes to look at its file."""
    path = tmp_path / "router.log"
    for _ in range(10):
        with open_log(path) as file:
            file.write(b"x" * (SMALL // 2 + 1))
    assert path.stat().st_size < 2 * SMALL


def test_a_full_disk_empties_the_file_all_the_same(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_files, "_keep", full)
    path = tmp_path / "worker.log"
    path.write_bytes(b"x" * 2 * SMALL)
    log_files.empty_if_large(path)
    assert path.stat().st_size == 0


@pytest.mark.parametrize("made", ["open to all", "a link"])
def test_a_folder_of_logs_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    """Its name was the same for all users: who made it first could let our logs follow a link to any file of ours."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(log_files, "CONTAINER_STDOUT", tmp_path / "none")
    path = log_file(Path(STDOUT), "a.log")
    open_log(path).close()
    assert path.parent.stat().st_mode & 0o077 == 0
    path.unlink()
    ours = tmp_path / "ours"
    if made == "a link":
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
    else:
        path.parent.chmod(0o777)
    path.symlink_to(ours)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        open_log(path)
    assert not ours.exists()


def test_the_containers_output_is_no_file_that_is_read_or_emptied(small: None, tmp_path: Path) -> None:
    assert log_file(tmp_path, "a.log") == tmp_path / "a.log"
    path = log_file(Path(STDOUT), "a.log")
    assert path in (CONTAINER_STDOUT, Path(os.environ.get("TMPDIR", "/tmp")) / f"pdserve-{os.getuid()}-logs" / "a.log")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open_log(pipe) as file:
        file.write(b"x" * 2 * SMALL)
        log_files.empty_if_large(pipe)
    assert len(os.read(reading, 4 * SMALL)) == 2 * SMALL
    os.close(reading)


def test_the_last_lines_of_a_process_are_written() -> None:
    """Also where the reader has gone, in which case they go nowhere, and the process ends."""
    code = (
        "import logging; from pdserve.observe.logs import setup_logging; setup_logging()\nfor n in range(99): logging.info(n)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert [line.split()[-1] for line in ended.stderr.splitlines()] == [str(number) for number in range(99)]
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdin=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    process.communicate(timeout=BOUND_S)
    assert process.returncode in (0, -signal.SIGPIPE)


def test_a_file_that_only_others_write_to_is_emptied_too(
    small: None, tmp_path: Path, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 0.01)
    path = tmp_path / "worker.log"
    with open_log(path) as file:
        logger.addHandler(WrittenByThread(file.fileno(), path))
        os.write(file.fileno(), b"n" * 2 * SMALL)
        ends_s = time.monotonic() + BOUND_S
        while path.stat().st_size:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
