"""The checks of a finished run. Each checker returns one sentence for each violation; an empty list means that all is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Final

from decode_worker.role import DecodeRole
from pdserve.core.errors import ErrorCode, InvalidRequest
from pdserve.core.speculation import DraftCounts, total
from pdserve.worker.host import KvDamage
from prefill_worker.role import PrefillRole
from sim.faults.client import CallOutcome
from sim.faults.engine import SimEngine
from sim.faults.oracle import RightAnswer, answer
from sim.faults.worker import SimWorker
from sim.faults.world import World

SLACK_S: Final = 3.0
"""A request may end this much after its deadline, because of ticks, a lost message, or the queue of a process that was
stopped and goes on."""

NEVER: Final = (
    ErrorCode.INTERNAL_BUG,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.UNKNOWN_MODEL,
    ErrorCode.REQUEST_TOO_LARGE,
    ErrorCode.INCOMPATIBLE_PEER,
    ErrorCode.UNKNOWN_WORKER,
)
"""Errors that no request may get, since no fault of this simulation causes them."""

MAX_STANDING: Final = 24
_STANDING: Final = (
    "SimWorker.run",
    "LinkMember.drained",
    "LinkMember.broken",
    "LinkMember._engine_stuck",
    "LinkMember._transfer_unhealthy",
    "Event.wait",
    "RouterLink.run",
    "RouterLink._read",
    "RouterLink._write",
    "RouterLink._beat",
    "RouterLink._end_on_overflow",
    "Link._read",
    "Link._write",
    "PeerLink._watch_loop",
    "_subscribe",
    "SimConnection._serve",
    "LeaseService._read_subscriptions",
    "RouterService._tick_for_ever",
)
"""The tasks that live as long as their process or a connection. All other tasks must end with their request."""


def check_outcome(outcome: CallOutcome, *, bound_s: float, had_time: bool = False, unequal: bool = False) -> list[str]:
    """Check one request: the tokens that came are the oracle's, in order; no token is lost, and none comes twice.

    A request that ends without an error must have all tokens. `bound_s`: the time by which it must have ended. A request that
    `had_time` may fail, but not by its deadline: that would mean that it hung. With `unequal` workers, the worker that takes
    the longest requests may be away, so a request that is too long for the other workers may be refused.
    """
    ask = outcome.ask
    found = []
    if outcome.ended_s is None:
        return [f"{ask.name} never ended"]
    if outcome.ended_s > bound_s:
        found.append(f"{ask.name} ended at {outcome.ended_s:.2f} s, later than {bound_s:.2f} s")
    expected = answer(ask.prompt, ask.params, ask.constraint)
    found += [f"{ask.name}: {problem}" for problem in _compare(outcome, expected)]
    error = outcome.error
    too_long = unequal and isinstance(error, InvalidRequest) and "max_model_len" in error.message
    costly = f"the mask of output token {len(expected.ids)} needs too much work"  # the client may lack tokens on their way
    too_costly = isinstance(error, InvalidRequest) and expected.finish_reason is None and costly in error.message
    if error is not None and error.code in NEVER and not too_long and not too_costly:
        found.append(f"{ask.name}: failed with {error.code.value}: {error.message}")
    if error is not None and error.code is ErrorCode.DEADLINE_EXCEEDED and had_time:
        found.append(f"{ask.name}: hung until its deadline: {error.message}")
    if error is not None and error.code is ErrorCode.CANCELLED and ask.leaves_after_s is None:
        found.append(f"{ask.name}: cancelled, but its client had not left")
    return found


def untrue_exactness(outcome: CallOutcome, numerics: Mapping[str, str]) -> list[str]:
    """Check that a report says `exact` only when the workers that it names compute alike, and always when all workers do.

    numerics: those of every worker, by name; empty for a foreign engine, which is never exact.
    """
    report = outcome.report
    if report is None:
        return []
    used = {numerics[name] for name in (report.prefill_worker, report.decode_worker) if name}
    if report.exact and (len(used) > 1 or "" in used):
        return [f"{outcome.ask.name}: reported as exact, and its workers have numerics {sorted(used)}"]
    if not report.exact and len(set(numerics.values())) == 1 and "" not in used:
        return [f"{outcome.ask.name}: reported as inexact, and all workers compute alike"]
    return []


def untold_drafts(outcome: CallOutcome, told: Mapping[tuple[int, int], Sequence[DraftCounts | None]]) -> list[str]:
    """Check that a request which ended well was told the drafts that engines verified for it: those of the attempts that came
    to its last token, and of no other. told: what engines told with each token, by the seed of its request and its index."""
    if not outcome.ok or outcome.report is None:
        return []
    last = max((delta.index + len(delta.ids) - 1 for delta in outcome.deltas), default=0)
    counts = dict.fromkeys(told.get((outcome.ask.params.seed, last), (None,)))  # several requests may have one seed
    attempts = outcome.report.attempts + outcome.report.migrations
    sums = [total(some) for count in range(1, min(attempts, 3) + 1) for some in combinations_with_replacement(counts, count)]
    if outcome.report.speculation in sums:
        return []
    return [f"{outcome.ask.name}: was told {outcome.report.speculation}, and the engines verified one of {sums}"]


def _compare(outcome: CallOutcome, expected: RightAnswer) -> list[str]:
    return _compare_output(outcome, expected) or _compare_scores(outcome, expected) or _compare_logprobs(outcome, expected)


def _compare_logprobs(outcome: CallOutcome, expected: RightAnswer) -> list[str]:
    """Compare the log-probabilities of the output, which come with their tokens."""
    for delta in outcome.deltas:
        if delta.logprobs != expected.logprobs[delta.index : delta.index + len(delta.ids)]:
            return [f"wrong log-probabilities of token {delta.index}: {delta.logprobs}"]
    return []


def _compare_scores(outcome: CallOutcome, expected: RightAnswer) -> list[str]:
    """Compare the scores of the prompt, which come once: with the first delta."""
    first, *others = [delta.prompt_logprobs for delta in outcome.deltas] or [expected.scores]
    if again := sum(map(len, others)):
        return [f"{again} scores of the prompt came after the first delta"]
    if len(first) != len(expected.scores):
        return [f"{len(first)} scores of the prompt came instead of {len(expected.scores)}"]
    wrong = [i for i, (ours, theirs) in enumerate(zip(expected.scores, first, strict=True), 1) if ours != theirs]
    return [f"wrong score of prompt token {wrong[0]}: the KV of its past was not what it should be"] if wrong else []


def _compare_output(outcome: CallOutcome, expected: RightAnswer) -> list[str]:
    ids: list[int] = []
    text = ""
    for delta in outcome.deltas:
        if delta.index != len(ids):
            return [f"token {delta.index} came after {len(ids)} tokens"]
        if ids and outcome.deltas[0] is not delta and len(ids) >= len(expected.ids):
            return ["more tokens than there are"]
        ids += delta.ids
        text += delta.text
    if tuple(ids) != expected.ids[: len(ids)]:
        first = next(i for i, token_id in enumerate(ids) if i >= len(expected.ids) or token_id != expected.ids[i])
        return [f"wrong token {first}: the KV of its past was not what it should be"]
    if not outcome.ok:
        return [] if expected.text.startswith(text) else [f"wrong text {text!r} of {expected.text!r}"]
    reasons = [delta.finish_reason for delta in outcome.deltas if delta.finish_reason is not None]
    if tuple(ids) != expected.ids or text != expected.text or reasons != [expected.finish_reason]:
        return [f"ended well with {len(ids)} of {len(expected.ids)} tokens, {reasons} for {expected.finish_reason}, {text!r}"]
    return []


def leftovers(world: World) -> list[str]:
    """Return what the cluster still holds when no request is left. Empty: it holds nothing."""
    core = world.router.core
    found = []
    if core.num_requests or len(core.ledger) or len(core.waiting):
        found.append(f"router: {core.num_requests} requests, {len(core.ledger)} ledger entries, {len(core.waiting)} waiting")
    for name, worker in world.workers.items():
        found += [f"{name}: {problem}" for problem in _left_on(worker)]
    return found


def _left_on(worker: SimWorker) -> list[str]:
    found = []
    counts, role = worker.engine.counts(), worker.role
    if counts.free + counts.cached != counts.total or worker.engine.num_live:
        found.append(f"{counts}, {worker.engine.num_live} sequences")
    if worker.transfer.num_unstopped:
        found.append(f"{worker.transfer.num_unstopped} reads")
    if not worker.staging.idle:
        found.append(f"{worker.staging.num_held} staging blocks")
    if role is not None and not role.idle:
        found.append("the role is not idle")
    if isinstance(worker.engine, SimEngine) and worker.engine.drafts is not None:
        found += worker.engine.drafts.leftovers()
    if isinstance(role, PrefillRole) and (role.leases_held or role._leases.num_watched):
        found.append(f"{role.leases_held} leases, {role._leases.num_watched} watched")
    if isinstance(role, DecodeRole) and role._leases.num_followed:
        found.append(f"{role._leases.num_followed} leases followed")
    return found


def unlike_keys(world: World) -> list[str]:
    """Return the workers for which the router's record of shared blocks is wrong. Empty: all records are right.

    A router whose index was full has forgotten some blocks.
    """
    core, found = world.router.core, []
    forgets = core.prefix_index.evicted > 0
    for worker in core.registry:
        held = world.workers[worker.hello.worker_id].engine.published
        known = core.prefix_index.held(worker.link)
        if not (known <= held if forgets else known == held):
            found.append(f"router: {worker.name} shares {len(held)} blocks, and {len(known & held)} of {len(known)} known ones")
    return found


def unlike_roles(world: World) -> list[str]:
    """Return the workers that the router takes for another role, or another life, than they have. Empty: it knows all."""
    found = []
    for worker in world.router.core.registry:
        ours = world.workers[worker.hello.worker_id]
        theirs = (worker.hello.role.value, worker.hello.incarnation, worker.hello.flips)
        if theirs != (ours.process.role, ours.incarnation, ours.lives - 1):
            found.append(f"router: {worker.name} is {theirs} there, and has role {ours.process.role} in life {ours.lives}")
    return found


def false_alarms(world: World) -> list[str]:
    """Return the workers that report damaged KV without cause: memory never rots here, and reads flip bits only if the plan
    says so."""
    found = []
    for name, worker in world.workers.items():
        damage = worker.role.damage if worker.role is not None else KvDamage()
        if damage.rotted_blocks or (damage.corrupt_blocks and not world.plan.reads.flipped):
            found.append(f"{name}: a false alarm: {damage}")
    return found


def leftover_tasks(world: World) -> list[str]:
    """Return the tasks that still run although their request or connection has ended."""
    found = []
    for process in world.processes.values():
        counts: dict[str, int] = {}
        for task in asyncio.all_tasks(process.loop):
            name = getattr(task.get_coro(), "__qualname__", "?")
            counts[name] = counts.get(name, 0) + 1
        for name, count in sorted(counts.items()):
            if name not in _STANDING or count > MAX_STANDING:
                found.append(f"{process.name}: {count} x task {name}")
    return found
