"""The process that compiles clients' grammars first: a hostile one costs its own request, and the others go on."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hostile import HOSTILE, LARGEST

from pdserve.checkpoint.resolve import resolve
from pdserve.core.errors import InternalBug, InvalidRequest, Overloaded, Unavailable
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.structured import checker as checker_module
from pdserve.structured.checker import GrammarChecker
from pdserve.structured.grammar_text import grammar_text

K = ConstraintKind
MODEL = (resolve("tiny"), 512, (2,))
GOOD = Constraint(K.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))


@asynccontextmanager
async def checking(**fields: object) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(*MODEL, **fields)  # type: ignore[arg-type]
    try:
        yield checker
    finally:
        await checker.close()
    assert checker.child_pid is None


async def refusal(check: Awaitable[None]) -> InvalidRequest | None:
    try:
        await check
    except InvalidRequest as exc:
        return exc
    return None


def test_hostile_grammars_end_and_others_go_on():
    """Each is judged: it is refused, or small enough after all. A good one that waits behind all of them compiles. Nothing is
    compiled in this process, so its loop goes on."""

    async def run() -> None:
        async with checking(timeout_s=10.0) as checker:
            tasks = {name: asyncio.create_task(refusal(checker.check(one))) for name, one in HOSTILE.items()}
            last = asyncio.create_task(checker.check(GOOD))
            refused = {name: await task for name, task in tasks.items()}
            await last
            assert sum(exc is not None for exc in refused.values()) >= 5, refused
            for exc in refused.values():
                assert exc is None or exc.field.startswith("structured_outputs."), exc
                assert exc is None or len(exc.message) < 1000, "a refusal repeats its grammar"
            assert checker.child_pid is not None

    asyncio.run(run())


@pytest.mark.slow
def test_grammars_at_every_limit_of_their_size_are_judged_within_the_deadline():
    """One more byte or text is refused before, by its number."""

    async def run() -> None:
        async with checking(timeout_s=60.0) as checker:
            for name, one in LARGEST.items():
                exc = await refusal(checker.check(one))
                assert exc is None or "within" not in exc.message, name
            assert await refusal(checker.check(LARGEST["1,024 choices"])) is None

    asyncio.run(run())


def test_a_nested_schema_has_a_verdict_at_any_depth():
    """Reading and writing JSON take different numbers of levels of the interpreter's stack."""
    for depth in (10, *range(800, 1000), 3000, 6000):
        exc = depth_refusal('{"items":' * depth + "{}" + "}" * depth)
        assert (exc is None) if depth == 10 else (exc is not None or depth < 1000)
        assert exc is None or "nested too deeply" in exc.message


def depth_refusal(text: str) -> InvalidRequest | None:
    try:
        grammar_text(Constraint(K.JSON_SCHEMA, text))
    except InvalidRequest as exc:
        return exc
    return None


def test_a_refusal_names_what_is_not_supported_and_is_known_from_then_on():
    async def run() -> None:
        async with checking() as checker:
            unsupported = Constraint(K.JSON_SCHEMA, '{"uniqueItems": true}')
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
                    await checker.check(unsupported)
                assert caught.value.field == "structured_outputs.json"
            pid = checker.child_pid
            assert pid is not None
            await checker.check(GOOD)
            assert checker.child_pid == pid

    asyncio.run(run())


READY_CODE = "import sys; sys.stdout.buffer.write(bytes(8)); sys.stdout.flush(); sys.stdin.buffer.read(9)"
STUCK = f"{READY_CODE}; import time; time.sleep(600)"


@pytest.mark.parametrize(("code", "named"), [(STUCK, r"within 0\.2 s"), (READY_CODE, "too much memory")])
def test_a_child_that_does_not_answer_is_ended_and_the_next_one_starts(code, named):
    async def run() -> None:
        async with checking(timeout_s=0.2, command=(sys.executable, "-c", code)) as checker:
            with pytest.raises(InvalidRequest, match=named):
                await checker.check(GOOD)
            assert checker.child_pid is None
            checker._child._command = GrammarChecker(*MODEL)._child._command
            checker._timeout_s = 60.0
            await checker.check(GOOD)

    asyncio.run(run())


BROKEN = "import sys; print('a first line', file=sys.stderr); raise ImportError('no such part')"


def test_a_child_that_ends_at_its_start_says_why(caplog):
    """The client's error has its last line and the log all of it."""

    async def run() -> None:
        async with checking(command=(sys.executable, "-c", BROKEN)) as checker:
            with pytest.raises(InternalBug, match="exit status 1: ImportError: no such part"):
                await checker.check(GOOD)

    asyncio.run(run())
    assert "a first line" in caplog.text


def test_a_start_that_fails_once_costs_no_request(tmp_path):
    """Its next attempt finds the machine as it should be."""
    tried = tmp_path / "tried"
    code = (
        "import os, pathlib, runpy, sys; first = pathlib.Path(sys.argv.pop(1))\n"
        "if not first.exists(): first.touch(); os.kill(os.getpid(), 9)\n"
        "runpy.run_module('pdserve.structured.child', run_name='__main__')"
    )

    async def run() -> None:
        async with checking(command=(sys.executable, "-c", code, str(tried))) as checker:
            await checker.check(GOOD)

    asyncio.run(run())
    assert tried.exists()


def test_a_child_that_is_killed_from_outside_is_not_the_fault_of_its_grammar():
    """(1) It dies in a check, by a signal that no grammar causes, and the next one gives the verdict. (2) It dies each time,
    and the client is told to try again."""

    async def run() -> None:
        async with checking(timeout_s=60.0) as checker:
            await checker.check(GOOD)
            assert checker.child_pid is not None
            os.kill(checker.child_pid, signal.SIGSTOP)
            checked = asyncio.create_task(checker.check(Constraint(K.REGEX, "a+")))
            await until(lambda: checker._turns.locked())
            os.kill(checker.child_pid, signal.SIGKILL)
            await checked
        dying = f"{READY_CODE}; import os; os.kill(os.getpid(), 9)"
        async with checking(command=(sys.executable, "-c", dying)) as checker:
            with pytest.raises(Overloaded, match="killed"):
                await checker.check(GOOD)

    asyncio.run(run())


SILENT = "import sys; sys.stdin.buffer.read()"


@pytest.mark.parametrize("code", [SILENT, f"{READY_CODE}; {SILENT}"], ids=["starting", "checking"])
def test_a_closed_checker_starts_no_other_child(code):
    """Whoever waits is told so, and is not accused."""

    async def run() -> None:
        async with checking(timeout_s=60.0, command=(sys.executable, "-c", code)) as checker:
            waiting = asyncio.create_task(checker.check(GOOD))
            await until(lambda: checker.child_pid is not None)
            await checker.close()
            with pytest.raises(Unavailable):
                await waiting
            assert checker.child_pid is None

    asyncio.run(run())


def test_a_client_that_leaves_does_not_shift_the_answers():
    """Its verdict may be under way; it must not be taken for that of the next constraint."""

    async def run() -> None:
        async with checking(timeout_s=60.0) as checker:
            await checker.check(GOOD)
            leaving = asyncio.create_task(checker.check(Constraint(K.JSON_SCHEMA, '{"uniqueItems": true}')))
            await until(lambda: checker._turns.locked())
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await checker.check(Constraint(K.REGEX, "a+"))

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - the lock of another task has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("warm", [False, True], ids=["at its start", "in a check"])
def test_clients_that_leave_end_neither_the_child_nor_the_check(warm: bool):
    """Clients that give the child less time than its start takes would never have one, and others would wait for the next."""

    async def run() -> None:
        async with checking(timeout_s=60.0) as checker:
            if warm:
                await checker.check(GOOD)
            asked = Constraint(K.JSON_SCHEMA, '{"uniqueItems": true}')
            pids = set()
            for _ in range(3):
                leaving = asyncio.create_task(checker.check(asked))
                await until(lambda: checker._turns.locked() and checker.child_pid is not None)
                pids.add(checker.child_pid)
                leaving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await leaving
            assert checker._waiting == 0
            assert await refusal(checker.check(asked)) is not None
            assert pids == {checker.child_pid}
            left = asyncio.create_task(checker.check(Constraint(K.REGEX, "b+")))
            await until(checker._turns.locked)
            left.cancel()
        assert checker._checking is not None
        assert checker._checking.done()

    asyncio.run(run())


def test_a_check_that_fails_once_its_client_has_left_is_an_error_of_nobody():
    async def run() -> None:
        told: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        begun, left = asyncio.Event(), asyncio.Event()

        async def exchange(constraint: Constraint) -> tuple[str, str]:
            begun.set()
            await left.wait()
            raise Overloaded("the process that checks grammars was killed again and again", retry_after_s=1.0)

        async with checking() as checker:
            checker._exchange = exchange  # type: ignore[method-assign]
            client = asyncio.create_task(checker.check(GOOD))
            await begun.wait()
            client.cancel()
            await asyncio.wait([client])
            left.set()
        del checker, client  # what knows the check has gone, and a failure that nobody saw is told now
        gc.collect()
        assert not told

    asyncio.run(run())


def test_more_grammars_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        monkeypatch.setattr(checker_module, "MAX_WAITING", 2)
        async with checking() as checker:
            tasks = [asyncio.create_task(checker.check(Constraint(K.REGEX, f"a{i}"))) for i in range(3)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(one) for one in results] == [type(None), type(None), Overloaded]

    asyncio.run(run())


def test_the_room_loads_neither_torch_nor_the_engine():
    import subprocess

    names = "pdserve.structured.child, pdserve.structured.checker"
    code = f"import sys, {names}; print([n for n in ('torch', 'ray') if n in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr
