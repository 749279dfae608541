"""Requests that wait for their grammar on a worker: they begin, fail or are cancelled, each alone."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from vocabularies import tokenizer_of

from pdserve.core.errors import ErrorCode, InvalidRequest, Overloaded, PdserveError
from pdserve.core.ids import Handle
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.core.structured.grammar_state import GrammarState
from pdserve.structured import compilations as compilations_module
from pdserve.structured.compilations import Compilations, GrammarSource
from pdserve.structured.vocabulary import Vocabulary

GOOD = Constraint(ConstraintKind.REGEX, "good")
BAD = Constraint(ConstraintKind.REGEX, "bad")
BROKEN = Constraint(ConstraintKind.REGEX, "broken")


class Worker:
    """The parts of a worker around its compilations. Its compiler waits until `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.failed: list[tuple[int, str, ErrorCode]] = []
        self.begun: list[Any] = []
        self.waiting = Compilations(self.start, self.fail)

    def start(self, constraint: Constraint) -> GrammarState:
        assert self.gate.wait(60)
        if constraint is BAD:
            raise InvalidRequest("is bad", field="structured_outputs")
        if constraint is BROKEN:
            raise ValueError("a bug")
        return cast(Any, constraint.text)

    def fail(self, handle: Handle, request_id: str, error: PdserveError) -> None:
        self.failed.append((handle, request_id, error.code))

    def begin(self, handle: int, constraint: Constraint) -> None:
        self.waiting.begin(Handle(handle), f"r{handle}", constraint, lambda grammar: self.begun.append((handle, grammar)))

    async def settle(self) -> None:
        async with asyncio.timeout(60):
            while not self.waiting.idle:
                await asyncio.gather(*self.waiting._tasks.values(), return_exceptions=True)


def test_a_vocabulary_is_read_once_while_the_worker_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constraint that comes meanwhile waits for it."""
    read: list[threading.Thread] = []

    def reading(*fields: Any) -> Vocabulary:
        read.append(threading.current_thread())
        return Vocabulary(*fields)

    monkeypatch.setattr(compilations_module, "Vocabulary", reading)
    source = GrammarSource(tokenizer_of("tiny"), 512, (2,))
    preparing = threading.Thread(target=source.prepare)
    preparing.start()
    with ThreadPoolExecutor(max_workers=4) as executor:
        states = list(executor.map(source.start, [GOOD] * 8))
    preparing.join()
    assert len(read) == 1
    assert all(state.mask() == states[0].mask() for state in states)


def test_a_vocabulary_that_cannot_be_read_fails_constraints_alone(caplog: pytest.LogCaptureFixture) -> None:
    source = GrammarSource(cast(Any, None), 512, (2,))
    source.prepare()
    assert "the vocabulary cannot be read" in caplog.text
    with pytest.raises(AttributeError):
        source.start(GOOD)


def test_each_request_begins_with_its_grammar_or_fails_alone() -> None:
    async def story() -> None:
        worker = Worker()
        for handle, constraint in ((1, GOOD), (2, BAD), (3, BROKEN), (4, GOOD)):
            worker.begin(handle, constraint)
        assert not worker.waiting.idle
        assert not worker.begun
        worker.gate.set()
        await worker.settle()
        assert worker.begun == [(1, "good"), (4, "good")]
        assert worker.failed == [(2, "r2", ErrorCode.INVALID_REQUEST), (3, "r3", ErrorCode.INTERNAL_BUG)]
        worker.waiting.close()

    asyncio.run(story())


def test_a_cancelled_request_never_begins() -> None:
    async def story() -> None:
        worker = Worker()
        for handle in (1, 2, 3):
            worker.begin(handle, GOOD)
        await asyncio.sleep(0)
        assert worker.waiting.cancel(Handle(2))
        assert not worker.waiting.cancel(Handle(2))
        worker.gate.set()
        await worker.settle()
        assert worker.begun == [(1, "good"), (3, "good")]
        worker.begin(5, GOOD)
        worker.waiting.close()
        assert worker.waiting.idle
        assert not worker.failed
        assert len(worker.begun) == 2

    asyncio.run(story())


def test_an_engine_that_takes_no_more_fails_the_request() -> None:
    """The error comes on the loop, after the compilation."""

    async def story() -> None:
        worker = Worker()
        worker.gate.set()

        def refuse(grammar: GrammarState) -> None:
            raise Overloaded("the queue is full", retry_after_s=1.0)

        worker.waiting.begin(Handle(7), "r7", GOOD, refuse)
        task = worker.waiting._tasks[Handle(7)]
        await task
        assert worker.failed == [(7, "r7", ErrorCode.OVERLOADED)]
        assert worker.waiting.idle
        worker.waiting.close()

    asyncio.run(story())
