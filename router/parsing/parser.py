"""The parser of requests: small ones are parsed at once, large ones in a process of their own.

msgspec and protobuf hold the interpreter lock from a body's first byte to its last. 8 MiB take up to 0.5 s, during which no
token and no heartbeat would move, in any thread. So a child process parses the large ones, one after the other. The first large
request starts it, and it ends with the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import select
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pdserve.core.errors import InternalBug, Overloaded
from router.openai.request import Call
from router.openai.responses.request import ResponsesCall
from router.parsing.child import LENGTH
from router.parsing.generate import Batch, GenerateCall, Refused
from router.parsing.parse import Job, Parsed, parse
from router.service.loop_time.serial_thread import SerialThread

logger = logging.getLogger(__name__)

INLINE_BYTES: Final = 32 << 10
"""Requests up to this size are parsed on the loop: 2.5 ms at worst, for 256 prompts of token ids. Most requests are smaller,
and a child would cost them more than that."""
PARSE_TIMEOUT_S: Final = 20.0  # for one request; 8 MiB take 0.5 s of a core, and the child starts in 0.5 s
WAIT_TIMEOUT_S: Final = 60.0  # for the requests before it and the request itself
MAX_WAITING: Final = 4096  # the front ends hold the bytes of those that wait, and bound them before
STOP_TIMEOUT_S: Final = 1.0
COMMAND: Final = (sys.executable, "-m", "router.parsing.child")


class RequestParser:
    """Parses requests of all front ends. It owns a thread and a process; `close` it."""

    def __init__(self, max_body_bytes: int, command: Sequence[str] = COMMAND) -> None:
        """The front ends hold the bytes of requests that wait, and bound how many there may be."""
        self._command = [*command, str(max_body_bytes)]
        self._thread = SerialThread("parse", MAX_WAITING)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def child_pid(self) -> int | None:
        """The child's process id. None: no large request has started a child."""
        return None if self._child is None else self._child.pid

    async def parse(self, job: Job) -> Parsed:
        """Parse a request. Raises `InvalidRequest` naming the field, `Overloaded` when it takes too long, `Unavailable` after
        `close`, and `InternalBug` when the child ends."""
        if len(job.data) <= INLINE_BYTES:
            return parse(job)
        verdict, result = await self._in_child(job)
        if verdict == "refused":
            kind, message, field = result
            raise kind(message, field=field)
        return await _unpacked(result)

    async def _in_child(self, job: Job) -> tuple[str, Any]:
        try:
            async with asyncio.timeout(WAIT_TIMEOUT_S):
                return await self._thread.run(lambda: self._exchange(job), job.client, len(job.data))
        except TimeoutError:
            raise Overloaded(f"the request was not read within {WAIT_TIMEOUT_S:g} s", retry_after_s=1.0) from None

    def close(self) -> None:
        """Stop the thread and the child. Bounded. A caller that waits for the child gets an error."""
        self._thread.close()
        self._drop()

    # In the thread -----------------------------------------------------------------------------------------------------

    def _exchange(self, job: Job) -> tuple[str, Any]:
        request = pickle.dumps(job, protocol=5)
        child = self._ready_child()
        end_s = time.monotonic() + PARSE_TIMEOUT_S
        try:
            for part in (LENGTH.pack(len(request)), request):
                self._send(child, part, end_s)
            reply: tuple[str, Any] = pickle.loads(self._read_reply(child, end_s))  # noqa: S301 - from our own child
        except TimeoutError:
            self._drop()
            raise Overloaded(f"the request was not read within {PARSE_TIMEOUT_S:g} s", retry_after_s=1.0) from None
        except (OSError, EOFError, ValueError) as exc:  # `close` closes the pipe, which raises ValueError
            self._drop()
            raise InternalBug(f"the process that reads large requests ended: {exc!r}") from exc
        return reply

    def _send(self, child: subprocess.Popen[bytes], data: bytes, end_s: float) -> None:
        """Write to the child until `end_s`. A child that reads nothing must not hold the thread for ever, and the pipe has room
        for only 64 KiB."""
        assert child.stdin is not None
        descriptor = child.stdin.fileno()
        left = memoryview(data)
        while left:
            _await_pipe(descriptor, select.POLLOUT, end_s)
            left = left[os.write(descriptor, left) :]

    def _read_reply(self, child: subprocess.Popen[bytes], end_s: float) -> bytes:
        assert child.stdout is not None
        descriptor = child.stdout.fileno()
        received = bytearray()
        wanted = LENGTH.size
        while len(received) < wanted:
            _await_pipe(descriptor, select.POLLIN, end_s)
            part = os.read(descriptor, min(1 << 20, wanted - len(received)))
            if not part:
                raise EOFError(f"exit status {child.poll()}")
            received += part
            if wanted == LENGTH.size == len(received):
                wanted += LENGTH.unpack(received)[0]
        return bytes(received[LENGTH.size :])

    def _ready_child(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:  # killed from outside
            self._drop()
        if self._child is None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            pipe = subprocess.PIPE
            self._child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, env=environment, bufsize=0)
            assert self._child.stdin is not None
            os.set_blocking(self._child.stdin.fileno(), False)
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_TIMEOUT_S)


def _await_pipe(descriptor: int, event: int, end_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
        raise TimeoutError


async def _unpacked(result: Any) -> Parsed:
    """Turn arrays of ids into tuples. The loop runs other work between them, because hundreds of prompts take some 50 ms
    together."""
    if isinstance(result, Call):
        return replace(result, inputs=tuple([await _with_tuple(one) for one in result.inputs]))
    if isinstance(result, ResponsesCall):  # a chat has no arrays
        return result
    if isinstance(result, Batch):
        return replace(result, calls=tuple([await _call_unpacked(one) for one in result.calls]))
    parsed: Parsed = await (_call_unpacked if isinstance(result, GenerateCall) else _with_tuple)(result)
    return parsed


async def _call_unpacked(one: Any) -> Any:
    return one if isinstance(one, Refused) else replace(one, input=await _with_tuple(one.input))


async def _with_tuple(one: Any) -> Any:
    if not isinstance(getattr(one, "prompt", None), array):
        return one
    await asyncio.sleep(0)
    return replace(one, prompt=tuple(one.prompt))
