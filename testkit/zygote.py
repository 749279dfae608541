"""A process that has imported what routers and workers import, and forks them: each starts in a tenth of the CPU time.

Importing torch and our modules takes two CPU seconds, nearly all that the start of a small worker costs, and the tests start
hundreds. A forked process is what `python -m MODULE` would be in all that tests look at: it is a child of the process that
asked for it, with its own arguments, standard streams and title, it holds no descriptor of others, and it ends as the
interpreter does. It differs in three ways: the seed of `hash(str)` is that of its siblings, it shares memory with them, and
`/proc/PID/environ` is the zygote's.

Modules read their environment when they are imported. So only processes whose environment and working directory are the
zygote's are forked; only names in `FREE` may differ, which no module reads before it runs.

    tests ── SEQPACKET ──> zygote ── fork ──> (one that ends at once) ── fork ──> router, worker
      └── is the parent of the last one, since it takes orphans in while it asks (PR_SET_CHILD_SUBREAPER) ──┘
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import IO, Any, Final

MODULES: Final = ("torch", "prefill_worker.main", "decode_worker.main", "router.main")
FREE: Final = ("PDSERVE_TESTING_", "PYTEST_")
MESSAGE_BYTES: Final = 1 << 16
PR_SET_CHILD_SUBREAPER: Final = 36
ORPHANED_S: Final = 0.0005
"""A forked process looks so often whether it has its last parent."""
ANSWER_TIMEOUT_S: Final = 120.0
"""A fork takes milliseconds. The first one waits for the imports, which take 2 s of CPU time on a core that others may use."""

_asking = threading.Lock()


class Forked:
    """A child process that the zygote forked. It has the part of `subprocess.Popen` that `testkit.processes` needs."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | Any = None  # typed as that of Popen
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit status. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread reaped it just now
                ended = os.pidfd_open(self.pid)
                try:
                    select.select([ended], [], [], timeout)
                finally:
                    os.close(ended)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal. Nothing happens when the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The zygote as those see it who ask it. It starts at the first question, and ends with this process."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._fixed: object = None

    def fork(self, module: str, args: Sequence[str], env: Mapping[str, str], stderr: IO[bytes]) -> Forked | None:
        """Start `python -m module args`. None: its environment is not the zygote's, so it must be started afresh."""
        with _asking:
            fixed = (os.getcwd(), {name: value for name, value in env.items() if not name.startswith(FREE)})
            if self._socket is None:
                self._socket, self._fixed = _start(env), fixed
            if fixed != self._fixed:
                return None
            stdin, to_stdin = os.pipe()
            from_stdout, stdout = os.pipe()
            free = {name: value for name, value in env.items() if name.startswith(FREE)}
            prctl = ctypes.CDLL(None, use_errno=True).prctl

            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [json.dumps([module, *args, free]).encode()], [stdin, stdout, stderr.fileno()])
                pid = int(self._socket.recv(MESSAGE_BYTES))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

            os.close(stdin)
            os.close(stdout)
            return Forked(pid, open(to_stdin, "wb", buffering=0), open(from_stdout, "rb"))


def _start(env: Mapping[str, str]) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(ANSWER_TIMEOUT_S)
    with theirs:
        command = [sys.executable, "-m", "testkit.zygote"]
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=env)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve() -> list[str] | None:
    """Fork for each question. Return in each forked process, with its arguments, and None in the zygote when nobody can ask any
    more."""
    control = socket.socket(fileno=0)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell lets what it runs in the background ignore it
    while True:
        asked, streams, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
        if not asked:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
        told, tell = os.pipe()
        between = os.fork()
        if not between:
            own = os.getpid()
            pid = os.fork()
            if pid:
                os.write(tell, str(pid).encode())
                os._exit(0)
            while os.getppid() == own:  # on a busy machine this process may be faster than the end of the one between
                time.sleep(ORPHANED_S)
            control.detach()
            signal.signal(signal.SIGINT, interrupt)
            return _become(*json.loads(asked), streams=streams)
        os.waitpid(between, 0)
        control.send(os.read(told, MESSAGE_BYTES))
        for descriptor in (told, tell, *streams):
            os.close(descriptor)


def _become(*asked: object, streams: Sequence[int]) -> list[str]:
    *argv, free = asked
    assert isinstance(free, dict)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(len(streams), os.sysconf("SC_OPEN_MAX"))
    for name in [name for name in os.environ if name.startswith(FREE) and name not in free]:
        del os.environ[name]
    os.environ.update(free)
    import_module("numpy.random").seed()  # `random` does this by itself
    return [str(part) for part in argv]


if __name__ == "__main__":
    for name in MODULES:
        import_module(name)
    command = _serve()
    if command is not None:
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
