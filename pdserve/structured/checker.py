"""The check of clients' grammars in a process of their own, which is ended when a grammar takes too long.

A compilation cannot be interrupted inside a process, and Rust ends the whole process when memory or stack run out. So a grammar
compiles in a child first, within a deadline and a bound of memory. What has passed there compiles anywhere: the same input
takes the same work. Grammars are checked one after the other; a known one is not checked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdserve.core.errors import InternalBug, InvalidRequest, Overloaded
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.structured.child import LENGTH, READY, Verdict
from pdserve.structured.limits import CHECK_TIMEOUT_S

START_TIMEOUT_S: Final = 60.0  # the child reads the tokenizer, and does so while other processes start as well
STOP_TIMEOUT_S: Final = 5.0
MAX_WAITING: Final = 64
"""The most constraints that wait for their check. A usual one takes some milliseconds."""
MAX_KNOWN: Final = 1024
"""The most verdicts that are kept. Each holds its constraint, of at most 64 KiB."""
COMMAND: Final = (sys.executable, "-m", "pdserve.structured.child")


class GrammarChecker:
    """Checks constraints for one model. It owns a process, which the first constraint starts; `close` it."""

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        timeout_s: float = CHECK_TIMEOUT_S,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`directory` holds the model's tokenizer. `timeout_s` bounds the check of one constraint."""
        self._command = (*command, str(directory), *map(str, (vocab_size, *eos_token_ids)))
        self._timeout_s = timeout_s
        self._turns = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._child: asyncio.subprocess.Process | None = None

    @property
    def child_pid(self) -> int | None:
        """The child's process id. None: no child runs."""
        return None if self._child is None else self._child.pid

    async def check(self, constraint: Constraint) -> None:
        """Return if the constraint compiles. Raises `InvalidRequest`, which names what is not supported or the limit,
        `Overloaded` if too many constraints wait or the child starts slowly, and `InternalBug` if it ends at its start."""
        verdict = self._known.get(constraint)
        if verdict is None:
            verdict = await self._judged(constraint)
        message, field = verdict
        if message and field:
            raise InvalidRequest(message.removeprefix(f"{field}: "), field=field)

    async def close(self) -> None:
        """End the child. Whoever waits for a verdict gets an error."""
        await self._drop()

    async def _judged(self, constraint: Constraint) -> Verdict:
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many grammars wait for their check", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with self._turns:
                verdict = self._known.get(constraint) or await self._exchange(constraint)
        finally:
            self._waiting -= 1
        self._known[constraint] = verdict
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return verdict

    async def _exchange(self, constraint: Constraint) -> Verdict:
        """Ask the child. It ends if it does not answer in time, or if we are cancelled: a late answer must not be taken for
        that of the next constraint. Such a refusal is not kept, since a busy machine may be its reason."""
        child = await self._ready_child()
        assert child.stdin is not None
        assert child.stdout is not None
        field = f"{FIELD}.{constraint.kind.value}"
        request = pickle.dumps(constraint)
        try:
            async with asyncio.timeout(self._timeout_s):
                child.stdin.write(LENGTH.pack(len(request)) + request)
                await child.stdin.drain()
                (length,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
                message, refused = json.loads(
                    await child.stdout.readexactly(length)
                )  # no pickle: a grammar may have broken the child
        except TimeoutError:
            await self._drop()
            raise InvalidRequest(f"cannot be compiled within {self._timeout_s:g} s", field=field) from None
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            await self._drop()
            raise InvalidRequest("cannot be compiled: it takes too much memory or is nested too deeply", field=field) from exc
        except asyncio.CancelledError:
            await self._drop()
            raise
        return message, refused

    async def _ready_child(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is not None:  # ended from outside
            await self._drop()
        if self._child is None:
            pipe = asyncio.subprocess.PIPE
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environment
            )
            assert self._child.stdout is not None
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    said = await self._child.stdout.readexactly(len(READY))
            except TimeoutError as exc:
                await self._drop()
                raise Overloaded("the process that checks grammars is slow to start", retry_after_s=1.0) from exc
            except asyncio.IncompleteReadError as exc:
                await self._drop()
                raise InternalBug("the process that checks grammars ended at its start") from exc
            except asyncio.CancelledError:
                await self._drop()
                raise
            assert said == READY
        return self._child

    async def _drop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await child.wait()
