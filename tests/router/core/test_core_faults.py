"""A bug anywhere in the core: the event keeps the effects of what was done, and leaves none to the next event."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

import router.core.router_core as router_core
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import ErrorCode, PdserveError, Unavailable
from pdserve.core.worker import Role, WorkerLoad
from router.core import events as ev
from router.core.live_request import RemoteWork

from ..core_peers import Stage
from .test_core_machine import CoreMachine, chaos

CORE = Path(router_core.__file__).parent
FILES = {str(p) for p in CORE.rglob("*.py")}
IDLE = WorkerLoad(BlockCounts(16, 16, 0, 0, 0))
NOT_HANDLERS = {"handle", "check_invariants"}


class Injected(Exception):
    """The bug."""


class Broken(Exception):
    """The core said that it is broken."""


@contextmanager
def fault(point: int) -> Iterator[list[str]]:
    """Let the core raise as its `point`-th function begins or has just returned. Yields where it did."""
    left, where = point, list[str]()
    begun: set[FrameType] = set()

    def trace(frame: FrameType, kind: str, arg: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if code.co_filename not in FILES or code.co_name in NOT_HANDLERS:
            return None
        resumed = kind == "call" and frame in begun
        gives_out = kind == "return" and code.co_flags & CO_GENERATOR  # an effect goes out whole or not at all
        begun.add(frame)
        if kind in ("call", "return") and not resumed and not gives_out and not where:
            left -= 1
            if left < 0:
                where.append(f"{kind} of {code.co_qualname}")
                raise Injected(where[0])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(before)


class FaultyStage(Stage):
    """A core in which bugs are injected, and the shell's answer to them: the link of the event is hung up, or its client is
    told."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)
        self.replayable = False
        self.point: int | None = None
        self.bugs: list[Exception] = []
        self.where = ""

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        if self.point is None:
            return super().tell(event)
        point, self.point, self.bugs = self.point, None, []
        handle = self.core.handle

        def handled(event: ev.Event, *, now_s: float) -> list[ev.Effect]:
            with fault(point) as where:
                effects = handle(event, now_s=now_s)
            self.where = " ".join(where)
            return effects

        self.core.handle = handled  # type: ignore[method-assign]
        try:
            effects = super().tell(event)
        except Injected as exc:
            effects = []
            self.bugs.append(exc)
        finally:
            self.core.handle = handle  # type: ignore[method-assign]
        if self.bugs:
            self._answer(event)
        return effects

    def _answer(self, event: ev.Event) -> None:
        try:
            self.core.check_invariants()
        except AssertionError as exc:
            raise Broken(self.where) from exc
        if isinstance(event, ev.Submit):
            super().tell(ev.ClientGone(event.request_id))
            if not self.outcomes[event.request_id].ended:
                raise Unavailable("the core failed")
        elif (link := getattr(event, "link", None)) in self.peers:
            hello = self.peers[link].hello
            self.leave(self.peers[link])
            self.join(hello.worker_id, hello.role, incarnation=hello.incarnation, numerics=hello.numerics)

    def _perform(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.ReportBug):
            assert isinstance(effect.bug, Injected), effect.bug
            self.bugs.append(effect.bug)
        elif getattr(effect, "link", None) in (None, *self.peers):  # others have left in the same event
            super()._perform(effect)


class FaultyMachine(CoreMachine):
    stage_type = FaultyStage

    def drain(self, pick: int) -> None:
        """Left out: the rule expects that every drain succeeds."""


class FaultyProbingMachine(FaultyMachine):
    probe_workers = True


def run(kind: type[FaultyMachine], seed: int) -> tuple[int, str]:
    """Return how many bugs a run survived, and where the bug was after which the books disagreed. Empty: nowhere."""
    machine, random = kind(), Random(seed)
    machine.bugs_allowed = 1 << 30
    stage = machine.stage
    assert isinstance(stage, FaultyStage)
    survived = 0
    try:
        for _ in range(600):
            stage.point, stage.bugs = random.randrange(90) if random.random() < 0.1 else None, []
            chaos(machine, random)
            survived += bool(stage.bugs)
            machine.books_agree()
    except Broken as exc:
        return survived, str(exc)
    stage.point = None
    machine.teardown()
    return survived, ""


@pytest.mark.quick("FaultyMachine")
@pytest.mark.parametrize("kind", [FaultyMachine, FaultyProbingMachine])
def test_a_bug_anywhere_leaves_no_effect_behind_and_no_request_without_an_end(kind: type[FaultyMachine]) -> None:
    """Books that disagree afterwards are always reported in the same event. That is rare: the bug must be in a book itself, or
    in what contains bugs."""
    runs = [run(kind, seed) for seed in range(5 if kind is FaultyMachine else 8)]  # probes take turns of it
    survived = sum(count for count, _ in runs)
    broken = [where for _, where in runs if where]
    assert survived > 100
    assert len(broken) * 20 < survived, broken


def test_an_exception_leaves_nothing_to_the_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler of a lost worker fails at the second of three requests: all are dealt with, and the next event has only its
    own effects."""
    stage = FaultyStage()
    prefill, decode = stage.join("prefill-0", Role.PREFILL), stage.join("decode-0", Role.DECODE)
    outcomes = [stage.submit(f"r{i}") for i in range(3)]
    stage.deliver(decode, 3)
    worker_lost, calls = stage.core.recovery.worker_lost, list[object]()

    def failing(work: RemoteWork, error: PdserveError, now_s: float) -> ev.Effects:
        calls.append(work)
        if len(calls) == 2:
            raise Injected("the second")
        yield from worker_lost(work, error, now_s)

    monkeypatch.setattr(stage.core.recovery, "worker_lost", failing)
    effects = stage.core.handle(ev.WorkerLeft(prefill.link), now_s=0.0)
    assert len(calls) == 3
    assert len([e for e in effects if isinstance(e, ev.ReportBug)]) == 1
    (failed,) = [e for e in effects if isinstance(e, ev.EmitFailed)]
    assert failed.error.code is ErrorCode.INTERNAL_BUG
    stage.core.check_invariants()
    assert [type(e) for e in stage.core.handle(ev.HeartbeatSeen(decode.link, IDLE), now_s=0.0)] == [ev.SendAlive]
    assert not any(outcome.ended for outcome in outcomes)


def test_no_statement_throws_an_action_away() -> None:
    """An action that is called and not iterated does nothing, silently. Each call is iterated, returned, or passed on."""
    trees = [ast.parse(path.read_text()) for path in CORE.rglob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    actions = {f.name for f in functions if f.returns is not None and ast.unparse(f.returns).startswith("Effects")}
    assert {"retry", "withdraw", "_lose", "alone"} <= actions
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
                assert node.value.func.attr not in actions, ast.unparse(node)
