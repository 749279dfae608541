"""The process of the checker as its owner sees it: it starts, answers one message after the other, and says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from pdserve.structured.child import LENGTH, READY

START_TIMEOUT_S: Final = 60.0  # the child reads the tokenizer, and does so while other processes start as well
STOP_TIMEOUT_S: Final = 5.0
KEPT_BYTES: Final = 4096
"""The last bytes of standard error that are kept: the end of a traceback, which says what went wrong."""
FROM_OUTSIDE: Final = frozenset({signal.SIGKILL, signal.SIGTERM})
"""The signals that no grammar causes: Rust aborts when memory or stack run out. An operator sends them, or the kernel does when
the machine has no memory left."""


class ChildEnded(Exception):
    """The process ended before it answered. `was_killed`: something outside ended it."""

    def __init__(self, how: str, was_killed: bool, written: str) -> None:
        """`how` is the exit status in words. `written` is the end of what the process wrote to standard error."""
        super().__init__(how)
        self.how = how
        self.was_killed = was_killed
        self.written = written


class ChildProcess:
    """A process, from its start on. `close` it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """`process` has pipes for all three streams."""
        self._process = process
        self._written = b""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> ChildProcess:
        """Start the command. It is not `ready` yet."""
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment))

    async def ready(self) -> None:
        """Return when it can be asked. Raises `ChildEnded`, and `TimeoutError` if it is slow."""
        async with asyncio.timeout(START_TIMEOUT_S):
            said = await self._read(len(READY))
        assert said == READY

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True once the process is known to have ended."""
        return self._process.returncode is not None

    async def ask(self, message: bytes) -> bytes:
        """Send a message, and return its answer. Raises `ChildEnded`. If it is cancelled, `close` must follow: a late answer
        would be taken for that of the next message."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(LENGTH.pack(len(message)) + message)
            await self._process.stdin.drain()
        except ConnectionError:
            raise await self._ended() from None
        (length,) = LENGTH.unpack(await self._read(LENGTH.size))
        return await self._read(length)

    async def close(self) -> None:
        """End the process. Whoever waits for its answer gets `ChildEnded`."""
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.stdin.close()
        await self._wait()
        self._listening.cancel()

    async def _read(self, count: int) -> bytes:
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readexactly(count)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._ended() from None

    async def _ended(self) -> ChildEnded:
        """Return how the process ended. Its standard output is closed; it may write its last words at this moment."""
        await self._wait()
        status = self._process.returncode
        if status is None:
            return ChildEnded("its standard output was closed", False, "")
        if status < 0:
            how, was_killed = f"signal {_name(-status)}", -status in FROM_OUTSIDE
        else:
            how, was_killed = f"exit status {status}", False
        return ChildEnded(how, was_killed, self._written.decode(errors="replace").strip())

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
                await asyncio.wait([self._listening])

    async def _listen(self) -> None:
        """Keep the end of what the process writes to standard error, and read it all: a full pipe would stop the process."""
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(KEPT_BYTES):
            self._written = (self._written + piece)[-KEPT_BYTES:]


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
