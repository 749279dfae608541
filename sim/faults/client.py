"""The simulated clients: their requests, their behaviour, and the answers that they got."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pdserve.core.errors import Cancelled, PdserveError, ReplicaLost
from pdserve.core.report import Report
from pdserve.core.sampling import SEED_LIMIT, Placement, SamplingParams
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from router.api.answer import Delta
from router.api.request import GenerateInput
from sim.faults.oracle import COSTLY, MAX_MODEL_LEN, VOCAB_SIZE
from sim.faults.router import SimRouter

CALM_DEADLINE_S: Final = 20.0
SIBLING_S: Final = 1e-6
"""A front end submits the choices of a prompt one right after the other."""
_STOPS: Final = ("ab", "b a", "é", "\n")
CONSTRAINTS: Final = tuple(Constraint(ConstraintKind.REGEX, text) for text in ("one", "two", "three", COSTLY))
"""The constraints of all requests. They are few, so that requests share them, and more than a worker keeps."""


@dataclass(frozen=True, slots=True)
class ClientAsk:
    """One request. All times are seconds of the timeline."""

    name: str
    at_s: float
    prompt: tuple[int, ...]
    params: SamplingParams
    deadline_s: float
    placement: Placement | None = None
    priority: int = 0
    leaves_after_s: float | None = None  # the client cancels after this time; None: it stays
    leader: str = ""  # the request of which this is another choice, by name
    constraint: Constraint | None = None
    ends_at: int | None = None  # the output token at which it ends its worker; None: it is harmless
    cache_salt: str = ""
    draft_limit: int | None = None
    client: tuple[str, ...] = ()  # the names of its client, connection and call; empty: the client is unknown


@dataclass(slots=True)
class CallOutcome:
    """The answer to one request, as the client saw it. `ended_s` None: it has not ended."""

    ask: ClientAsk
    deltas: list[Delta] = field(default_factory=list)
    error: PdserveError | None = None
    report: Report | None = None
    ended_s: float | None = None

    @property
    def ok(self) -> bool:
        """True if the request ended without an error."""
        return self.ended_s is not None and self.error is None


class SimClient:
    """A client that sends one request, once, to the router that lives at that time. `task` runs on that router's loop."""

    def __init__(self, ask: ClientAsk, now_s: Callable[[], float]) -> None:
        self.outcome = CallOutcome(ask)
        self.task: asyncio.Task[None] | None = None
        self._now_s = now_s

    def send(self, router: SimRouter) -> None:
        """Hand the request to the router's front end. It is called on the router's loop."""
        self.task = router.process.loop.create_task(self._serve(router))
        self.task.add_done_callback(self._on_done)

    def lost(self) -> None:
        """End the request because the connection to the router broke. The error allows the client to try again."""
        self._end(ReplicaLost("the connection to the router broke"))

    def leave(self) -> None:
        """Cancel the request. It is called on the router's loop."""
        if self.task is not None:
            self.task.cancel()

    async def _serve(self, router: SimRouter) -> None:
        ask, service = self.outcome.ask, router.service
        assert service is not None
        try:
            generation = await service.submit(_input_of(ask))
            try:
                async for delta in generation:
                    self.outcome.deltas.append(delta)
                self.outcome.report = generation.report
            finally:
                generation.close()
        except PdserveError as exc:
            self._end(exc)
        else:
            self._end(None)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # it may have been cancelled before it had begun
            self._end(Cancelled("the client left"))

    def _end(self, error: PdserveError | None) -> None:
        if self.outcome.ended_s is None:
            self.outcome.error = error
            self.outcome.ended_s = self._now_s()


def _input_of(ask: ClientAsk) -> GenerateInput:
    params = ask.params
    sampling: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "min_tokens": params.min_tokens,
        "stop": params.stop,
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "skip_special_tokens": params.skip_special_tokens,
        "temperature": params.temperature,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        **({} if params.prompt_logprobs is None else {"prompt_logprobs": params.prompt_logprobs}),
        **({} if params.logprobs is None else {"logprobs": params.logprobs}),
    }
    options: dict[str, Any] = {"priority": ask.priority, "cache_salt": ask.cache_salt}
    if ask.draft_limit is not None:
        options["draft_limit"] = ask.draft_limit
    return GenerateInput(
        prompt=ask.prompt,
        sampling=sampling,
        request_id=ask.name,
        deadline_s=ask.deadline_s,
        placement=ask.placement,
        options=options,
        leader=ask.leader,
        constraint=ask.constraint,
        client=ask.client,
    )


def draw_ask(name: str, at_s: float, rng: random.Random, prefixes: list[tuple[int, ...]], *, unruly: bool) -> ClientAsk:
    """Draw one request of a seed's workload. `unruly`: some clients leave early, and some have short deadlines."""
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 4, 7, 12, 18, 33, 50))))
    if rng.random() < 0.4:
        prompt = (*rng.choice(prefixes), *prompt)
    max_tokens = rng.choice((1, 2, 5, 9, 16, 30))
    assert len(prompt) + max_tokens < MAX_MODEL_LEN
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=rng.getrandbits(32),
        min_tokens=rng.choice((0, 0, 0, max_tokens // 2)),
        stop=rng.choice(((), (), (), (rng.choice(_STOPS) * 2,))),
        stop_token_ids=rng.choice(((), (), (rng.randrange(VOCAB_SIZE),))),
        ignore_eos=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.2,
        skip_special_tokens=rng.random() < 0.8,
    )
    hurried = unruly and rng.random() < 0.1
    leaves = unruly and rng.random() < 0.15
    return ClientAsk(
        name,
        at_s,
        prompt,
        params,
        deadline_s=rng.uniform(0.02, 0.5) if hurried else CALM_DEADLINE_S,
        placement=rng.choice((None, None, None, Placement.COLOCATED, Placement.DISAGGREGATED)),
        leaves_after_s=rng.uniform(0.0, 0.6) if leaves else None,
    )


def with_scores(asks: list[ClientAsk], rng: random.Random, share: float) -> list[ClientAsk]:
    """Let a share of the requests ask for the scores of their prompts, with up to two likeliest ids for each token."""
    return [
        replace(ask, params=replace(ask.params, prompt_logprobs=rng.choice((0, 1, 2)))) if rng.random() < share else ask
        for ask in asks
    ]


def with_constraints(asks: list[ClientAsk], rng: random.Random, share: float) -> list[ClientAsk]:
    """Give a share of the requests a constraint. Such a request asks for no least length."""
    return [
        replace(ask, constraint=rng.choice(CONSTRAINTS), params=replace(ask.params, min_tokens=0))
        if rng.random() < share
        else ask
        for ask in asks
    ]


def with_draws(asks: list[ClientAsk], rng: random.Random, share: float) -> list[ClientAsk]:
    """Let a share of the requests be greedy, have penalties, or ask for the log-probabilities of their output, or several of
    these. Requests that end their workers are left as they are."""
    drawn = []
    for ask in asks:
        if ask.ends_at is None and rng.random() < share:
            params = replace(
                ask.params,
                temperature=rng.choice((0.0, 0.0, 1.0)),
                frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
                repetition_penalty=rng.choice((1.0, 1.0, 1.5)),
                logprobs=rng.choice((None, None, 0, 2)),
            )
            ask = replace(ask, params=params)
        drawn.append(ask)
    return drawn


def with_draft_limits(asks: list[ClientAsk], rng: random.Random) -> list[ClientAsk]:
    """Let half of the requests limit their drafts."""
    return [replace(ask, draft_limit=rng.choice((None, None, None, 0, 1, 3))) for ask in asks]


def with_salts(asks: list[ClientAsk], rng: random.Random, *, until_s: float) -> list[ClientAsk]:
    """Give the requests two cache salts, and ask some of them again, later and mostly greedily, with either salt."""
    salts = {ask.name: rng.choice(("", "mine")) for ask in asks}
    salted = [replace(ask, cache_salt=salts[ask.leader or ask.name]) for ask in asks]
    for ask in rng.sample([ask for ask in salted if not ask.leader and ask.ends_at is None], len(asks) // 4):
        params = replace(ask.params, temperature=0.0, max_tokens=30)
        for i in range(3):
            again = replace(params, seed=(ask.params.seed + 100 + i) % SEED_LIMIT)
            at_s, salt = rng.uniform(0.3, until_s), rng.choice(("", "mine"))
            salted.append(replace(ask, name=f"{ask.name}-again{i}", at_s=at_s, params=again, cache_salt=salt))
    return salted


def with_poison(asks: list[ClientAsk], rng: random.Random, count: int) -> list[ClientAsk]:
    """Let `count` requests end their workers, at their prompts or at one of their tokens."""
    poison = {ask.name for ask in rng.sample(asks, count)}
    return [replace(ask, ends_at=rng.choice((0, 0, 1, 4, 12))) if ask.name in poison else ask for ask in asks]


def with_clients(asks: list[ClientAsk], rng: random.Random, count: int) -> list[ClientAsk]:
    """Let the requests come from `count` clients, with two connections each. 0: the clients are unknown."""
    clients = [(f"client{i}", f"connection{j}") for i in range(count) for j in range(2)]
    return [replace(ask, client=(*rng.choice(clients), ask.name)) for ask in asks] if clients else asks


def with_siblings(asks: list[ClientAsk], rng: random.Random, share: float, *, unruly: bool) -> list[ClientAsk]:
    """Let a share of the requests lead a group of two to four choices, each with the next seed. `unruly`: the client of some
    siblings leaves, and some siblings come when their leader has gone on or has ended."""
    groups = []
    for ask in asks:
        groups.append(ask)
        if rng.random() < share:
            lag_s = rng.choice((0.0, 0.0, 0.05, 1.0)) if unruly else 0.0
            groups += [_sibling(ask, i, lag_s, rng, unruly=unruly) for i in range(1, rng.randint(2, 4))]
    return groups


def _sibling(ask: ClientAsk, i: int, lag_s: float, rng: random.Random, *, unruly: bool) -> ClientAsk:
    return replace(
        ask,
        name=f"{ask.name}-{i}",
        at_s=ask.at_s + i * SIBLING_S + lag_s,
        params=replace(ask.params, seed=(ask.params.seed + i) % SEED_LIMIT),
        leader=ask.name,
        leaves_after_s=rng.uniform(0.0, 0.6) if unruly and rng.random() < 0.15 else None,
    )
