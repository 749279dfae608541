"""The record of a lasting cluster: it names living processes only, is this user's alone, and is whole or absent."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster import record
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.record import ClusterFacts, ClusterRecord, ProcessId, RouterFacts, SizeFacts
from pdserve.core.errors import ConfigError

SLEEP = "import time; print(flush=True); time.sleep(120)"
FACTS = ClusterFacts("secret", "/logs", logs_are_ours=True)


@contextmanager
def child(code: str = SLEEP, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has come up."""
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, **environment})
    try:
        assert started.stdout is not None
        assert started.stdout.readline()
        yield started
    finally:
        started.kill()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def test_a_process_is_its_pid_and_its_start() -> None:
    """(1) It lives. (2) Another process with its pid is not it, and gets no signal. (3) Killed, it is dead."""
    with child() as started:
        process = ProcessId.of(started.pid)
        assert process is not None
        assert process.alive
        earlier = ProcessId(process.pid, process.start_ticks - 1)
        assert not earlier.alive
        assert not earlier.send(signal.SIGKILL)
        assert started.poll() is None
        assert process.send(signal.SIGKILL)
        os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert not process.alive
        assert ProcessId.of(started.pid) is None
    assert not process.send(signal.SIGKILL)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    written = ClusterRecord.open("a", tmp_path / "root")
    assert (written.facts, written.router, written.workers, written.owner) == (None, None, {}, None)
    router = RouterFacts(ProcessId.own(), "h:1", "h:2", "h:3", "h:4", "h:5", "digest")
    written.write_facts(FACTS)
    written.write_router(router)
    written.write_worker("decode-0/..", {"pid": 7})
    read = ClusterRecord.find("a", tmp_path / "root")
    assert read is not None
    assert (read.facts, read.router, read.workers) == (FACTS, router, {"decode-0/..": {"pid": 7}})
    sizes = SizeFacts(1, 2, 1, 3)
    for wanted in (sizes, None, None):
        written.write_sizes(wanted)
        assert read.sizes == wanted
    read.forget_worker("decode-0/..")
    read.forget_worker("decode-0/..")
    assert written.workers == {}
    assert record.cluster_names(tmp_path / "root") == ["a"]
    written.remove()
    written.remove()
    assert not (tmp_path / "root").exists()
    assert ClusterRecord.find("a", tmp_path / "root") is None


def test_only_its_user_reads_a_record(tmp_path: Path) -> None:
    kept = ClusterRecord.open("a", tmp_path / "root")
    kept.write_facts(FACTS)
    kept.write_worker("decode-0", {})
    for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("which", ["", "a"])
def test_a_folder_that_others_may_change_is_refused(tmp_path: Path, which: str) -> None:
    """Whoever writes there names processes for us to kill, and a token to send."""
    (tmp_path / "root" / which).mkdir(parents=True)
    (tmp_path / "root").chmod(0o700)
    (tmp_path / "root" / which).chmod(0o770)
    for use in (ClusterRecord.open, ClusterRecord.find):
        (tmp_path / "root" / "a").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="user alone"):
            use("a", tmp_path / "root")


def test_a_planted_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "root").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="user alone"):
        ClusterRecord.open("a", tmp_path / "root")


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="user alone"):
        ClusterRecord.open("a", tmp_path / "root")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a" * 65, "a b", "a\n"])
def test_a_name_that_is_no_name_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        ClusterRecord.open(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.binary(max_size=60))
def test_no_bytes_in_a_file_are_an_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    kept = ClusterRecord.open("a", tmp_path_factory.mktemp("r", numbered=True))
    for file in ("lock", "cluster.json", "router.json", "workers/w.json"):
        (kept.folder / file).write_bytes(content)
    assert (kept.owner, kept.facts, kept.router) == (None, None, None)
    assert set(kept.workers) <= {"w"}


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=2))


@given(changed=st.dictionaries(st.sampled_from(["process", "http", "link", "settings_digest", "pid", "start_ticks"]), JSON))
def test_a_router_is_read_whole_or_not_at_all(tmp_path_factory: pytest.TempPathFactory, changed: dict[str, object]) -> None:
    """Whatever another version wrote: each field that is read has its type."""
    kept = ClusterRecord.open("a", tmp_path_factory.mktemp("r", numbered=True))
    router = RouterFacts(ProcessId.own(), "h:1", "h:2", "h:3", "h:4", "h:5", "digest")
    whole = dataclasses.asdict(router)
    whole["process"] = {**whole["process"], **{name: changed[name] for name in ("pid", "start_ticks") if name in changed}}
    outer = {name: value for name, value in changed.items() if name not in ("pid", "start_ticks")}
    (kept.folder / "router.json").write_text(json.dumps({**whole, "later": 1, **outer}))
    read = kept.router
    if not changed:
        assert read == router
    if read is not None:
        assert isinstance(read.process, ProcessId)
        assert {type(value) for value in (read.process.pid, read.process.start_ticks)} == {int}
        assert {type(value) for value in (read.http, read.link, read.settings_digest)} == {str}


def test_one_up_owns_a_cluster(tmp_path: Path) -> None:
    """(1) One owns it. (2) Another is refused, and told who does. (3) The owner dies: another one takes over."""
    code = (
        "import sys, time; from pathlib import Path; from pdserve.cluster.record import ClusterRecord\n"
        f"kept = ClusterRecord.open('a', Path({str(tmp_path / 'root')!r})); kept.own(); print(flush=True); time.sleep(120)"
    )
    with child(code) as owner:
        mine = ClusterRecord.open("a", tmp_path / "root")
        assert mine.owner == ProcessId.of(owner.pid)
        with pytest.raises(ClusterError, match=f"pid {owner.pid}.*--name"):
            mine.own()
        ClusterRecord.open("b", tmp_path / "root").own()
    mine.own()
    assert mine.owner == ProcessId.own()
    mine.release()
    mine.release()


def test_a_removed_record_is_made_again_by_the_next_owner(tmp_path: Path) -> None:
    """A lock on a file that is gone would exclude nobody."""
    first, second = ClusterRecord.open("a", tmp_path), ClusterRecord.open("a", tmp_path)
    first.own()
    first.remove()
    second.own()
    first.release()
    with pytest.raises(ClusterError):
        ClusterRecord.open("a", tmp_path).own()
    second.write_worker("w", {})
    second.release()


def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    kept = ClusterRecord.open("a", tmp_path)
    kept.write_worker("w", {"pid": 1})
    with pytest.raises(TypeError):
        kept.write_worker("w", {"pid": object()})
    assert kept.workers == {"w": {"pid": 1}}
    assert [path.name for path in (kept.folder / "workers").iterdir()] == ["w.json"]


def test_a_record_that_is_used_is_never_old(tmp_path: Path) -> None:
    """Its files are written once, and a machine removes what nobody has touched in its temporary folder for ten days."""
    kept = ClusterRecord.open("a", tmp_path)
    kept.write_facts(FACTS)
    kept.write_worker("w", {})
    paths = [kept.folder, *kept.folder.rglob("*")]

    def old() -> int:
        return sum(path.stat().st_mtime < 1000 for path in paths)

    for now_s, left in ((1.0, 0), (1.0 + record.REFRESH_S / 2, len(paths)), (1.0 + record.REFRESH_S, 0)):
        for path in paths:
            os.utime(path, (1, 1))
        kept.refresh(now_s)
        assert old() == left


def test_the_default_name_follows_the_admin_port() -> None:
    assert record.default_name(50053) == "pdserve-50053"
    assert record.default_name(0) != record.default_name(0)


def test_one_name_in_two_temporary_folders_is_two_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its lock, so each may run: the clean end of one killed the other."""
    name = f"test-{os.getpid()}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with child(**record.mark_of(name)) as started:
        assert [each.pid for each in record.marked(name)] == [started.pid]
        (tmp_path / "other").mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
        assert record.marked(name) == []


def test_marked_processes_are_found_whoever_their_parent_is() -> None:
    """(1) A process with the mark starts another, sets a title and ends. (2) The other is found. (3) One with a longer name
    is not."""
    orphan = (
        "import os, subprocess, sys; from setproctitle import setproctitle\n"
        f"p = subprocess.Popen([sys.executable, '-c', 'from setproctitle import *; setproctitle(chr(120) * 99); {SLEEP}'], "
        "stdout=subprocess.PIPE, start_new_session=True); p.stdout.readline(); print(p.pid, flush=True); os._exit(0)"
    )
    name = f"test-{os.getpid()}"
    started = subprocess.run(
        [sys.executable, "-c", orphan], stdout=subprocess.PIPE, env={**os.environ, **record.mark_of(name)}, check=True
    )
    with child(**record.mark_of(f"{name}0")):
        found = record.marked(name)
    try:
        assert [each.pid for each in found] == [int(started.stdout)]
    finally:
        for each in found:
            each.send(signal.SIGKILL)
