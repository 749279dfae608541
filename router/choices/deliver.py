"""Tokens become bytes again: this is the one way in which front ends consume the generations of a call.

A front end submits its requests here and gives each generation a `Sink`, which knows only what a delta becomes on its wire.
Whatever ends the call, every generation is closed: its client leaves (the task is cancelled), a write fails, one of several
choices fails, or all of them end. A generation ends once: with a finish reason, or with an error that has a type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, TypeVar

from pdserve.core.errors import InternalBug, PdserveError
from pdserve.core.report import Report
from pdserve.core.sampling import SEED_LIMIT
from router.api.answer import Delta, Generation
from router.api.identity import draw_seed
from router.api.request import GenerateInput
from router.api.router_api import RouterApi

T = TypeVar("T")


class Sink(Protocol):
    """The part of a front end that knows what the deltas of one generation become."""

    is_quick: bool
    """True when deltas between the first and the last one may come to `take_now`: that costs less than to wake the task."""

    async def take(self, delta: Delta) -> None:
        """Take the next delta, and wait until the client may get more. The last one has a finish reason."""

    def take_now(self, delta: Delta) -> bool:
        """Take a delta without a wait. False: `take` must have it."""


class Delivery:
    """The generations of one call, as a context that closes them. `submit` each request, and then `run` all of them."""

    def __init__(self, api: RouterApi, *, ends_stalled_writes: bool) -> None:
        """`ends_stalled_writes`: a write that waits for a client is ended when the router drops the client. False: the
        connection itself ends such a write."""
        self._api = api
        self._ends_stalled_writes = ends_stalled_writes
        self.generations: list[Generation] = []
        """All candidates of all requests, those of a request side by side."""
        self.lost_reader = False
        """True once a write was ended because the router dropped the client, which took nothing for too long."""
        self._failed: Generation | None = None

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel at once what is still running."""
        for generation in self.generations:
            generation.close()

    async def submit(self, request: GenerateInput, ids: Sequence[str], *, ranked: bool = False) -> None:
        """Submit a candidate of the request for each id.

        The first one leads: the others wait for its KV instead of computing the prompt again. Candidate i has the seed of the
        request plus i; without one, a seed is drawn for the prompt. `ranked` asks for the log-probabilities that a choice of
        the likeliest candidates needs. Raises what `RouterApi.submit` raises.
        """
        sampling = dict(request.sampling)
        if ranked:
            sampling.setdefault("logprobs", 0)
        if len(ids) > 1:
            sampling.setdefault("seed", draw_seed())
        base, prompt = sampling.get("seed"), request.prompt
        for i, request_id in enumerate(ids):
            if base is not None:
                sampling["seed"] = (base + i) % SEED_LIMIT
            leader = ids[0] if i else ""
            one = replace(request, prompt=prompt, sampling=dict(sampling), request_id=request_id, leader=leader)
            generation = await self._api.submit(one)
            self.generations.append(generation)
            if isinstance(prompt, str):
                prompt = generation.prompt_ids  # it is not encoded again for each choice; a chat says more than its ids

    async def run(self, sinks: Sequence[Sink]) -> None:
        """Give each generation to its sink until all have ended. The first failure ends the others and is raised alone."""
        await together([self._run(*one) for one in zip(self.generations, sinks, strict=True)])

    async def _run(self, generation: Generation, sink: Sink) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._ends_stalled_writes:
            generation.on_stalled(task.cancel)
        try:
            finished = False
            async for delta in generation:
                await sink.take(delta)
                finished = delta.finish_reason is not None
                if sink.is_quick:
                    generation.take_by(sink.take_now)
            if not finished:
                raise InternalBug(f"request {generation.request_id} ended without a finish reason")
        except asyncio.CancelledError:
            if not self._ends_stalled_writes or generation.dropped is None:
                raise
            self.lost_reader, self._failed = True, self._failed or generation
            task.uncancel()  # the router itself cancelled it; a bare cancel would leave the call open for ever
            raise generation.dropped from None
        except PdserveError:
            self._failed = self._failed or generation
            raise

    @property
    def failure_report(self) -> Report | None:
        """The report of the generation that failed. None: none has failed, or it still runs, so what failed is the call."""
        try:
            return self._failed.report if self._failed is not None else None
        except InternalBug:
            return None


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the others and is raised alone."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as exc:
        raise exc.exceptions[0] from exc
    return [task.result() for task in tasks]
