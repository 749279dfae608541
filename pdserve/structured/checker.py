"""The check of clients' grammars in a process of their own, which is ended when a grammar takes too long.

A compilation cannot be interrupted inside a process, and Rust ends the whole process when memory or stack run out. So a grammar
compiles in a child first, within a deadline and a bound of memory. What has passed there compiles anywhere: the same input
takes the same work. Grammars are checked one after the other; a known one is not checked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pdserve.core.errors import InternalBug, InvalidRequest, Overloaded, Unavailable
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.killable_child import ChildEnded, KillableChild
from pdserve.structured.child import Verdict
from pdserve.structured.limits import CHECK_TIMEOUT_S

log = logging.getLogger(__name__)

TRIES: Final = 2
"""The attempts to start the child, and to get a verdict if something outside kills it."""
MAX_WAITING: Final = 64
"""The most constraints that wait for their check. A usual one takes some milliseconds."""
MAX_KNOWN: Final = 1024
"""The most verdicts that are kept. Each holds its constraint, of at most 64 KiB."""
START_TIMEOUT_S: Final = 60.0  # the child reads the tokenizer, and does so while other processes start as well
VERDICT_BYTES: Final = 64 << 10  # a refusal has less than 4 KiB
COMMAND: Final = (sys.executable, "-m", "pdserve.structured.child")


class GrammarChecker:
    """Checks constraints for one model. It owns a thread, and a process that the first constraint starts; `close` it."""

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
        self._child = KillableChild(
            (*command, str(directory), *map(str, (vocab_size, *eos_token_ids))),
            start_timeout_s=START_TIMEOUT_S,
            most_bytes=VERDICT_BYTES,
            stderr=subprocess.PIPE,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="check grammars")
        self._timeout_s = timeout_s
        self._turns = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._checking: asyncio.Task[Verdict] | None = None
        self._closed = False

    @property
    def child_pid(self) -> int | None:
        """The child's process id. None: no child runs."""
        return self._child.pid

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
        self._closed = True
        self._child.close()
        if self._checking is not None:
            await asyncio.wait([self._checking])
        self._thread.shutdown(wait=False)

    async def _judged(self, constraint: Constraint) -> Verdict:
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many grammars wait for their check", retry_after_s=1.0)
        self._waiting += 1
        try:
            await self._turns.acquire()
            self._checking = asyncio.create_task(self._taken_turn(constraint))
            self._checking.add_done_callback(_seen)
            return await asyncio.shield(self._checking)
        finally:
            self._waiting -= 1

    async def _taken_turn(self, constraint: Constraint) -> Verdict:
        """Return the verdict, keep it, and pass the turn on. A client that leaves does not end its check: the next one would
        wait for a new child, and clients with less time than its start takes would never have one."""
        try:
            verdict = self._known.get(constraint) or await self._exchange(constraint)
            self._known[constraint] = verdict
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            return verdict
        finally:
            self._turns.release()

    async def _exchange(self, constraint: Constraint) -> Verdict:
        self._stay_open()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, constraint)

    # In the thread -----------------------------------------------------------------------------------------------------

    def _ask(self, constraint: Constraint) -> Verdict:
        """Return the child's verdict. A refusal because of the time is not kept, since a busy machine may be its reason."""
        field = f"{FIELD}.{constraint.kind.value}"
        for _ in range(TRIES):
            self._start()
            try:
                answer = self._child.ask(pickle.dumps(constraint), self._timeout_s)
            except TimeoutError:
                raise InvalidRequest(f"cannot be compiled within {self._timeout_s:g} s", field=field) from None
            except ChildEnded as exc:
                self._stay_open()
                log.warning("the process that checks grammars ended in a check: %s", exc.how)  # its words may quote the grammar
                if not exc.was_killed:
                    raise InvalidRequest(
                        "cannot be compiled: it takes too much memory or is nested too deeply", field=field
                    ) from exc
            else:
                message, refused = json.loads(answer)  # no pickle: a grammar may have broken the child
                return message, refused
        raise Overloaded("the process that checks grammars was killed again and again", retry_after_s=1.0)

    def _start(self) -> None:
        """Start the child if none runs. A start that fails once is tried again, since another process may have caused it: the
        kernel that was out of memory, or an installation that replaced a file at this moment."""
        how = ""
        for _ in range(TRIES):
            try:
                self._child.start()
            except TimeoutError as exc:
                raise Overloaded("the process that checks grammars is slow to start", retry_after_s=1.0) from exc
            except ChildEnded as exc:
                self._stay_open()
                log.error("the process that checks grammars ended at its start: %s\n%s", exc.how, exc.written)
                last = exc.written.rpartition("\n")[2]
                how = f"{exc.how}: {last}" if last else exc.how
            else:
                return
        raise InternalBug(f"the process that checks grammars ended at its start: {how}")

    def _stay_open(self) -> None:
        if self._closed:
            raise Unavailable("the router ends")


def _seen(check: asyncio.Task[Verdict]) -> None:
    """Look at how a check has ended. Its client may have left, and then nobody else does."""
    if not check.cancelled():
        check.exception()
