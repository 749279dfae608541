"""The record of a lasting cluster on this machine, by which the next `pdserve up` finds what an earlier one left running.

It is a folder of files, one for each fact, so that each has one writer: `workers/ID.json` belongs to whoever keeps that worker,
all others to the `pdserve up` that holds the lock. A file is written whole or not at all, and a file that cannot be read counts
as absent: the processes that it named are still found by the mark in their environment.

The folder lies under the temporary folder. The folder of XDG_RUNTIME_DIR is none: it goes when its user logs out, and a cluster
that was started in the background does not. Machines remove from a temporary folder what nobody has touched for days, so the
owner and the workers touch it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pdserve.cluster.errors import ClusterError
from pdserve.core.errors import ConfigError

Facts = TypeVar("Facts")
MARK: Final = "PDSERVE_CLUSTER"
"""The variable that every process of a cluster carries, with the name and the place of the cluster's record."""
TIED: Final = "PDSERVE_TIED"
"""The variable of each process that ends with the `pdserve` that started it: private Ray, and all of a cluster that is bound. A
lasting process that such a one starts must not inherit it."""
KEEP_ENVIRONMENT: Final = "SPT_NOENV"  # a process that sets its title would otherwise write over the mark
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # the length keeps Unix sockets below the folder within 107 bytes
PRIVATE: Final = 0o700
REFRESH_S: Final = 3600.0  # systemd-tmpfiles removes what was not touched for 10 days, and others do after one
ENDED: Final = ("Z", "X")  # states of /proc/PID/stat: a zombie runs no more


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this machine: its pid, and the time of its start, since the kernel uses pids again.

    start_ticks: clock ticks from the start of the machine to that of the process.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the process that has the pid now; None when there is none, or it is a zombie."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()  # the name of the program, before `)`, may hold any character
        return None if fields[0] in ENDED else cls(pid, int(fields[19]))

    @classmethod
    def own(cls) -> ProcessId:
        """Return this process."""
        found = cls.of(os.getpid())
        assert found is not None
        return found

    @property
    def alive(self) -> bool:
        """Tell whether this very process runs. A zombie does not."""
        return ProcessId.of(self.pid) == self

    def send(self, number: int) -> bool:
        """Send a signal to this very process. False: it has ended, or belongs to another user."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive:  # looked at after the descriptor was opened, which from then on means one process
                return False
            signal.pidfd_send_signal(descriptor, number)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """The facts of a cluster that its processes share for its whole life."""

    token: str  # the secret of the router, its workers and its administrators
    logs: str  # the folder of all logs
    logs_are_ours: bool  # the folder was made for this cluster, so it goes with it
    joined: bool = False  # it has joined a Ray of other machines, on which workers may run that are not recorded here
    drain_s: float = 30.0  # the router's: its streams get so long to end; the default is that of `router.drain_s`
    gpus: int = 0  # the GPUs that were counted when they were assigned to its workers
    assigned: str = ""  # a digest of the settings for which they were; empty: they were not yet


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """The router that runs, or ran last: its process, its addresses (host:port), and a digest of its settings."""

    process: ProcessId
    http: str
    grpc: str
    link: str
    admin: str
    metrics: str
    settings_digest: str


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """The sizes of the pools that operators ordered, and the sizes that the settings had then. Settings with other sizes
    replace the orders."""

    configured_prefill: int
    configured_decode: int
    prefill: int
    decode: int


class ClusterRecord:
    """The record of one cluster. The files may be read by any process of the user, and written by their owners."""

    def __init__(self, folder: Path) -> None:
        """Use `open` or `find`."""
        self.folder = folder
        self._lock: int | None = None
        self._refresh_s = 0.0  # the time of the next `refresh`

    @classmethod
    def open(cls, name: str, root: Path | None = None) -> ClusterRecord:
        """Return the record of a name, whose folder is made where it is missing.

        Raises `ConfigError` for a wrong name, and for a folder that another user made or may read.
        """
        folder = _folder(name, root)
        for each in (folder.parent, folder, folder / "workers"):
            make_private(each)
        return cls(folder)

    @classmethod
    def find(cls, name: str, root: Path | None = None) -> ClusterRecord | None:
        """Return the record of a name; None when there is none. Raises `ConfigError` as `open` does."""
        folder = _folder(name, root)
        if not folder.is_dir():
            return None
        _check_private(folder.parent)
        _check_private(folder)
        return cls(folder)

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.folder.name

    def own(self) -> None:
        """Become the one `pdserve up` of this cluster, until `release` or the end of this process.

        Raises `ClusterError` that names the process which is it already.
        """
        while True:
            for each in (self.folder, self.folder / "workers"):
                make_private(each)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                owner = self.owner
                who = f"pid {owner.pid}" if owner else "another process"
                raise ClusterError(
                    f"the cluster {self.name} has its `pdserve up` already ({who}); stop that one, or give this one another "
                    "name with --name"
                ) from None
            if self._is_lock(descriptor):
                break
            os.close(descriptor)  # whoever held it removed the record meanwhile
        self._lock = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dataclasses.asdict(ProcessId.own())).encode(), 0)

    def _is_lock(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), (self.folder / "lock").stat())
        except OSError:
            return False

    @property
    def owned(self) -> bool:
        """Tell whether this process is the one `pdserve up` of the cluster."""
        return self._lock is not None

    def release(self) -> None:
        """Own the cluster no more. What runs goes on. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def owner(self) -> ProcessId | None:
        """The `pdserve up` that owns the cluster; None when it has ended or there was none."""
        found = _process(_read(self.folder / "lock"))
        return found if found is not None and found.alive else None

    @property
    def facts(self) -> ClusterFacts | None:
        """The facts that were written; None when there are none."""
        read = _read(self.folder / "cluster.json")
        return _build(ClusterFacts, read) if read is not None else None

    def write_facts(self, facts: ClusterFacts) -> None:
        """Keep the facts for the next `pdserve up`."""
        _write(self.folder / "cluster.json", dataclasses.asdict(facts))

    @property
    def router(self) -> RouterFacts | None:
        """The router that runs or ran last; None when none has become ready yet."""
        read = _read(self.folder / "router.json")
        process = _process(read.get("process")) if read is not None else None
        return _build(RouterFacts, {**(read or {}), "process": process}) if process is not None else None

    def write_router(self, router: RouterFacts) -> None:
        """Keep what is known of the router."""
        _write(self.folder / "router.json", dataclasses.asdict(router))

    @property
    def sizes(self) -> SizeFacts | None:
        """The sizes that operators ordered; None when they have not."""
        read = _read(self.folder / "sizes.json")
        return _build(SizeFacts, read) if read is not None else None

    def write_sizes(self, sizes: SizeFacts | None) -> None:
        """Keep the ordered sizes for the next `pdserve up`; None: forget them."""
        if sizes is None:
            (self.folder / "sizes.json").unlink(missing_ok=True)
        else:
            _write(self.folder / "sizes.json", dataclasses.asdict(sizes))

    def worker_path(self, worker_id: str) -> Path:
        """Return the file of a worker. Whoever keeps the worker writes it, with `write_worker`."""
        return self.folder / "workers" / f"{urllib.parse.quote(worker_id, safe='')}.json"

    def write_worker(self, worker_id: str, facts: Mapping[str, object]) -> None:
        """Keep what is known of a worker: a mapping of JSON values."""
        _write(self.worker_path(worker_id), facts)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Hold off every other keeper of this machine that starts a worker of the cluster."""
        descriptor = os.open(self.folder / "workers", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def forget_worker(self, worker_id: str) -> None:
        """Remove the file of a worker. Idempotent."""
        self.worker_path(worker_id).unlink(missing_ok=True)

    @property
    def workers(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each worker, by its id, in the order of the ids."""
        files = sorted((self.folder / "workers").glob("*.json"))
        read = {urllib.parse.unquote(file.stem): _read(file) for file in files}
        return {worker_id: facts for worker_id, facts in read.items() if facts is not None}

    def refresh(self, now_s: float) -> None:
        """Touch all files, unless that was done within the last hour. Any process of the cluster may call it, often."""
        if now_s < self._refresh_s:
            return
        self._refresh_s = now_s + REFRESH_S
        with contextlib.suppress(OSError):  # the record is being removed
            for each in (self.folder, *self.folder.rglob("*")):
                with contextlib.suppress(OSError):
                    os.utime(each, follow_symlinks=False)

    def remove(self) -> None:
        """Remove the record, at the end of the cluster. Its owner calls it, before `release`. Idempotent."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other clusters of this user are recorded there
            self.folder.parent.rmdir()


def runtime_folder() -> Path:
    """Return the folder of all records of this user. It need not exist."""
    return Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"


def cluster_names(root: Path | None = None) -> list[str]:
    """Return the names of all clusters that are recorded."""
    folder = root or runtime_folder()
    return sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []


def default_name(admin_port: int) -> str:
    """Return the name of a cluster that was given none: of its admin port, or a new one when that is any free port (0)."""
    return f"pdserve-{admin_port or secrets.token_hex(6)}"


def mark_of(name: str) -> dict[str, str]:
    """Return the variables that every process of the cluster must have, so that `marked` finds it."""
    return {MARK: _mark(name), KEEP_ENVIRONMENT: "1"}


def _mark(name: str) -> str:
    """Return the value of the mark. The lock of a name is one of its temporary folder, so the mark is as well: a service with a
    private one has the same path and another folder."""
    folder = os.stat(tempfile.gettempdir())
    return f"{name}@{folder.st_dev:x}:{folder.st_ino:x}"


def tie_to(folder: Path) -> dict[str, str]:
    """Return the variables of a process that ends with the owner of the private folder, however that owner ends."""
    return {TIED: str(folder), KEEP_ENVIRONMENT: "1"}


def marked(name: str) -> list[ProcessId]:
    """Return all processes of this user that carry the cluster's mark, whoever their parents are, but for this process."""
    return carrying(MARK, _mark(name))


def carrying(variable: str, value: str) -> list[ProcessId]:
    """Return all processes of this user that were started with the variable, but for this process."""
    mark = f"{variable}={value}".encode()
    found = []
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        process = ProcessId.of(pid)
        if process is not None and pid != os.getpid() and mark in _environment(pid):
            found.append(process)
    return [process for process in found if process.alive]  # none that took a pid between the two looks


def _environment(pid: int) -> list[bytes]:
    """Return the variables with which a process was started; none of another user's, which cannot be read."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return []
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _folder(name: str, root: Path | None) -> Path:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the name of a cluster has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or a "
            f"digit, got {name!r}; give another with --name"
        )
    return (root or runtime_folder()) / name


def make_private(folder: Path) -> None:
    """Make a folder of this user alone. Raises `ConfigError` when it cannot be made, or others may read it."""
    try:
        folder.mkdir(PRIVATE, exist_ok=True)
    except FileNotFoundError:  # the last cluster of this user has just ended and removed the parent
        folder.parent.mkdir(PRIVATE, exist_ok=True)
        folder.mkdir(PRIVATE, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make {folder}, which is to hold the cluster's record: {exc.strerror}; set TMPDIR") from exc
    _check_private(folder)


def _check_private(folder: Path) -> None:
    """Raise `ConfigError` unless the folder is this user's alone: another user could name processes for us to kill."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{folder} is not a folder of this user alone (mode 0700); remove it, or set TMPDIR to another place")


def _write(path: Path, facts: Mapping[str, object]) -> None:
    """Write a file whole or not at all. It is readable by its owner only."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(facts, file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a file holds; None when it is absent or not what `_write` writes."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def _process(read: object) -> ProcessId | None:
    return _build(ProcessId, read) if isinstance(read, dict) else None


def _build(kind: type[Facts], read: Mapping[str, Any]) -> Facts | None:
    """Return the facts; None when a field without a default is missing, or one has another type. Fields of a later version are
    left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    wanted = {name: read.get(name, None if value is dataclasses.MISSING else value) for name, value in defaults.items()}
    types = {"int": int, "str": str, "bool": bool, "float": float}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        known = types.get(str(field.type))
        if wanted[field.name] is None or (known is not None and type(wanted[field.name]) is not known):
            return None
    return kind(**wanted)
