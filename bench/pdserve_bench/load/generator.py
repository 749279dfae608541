"""The load generator: it sends the requests of a workload at their times, and keeps a row of each.

The schedule decides (`schedule.py`); here is the loop that obeys it. One task belongs to each request that runs, and the run
owns them all: when it ends, on whatever path, none is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from pdserve_bench.load.schedule import Fail, RequestStart, RunLimits, Schedule
from pdserve_bench.load.target import ANSWER_GONE, MIXED_PROMPT, NO_TOKENS, TARGET_BUG, TIMEOUT, LoadAnswer, LoadCall, Target
from pdserve_bench.load.watch import LoadWatch, RunProgress, watch_nothing
from pdserve_bench.row import STOPPED, BenchRow
from pdserve_bench.workload.request import AnswerOf, BenchRequest, Ids

POLL_S: Final = 0.001
"""The last part of a wait, in which the loop only polls. The timers of uvloop and epoll count whole milliseconds."""

_log = logging.getLogger(__name__)


async def run_load(
    requests: Iterator[BenchRequest],
    target: Target,
    limits: RunLimits,
    watch: LoadWatch = watch_nothing,
    *,
    encode: Encode | None = None,
    progress: RunProgress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    poll_s: float = POLL_S,
) -> list[BenchRow]:
    """Send the requests and return one row of each, in the order in which they ended. The caller closes `target`.

    `encode` makes token ids of an answer's text, for prompts of ids that continue it. `clock` must be the clock that the target
    takes its times by. A cancellation ends the run early: what runs is cut off, the watch sees these rows too, and then the
    cancellation is raised.
    """
    run = _Run(target, limits, watch, encode, progress or RunProgress(), clock, poll_s)
    with quiet_garbage():
        return await run.run(requests)


class _Run:
    """One run. All times in it are seconds since its start."""

    def __init__(
        self,
        target: Target,
        limits: RunLimits,
        watch: LoadWatch,
        encode: Encode | None,
        progress: RunProgress,
        clock: Callable[[], float],
        poll_s: float,
    ) -> None:
        self._target = target
        self._limits = limits
        self._watch = watch
        self._encode = encode
        self._progress = progress
        self._clock = clock
        self._poll_s = poll_s
        self._origin_s = clock()
        self._schedule = Schedule(limits)
        self._kept = KeptAnswers()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._finished: deque[tuple[RequestStart, LoadAnswer]] = deque()
        self._wake = asyncio.Event()
        self._rows: list[BenchRow] = []
        self._stopped = False

    async def run(self, requests: Iterator[BenchRequest]) -> list[BenchRow]:
        try:
            while not self._schedule.over and not self._stopped:
                self._settle()
                now_s = self._now_s()
                self._progress.now_s = now_s
                for start in self._schedule.begin(now_s):
                    self._start(start)
                if self._schedule.wants:
                    self._pull(requests)
                    await asyncio.sleep(0)  # answers are read between two prompts
                elif not self._finished and not self._stopped:
                    await self._wait(self._schedule.next_s())
        finally:
            await self._cut()
        return self._rows

    def _now_s(self) -> float:
        return self._clock() - self._origin_s

    def _pull(self, requests: Iterator[BenchRequest]) -> None:
        request = next(requests, None)
        if request is None:
            self._schedule.no_more()
        else:
            self._give_up(self._schedule.add(request, self._now_s()))

    async def _wait(self, until_s: float | None) -> None:
        """Wait until a request ends, at most until `until_s`. The last part of the wait polls."""
        if self._schedule.over:
            return
        left_s = math.inf if until_s is None else until_s - self._now_s()
        collect_if_idle(left_s)
        if left_s <= 0:
            return
        if left_s <= self._poll_s:
            await asyncio.sleep(0)
            return
        self._wake.clear()
        timer = None
        if until_s is not None:
            timer = asyncio.get_running_loop().call_later(left_s - self._poll_s, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _start(self, start: RequestStart) -> None:
        request = start.request
        self._progress.held += start.held
        try:
            prompt = fill(request, self._kept, self._encode)
        except CannotFill as exc:
            fails = self._schedule.ended(request.number, start.planned_s, ok=False)
            self._give_up([Fail(request, start.planned_s, start.warm_up, str(exc)), *fails])
            return
        call = LoadCall(request.number, prompt, request.max_tokens, request.slo_class, request.session)
        answer = LoadAnswer()
        self._progress.running[request.number] = answer
        self._progress.sent += 1
        self._tasks[request.number] = asyncio.get_running_loop().create_task(self._serve(start, call, answer))

    async def _serve(self, start: RequestStart, call: LoadCall, answer: LoadAnswer) -> None:
        """Send one request. It ends in `_finished` on every path."""
        answer.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                await self._target.send(call, answer)
        except TimeoutError:
            answer.error = TIMEOUT
        except asyncio.CancelledError:
            answer.error = STOPPED
            raise
        except Exception:  # noqa: BLE001 - a bug in one call must not lose the rows of all others
            _log.exception("the call of request %d failed", call.number)
            answer.error = TARGET_BUG
        finally:
            if not answer.ended_s or answer.error:
                answer.ended_s = self._clock()
            if not answer.error and not answer.arrivals:
                answer.error = NO_TOKENS
            self._finished.append((start, answer))
            self._wake.set()

    def _settle(self) -> None:
        """Take the requests that have ended: their rows, and what may be sent after them."""
        while self._finished:
            start, answer = self._finished.popleft()
            number = start.request.number
            self._tasks.pop(number, None)
            self._progress.running.pop(number, None)
            if answer.error:
                self._progress.explain(answer.error, answer.message)
            else:
                self._kept.keep(number, answer)
            fails = self._schedule.ended(number, answer.ended_s - self._origin_s, ok=not answer.error)
            self._take(self._row(start, answer))
            self._give_up(fails)

    def _give_up(self, fails: list[Fail]) -> None:
        for fail in fails:
            self._take(unsent_row(fail))

    def _take(self, row: BenchRow) -> None:
        self._rows.append(row)
        self._progress.done += row.ok
        self._progress.failed += not row.ok and not row.cut
        if self._watch(row):
            self._stopped = True

    def _row(self, start: RequestStart, answer: LoadAnswer) -> BenchRow:
        request, origin_s = start.request, self._origin_s
        count = answer.output_tokens
        return BenchRow(
            number=request.number,
            planned_s=start.planned_s,
            sent_s=answer.sent_s - origin_s,
            ended_s=answer.ended_s - origin_s,
            prompt_tokens=answer.prompt_tokens or request.prompt_tokens or 0,
            output_tokens=sum(tokens for _, tokens in answer.arrivals) if count is None else count,
            arrivals=tuple([(time_s - origin_s, tokens) for time_s, tokens in answer.arrivals]),
            warm_up=start.warm_up,
            slo_class=request.slo_class,
            session=request.session,
            error=answer.error,
            served=answer.served,
        )

    async def _cut(self) -> None:
        """Cut off what runs, and take its rows."""
        self._schedule.close()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._settle()


def unsent_row(fail: Fail) -> BenchRow:
    """Return the row of a request that was given up before it was sent."""
    request = fail.request
    at_s = fail.at_s
    return BenchRow(
        number=request.number,
        planned_s=at_s,
        sent_s=at_s,
        ended_s=at_s,
        prompt_tokens=request.prompt_tokens or 0,
        output_tokens=0,
        warm_up=fail.warm_up,
        slo_class=request.slo_class,
        session=request.session,
        error=fail.reason,
    )


# The prompt of a request whose parts are earlier answers, and the answers that are kept for it.


MAX_KEPT_TOKENS: Final = 1 << 22
"""Tokens of answers that are kept. They need some 40 MiB."""

Encode = Callable[[str], Ids]


class CannotFill(Exception):
    """A prompt has a part that cannot be filled in. The argument is the reason for the row."""


@dataclass(frozen=True, slots=True)
class _Kept:
    text: str
    ids: array[int]
    tokens: int


class KeptAnswers:
    """The latest answers. The oldest ones are dropped first."""

    def __init__(self, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._answers: dict[int, _Kept] = {}
        self._order: deque[int] = deque()

    def keep(self, number: int, answer: LoadAnswer) -> None:
        """Keep the answer of a request that was answered whole."""
        kept = _Kept("".join(answer.texts), array("I", answer.ids), sum(count for _, count in answer.arrivals))
        self._answers[number] = kept
        self._order.append(number)
        self._tokens += kept.tokens
        while self._tokens > self._max_tokens:
            self._tokens -= self._answers.pop(self._order.popleft()).tokens

    def text(self, number: int) -> str:
        """Return the text of an answer. Raises `CannotFill`."""
        return self._get(number).text

    def ids(self, number: int, encode: Encode | None) -> Ids:
        """Return the tokens of an answer. Raises `CannotFill`."""
        kept = self._get(number)
        if kept.ids or not kept.text:
            return tuple(kept.ids)
        if encode is None:
            raise CannotFill(ANSWER_GONE)
        return encode(kept.text)

    def _get(self, number: int) -> _Kept:
        if number not in self._answers:
            raise CannotFill(ANSWER_GONE)
        return self._answers[number]


def fill(request: BenchRequest, kept: KeptAnswers, encode: Encode | None) -> str | Ids:
    """Return the whole prompt of a request: token ids if a part has ids, else text. Raises `CannotFill`."""
    parts = request.prompt
    if len(parts) == 1 and not isinstance(parts[0], AnswerOf):
        return parts[0]
    if not any(isinstance(part, tuple) for part in parts):
        return "".join(kept.text(part.number) if isinstance(part, AnswerOf) else str(part) for part in parts)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            raise CannotFill(MIXED_PROMPT)
        ids += kept.ids(part.number, encode) if isinstance(part, AnswerOf) else part
    return tuple(ids)


# The garbage collector during a run: it works only while nothing is due, because a full collection stops the generator.


IDLE_S: Final = 0.02
"""The shortest pause in which young objects are collected. A collection of `YOUNG` objects takes some 3 ms."""
YOUNG: Final = 50_000
MUST: Final = 2_000_000
"""So many objects are collected at once, due or not. They hold some 200 MiB."""


@contextmanager
def quiet_garbage() -> Iterator[None]:
    """Freeze what is there, and turn automatic collection off inside `with`."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_if_idle(idle_s: float) -> None:
    """Collect young objects if there are many and nothing is due for `idle_s`, or if there are too many."""
    young = gc.get_count()[0]
    if young > MUST or (young > YOUNG and idle_s >= IDLE_S):
        gc.collect(0)


# The priority of the generator: its threads go before those of servers on the same cores, where the system allows it.
#
# Niceness is not enough. Linux may share the cores between sessions first (sched(7), "The autogroup feature"); then a thread's
# niceness counts only within its session, and a generator of niceness -10 waited for up to 1.8 s while two workers computed. A
# thread of the lowest real-time priority did not wait. It sleeps most of the time, so servers lose nothing by that.


REAL_TIME: Final = 1
"""The lowest real-time priority. The kernel leaves 5 % of each core to other threads even if such a thread never sleeps."""


@contextmanager
def raised_priority() -> Iterator[bool]:
    """Make this thread, and those that it starts, real-time threads inside `with`. Yield whether they are.

    The system refuses it to users who have neither CAP_SYS_NICE nor a limit for it (`ulimit -r`). Nothing changes then.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME))
    try:
        yield os.sched_getscheduler(0) == os.SCHED_RR
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, policy, parameters)
