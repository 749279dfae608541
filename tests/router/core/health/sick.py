"""Clusters with broken workers and hostile prompts, and what is asked of the router there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pdserve.core.errors import InternalBug, NumericalError, PdserveError
from pdserve.core.worker import Role
from router.core import events as ev

from ...core_peers import Job, Outcome, Peer, Stage

NO_NUMBERS = NumericalError("the logits of a step were not finite numbers")
BUG = InternalBug("list index out of range")


def pools(prefill: int, decode: int, **config: object) -> Stage:
    """Without probes, ejected workers come back by time alone."""
    stage = Stage(**config)
    for n in range(prefill):
        stage.join(f"prefill-{n}", Role.PREFILL)
    for n in range(decode):
        stage.join(f"decode-{n}", Role.DECODE)
    return stage


def peer_of(stage: Stage, name: str) -> Peer:
    (peer,) = [peer for peer in stage.peers.values() if peer.hello.worker_id == name]
    return peer


def break_down(stage: Stage, *names: str, error: PdserveError = NO_NUMBERS) -> None:
    """These workers give up each request at their first token of it."""
    for name in names:
        peer_of(stage, name).fault = lambda job: error


def poison(stage: Stage, after: int = 0, error: PdserveError = NO_NUMBERS) -> None:
    """Requests whose name begins with "poison" fail on every worker, at the same token."""

    def fault(job: Job) -> PdserveError | None:
        return error if job.work.request_id.startswith("poison") and job.next_index >= after else None

    for peer in stage.peers.values():
        peer.fault = fault


def out(stage: Stage) -> list[str]:
    """The ejected workers."""
    return [str(w.hello.worker_id) for w in stage.core.registry if stage.core.health.is_out(w)]


def later(stage: Stage, seconds: float, step_s: float = 0.5) -> None:
    """Time passes, and everybody beats."""
    for _ in range(round(seconds / step_s)):
        stage.now_s += step_s
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer)
        stage.tell(ev.Tick())
        stage.run()


def serve(
    stage: Stage, count: int, *, each_s: float = 0.1, name: str = "r", check: Callable[[], None] = lambda: None, **fields: Any
) -> list[Outcome]:
    """Submit requests one after the other, and let each end."""
    outcomes = []
    for n in range(count):
        outcomes.append(stage.submit(f"{name}{len(stage.outcomes)}-{n}", **fields))
        stage.run()
        later(stage, each_s, each_s)  # a worker that is silent for three seconds gets nothing
        check()
    stage.run()
    return outcomes


def check_half_stays(stage: Stage) -> None:
    for role in Role:
        pool = [w for w in stage.core.registry.of_role(role) if not w.draining]
        assert 2 * sum(stage.core.health.is_out(w) for w in pool) <= len(pool), "more than half of a pool is out"
        assert not pool or any(w.serves for w in pool), "nobody of a pool serves"


def step_s(tokens: float, context: float) -> float:
    """The time of a step of prompts on a usual device: a fixed part, one for each token, and one for each operation."""
    return 0.005 + 2e-5 * tokens + 1e-14 * flops(tokens, context)


def flops(tokens: float, context: float) -> float:
    """The operations of prompt tokens that attend to so many tokens each."""
    return tokens * (1.6e10 + 5e5 * context)


def compute(
    stage: Stage, seconds: int, steps: Mapping[str, tuple[int, int, int]], slow: Mapping[str, float] | None = None
) -> None:
    """Each second prefill workers make so many steps of so many tokens in such contexts, and beat. slow: the time of a worker's
    steps as a multiple of the usual one."""
    for _ in range(seconds):
        stage.now_s += 1.0
        for peer in list(stage.peers.values()):
            worker = stage.core.registry.get(peer.link)
            assert worker is not None
            count, tokens, context = steps.get(str(peer.hello.worker_id), (0, 0, 0))
            load, took_s = worker.load, step_s(tokens, context) * (slow or {}).get(str(peer.hello.worker_id), 1.0)
            told = replace(
                load,
                uptime_s=stage.now_s,
                prompt_steps=load.prompt_steps + count,
                prompt_busy_s=load.prompt_busy_s + count * took_s,
                computed_prompt_tokens=load.computed_prompt_tokens + count * tokens,
                prompt_flops=load.prompt_flops + count * flops(tokens, context),
                prompt_tokens_per_s=tokens / took_s if count else load.prompt_tokens_per_s,
            )
            stage.tell(ev.HeartbeatSeen(peer.link, told))
        stage.tell(ev.Tick())
