"""The guard of a server of vLLM: a small program between the worker and the server, which ends all processes of the server.

A server has children of its own, which stay when it is killed alone. The guard gives it a process group. It kills the group
once standard input closes, which the kernel does when the worker ends in any way, and once the server itself has ended. It
needs nothing but Python's standard library: the worker runs it as a file, `guard.py COMMAND...`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

TERM_S = 3.0
"""The server may take so long to end by itself."""


def main(command: list[str]) -> int:
    """Run the command until it ends or standard input closes. Return its exit status; a signal gives 128 plus its number."""
    # Of a terminal, or of a group: the worker decides when the server ends. A signal that is ignored would be so in the server
    # as well, which keeps this over the start of its program, but no handler.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)
    # A session of its own, too: in one with the worker, the kernel would give the threads of the server, which spin, most of
    # its time.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_worker, args=(server,), daemon=True).start()
    status = server.wait()
    _kill_group(server.pid)
    return status if status >= 0 else 128 - status


def _end_with_worker(server: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(TERM_S)
    _kill_group(server.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
