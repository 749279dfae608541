"""Grammars of the simulation: production states, compiler and checker around a toy in place of the library that compiles.

The toy's languages are those of the oracle. A thread that compiles, and the process that checks, take virtual time.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

from pdserve.core.structured.constraint import Constraint
from pdserve.killable_child import ChildEnded, KillableChild
from pdserve.structured.checker import GrammarChecker
from pdserve.structured.child import Verdict
from pdserve.structured.compiler import Compiler
from sim.faults.oracle import EOS, VOCAB_SIZE, OraclePlace
from sim.world.process import Process

KEPT: Final = 2  # grammars that a worker keeps
COMPILE_S: Final = (0.0005, 0.0005, 0.005, 0.2)  # one checker for each grammar
CHECK_S: Final = (0.001, 0.001, 0.02, 0.3)
KILLED: Final = 0.02  # of the checks end with the process that checks


class SimMatcher:
    """The calls of llguidance's LLMatcher that a state makes, over a language of the oracle."""

    def __init__(self, place: OraclePlace) -> None:
        self._place = place
        self._error = ""

    def deep_copy(self) -> SimMatcher:
        """Return a matcher at the same place."""
        return SimMatcher(self._place)

    def consume_token(self, token_id: int) -> bool:
        """Take the next token. Return False if it is not allowed here."""
        if token_id not in self._place.allowed:
            self._error = f"token {token_id} is none of {self._place.allowed}"
            return False
        self._place = self._place.after(token_id)
        return True

    def compute_bitmask(self) -> bytes:
        """Return the mask of the next token."""
        if self._place.fails:
            self._error = "too many steps"
            return bytes([1 << EOS])
        return sum(1 << token_id for token_id in self._place.allowed).to_bytes(VOCAB_SIZE // 8, "little")

    def compute_ff_tokens(self) -> list[int]:
        """Return the tokens that must come next."""
        place, forced = self._place, list[int]()
        while not place.ended and len(place.allowed) == 1 and EOS not in place.allowed:
            forced += place.allowed
            place = place.after(forced[-1])
        return forced

    def is_stopped(self) -> bool:
        """Tell whether only the end of the sequence may follow."""
        return self._place.ended

    def is_error(self) -> bool:
        """Tell whether the matcher has failed."""
        return bool(self._error)

    def get_error(self) -> str:
        """Return the reason of the failure."""
        return self._error


class SimCompiler(Compiler):
    """The production compiler with the toy. It keeps few grammars, so that it compiles some again."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), KEPT)

    def _matcher_of(self, constraint: Constraint) -> Any:
        return SimMatcher(OraclePlace.start(constraint.text))


class GrammarThread:
    """The thread in which a worker compiles, one grammar after the other. `run` is the `in_thread` of the process's loop."""

    def __init__(self, process: Process, rng: random.Random, reached: Callable[[str, Process], None]) -> None:
        self._process = process
        self._rng = rng
        self._reached = reached
        self._free_s = 0.0

    def run(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        """Do the work a little later, and set its result or its error."""
        now_s = self._process.timeline.now_s
        self._free_s = max(now_s, self._free_s) + self._rng.choice(COMPILE_S)
        self._process.loop.post(self._free_s - now_s, self._end, work, done)

    def _end(self, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        self._reached(f"grammar_{self._process.role}", self._process)
        if not self._process.alive or done.done():
            return
        try:
            done.set_result(work())
        except Exception as exc:  # noqa: BLE001 - a future carries it to the task
            done.set_exception(exc)


class SimChild:
    """The process that checks grammars. All of them compile. It may be killed from outside."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def start(self) -> None:
        """Run already."""

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Return the verdict on a constraint. Raises `ChildEnded`."""
        if self._rng.random() < KILLED:
            raise ChildEnded("signal 9", was_killed=True)
        return json.dumps(("", "")).encode()


class SimChecker(GrammarChecker):
    """The production checker with a child of the simulation."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(Path(), VOCAB_SIZE, (EOS,))
        self._rng = rng
        self._child = cast(KillableChild, SimChild(rng))

    async def _exchange(self, constraint: Constraint) -> Verdict:
        await asyncio.sleep(self._rng.choice(CHECK_S))
        return self._ask(constraint)
