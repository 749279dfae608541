"""Grammars of requests: they are compiled in a thread, and a request waits for its grammar before the engine hears of it.

The router has compiled each grammar in time before, so a compilation here is short. Usual ones take some milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pdserve.core.errors import InternalBug, InvalidRequest, PdserveError
from pdserve.core.ids import Handle
from pdserve.core.structured.constraint import FIELD, Constraint
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.structured.compiler import Compiler
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

StartGrammar = Callable[[Constraint], GrammarState]
"""Returns the state of a grammar before the first output token. It may take some milliseconds. Raises `InvalidRequest`."""


class GrammarSource:
    """The compiler of one worker. It reads the whole vocabulary once, and the library holds the interpreter meanwhile, so a
    worker calls `prepare` while it loads. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocabulary = partial(Vocabulary, tokenizer, vocab_size, eos_token_ids)
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary. A vocabulary that cannot be read fails the requests with a constraint, and no worker."""
        try:
            self._made()
        except Exception:
            log.exception("the vocabulary cannot be read for grammars")

    def start(self, constraint: Constraint) -> GrammarState:
        """Implements `StartGrammar`."""
        return self._made().start(constraint)

    def _made(self) -> Compiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = Compiler(self._vocabulary())
            return self._compiler


def no_grammars(constraint: Constraint) -> GrammarState:
    """Refuse every constraint, where no engine follows any."""
    raise InvalidRequest("this worker has no grammars", field=FIELD)


class Compilations:
    """The requests of one role that wait for their grammar. It belongs to the loop thread; `close` it."""

    def __init__(self, start_grammar: StartGrammar, fail: Callable[[Handle, str, PdserveError], None]) -> None:
        """`fail` gets the handle, the request id and the error of a request whose grammar could not be compiled."""
        self._start_grammar = start_grammar
        self._fail = fail
        self._tasks: dict[Handle, asyncio.Task[None]] = {}
        self._executor: ThreadPoolExecutor | None = None

    @property
    def idle(self) -> bool:
        """True when no request waits."""
        return not self._tasks

    def begin(self, handle: Handle, request_id: str, constraint: Constraint, then: Callable[[GrammarState], None]) -> None:
        """Compile the constraint, and call `then` with its grammar on the loop, unless the request is cancelled before."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        task = asyncio.create_task(self._compile(handle, request_id, constraint, then))
        self._tasks[handle] = task

    def cancel(self, handle: Handle) -> bool:
        """Forget a request. Return False if it does not wait here."""
        task = self._tasks.pop(handle, None)
        if task is not None:
            task.cancel()
        return task is not None

    def cancel_all(self, which: Callable[[Handle], bool] = lambda handle: True) -> None:
        """Forget all requests whose handles `which` names."""
        for handle in list(filter(which, self._tasks)):
            self.cancel(handle)

    def close(self) -> None:
        """Forget all requests, and let the thread end."""
        self.cancel_all()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _compile(
        self, handle: Handle, request_id: str, constraint: Constraint, then: Callable[[GrammarState], None]
    ) -> None:
        error: PdserveError | None = None
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(self._executor, partial(self._start_grammar, constraint))
            del self._tasks[handle]
            then(grammar)
        except PdserveError as exc:
            error = exc
        except Exception as exc:
            log.exception("grammar of request %s", request_id)
            error = InternalBug(f"grammar: {exc!r}")
        if error is not None:
            self._tasks.pop(handle, None)
            self._fail(handle, request_id, error)
