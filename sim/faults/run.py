"""One run: a cluster with a workload and faults. Then the faults end, and the checkers look for problems."""

from __future__ import annotations

import gc
import logging
import random
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.shards import Degrees
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from sim.faults.checkers import (
    SLACK_S,
    check_outcome,
    false_alarms,
    leftover_tasks,
    leftovers,
    unlike_keys,
    unlike_roles,
    untold_drafts,
    untrue_exactness,
)
from sim.faults.client import (
    CALM_DEADLINE_S,
    ClientAsk,
    draw_ask,
    with_clients,
    with_constraints,
    with_draft_limits,
    with_draws,
    with_poison,
    with_salts,
    with_scores,
    with_siblings,
)
from sim.faults.drafts import Drafting, draw_drafting
from sim.faults.engine import STEP_S
from sim.faults.faults import (
    WORKERS,
    Fault,
    FaultKind,
    FaultPlan,
    draw_plan,
    with_budgets,
    with_dead_ranks,
    with_duplicates,
    with_hung_engines,
    with_lost_numbers,
    with_role_flips,
    with_sick_workers,
    with_wrong_keys,
)
from sim.faults.oracle import BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, answer
from sim.faults.tap import Census
from sim.faults.transfer import ReadFaults
from sim.faults.worker import LOST_S, ONE_RANK, WorkerShape
from sim.faults.world import LEASE, World, WorldShape
from sim.world.network import Weather

FAULTS_S: Final = 12.0
SETTLE_S: Final = 20.0
"""The cluster must be quiet after this time. It is longer than a lease, a stuck read with its restart, and all retries."""
NOTICED_S: Final = 0.5
"""A deadline may be noticed this much too late: after one tick, on a clock that may be slow."""
REDO_S: Final = 7.0
"""A request starts over within this time, whether it waits for a silent link, a lease, a read, or a worker."""
FLIP_S: Final = 22.0
"""A worker has taken its other role within this time: the limits of a drain and of closing the old role, and probes."""
DRAINED_S: Final = 45.0
"""A worker that drains or flips has left within this time by the router's clock: `FLIP_S`, and the longest stop of a process,
on a clock that is fast by two fifths."""
FRESH_DEADLINE_S: Final = 10.0
_ONE, _OTHER, _TWO, _MIXED = ("float32",), ("bfloat16",), ("float32", "float32"), ("float32", "bfloat16")
KV_DTYPES: Final = ((_ONE, _ONE), (_OTHER, _ONE), (_TWO, _TWO), (_MIXED, _TWO))
"""The dtypes of the KV groups of the prefill and the decode pool. Groups of equal dtype are read straight into the pool, other
groups use staging blocks."""
DEGREES: Final = (ONE_RANK, Degrees(tensor=2), Degrees(pipeline=2))
"""The ranks of each worker of a pool, which have memory of their own: one has all, or two share heads or layers."""
WINDOWS: Final = (None, 6, 21)
"""The sliding window of the second KV group, in tokens. None: it has no window. Prompts have up to a hundred tokens."""


@dataclass(slots=True)
class RunReport:
    """The result of one run. The run failed if `problems` is not empty. `digest` is equal for equal runs."""

    seed: int
    problems: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    digest: int = 0
    callbacks: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    flips: int = 0
    ejections: int = 0
    migrations: int = 0
    longest_drain_s: float = 0.0
    """The longest time from the router's word to drain or to flip until the worker had left."""
    unplaced: int = 0
    """The requests that were accepted and then found no worker."""
    ended: int = 0
    """The workers that requests have ended."""
    deaths: int = 0
    """The workers that died."""
    lost: int = 0
    """The workers that routers have lost, and that did not drain."""
    resumed: int = 0
    """The streams of links that were taken up again."""
    adopted: int = 0
    """The workers that a new router found alive."""
    abandoned: int = 0
    """The tickets of foreign engines that were committed, and that no server has got."""
    drafts: DraftCounts = NO_COUNTS
    """The drafts that requests which ended well were told."""
    attempts: int = 0
    """The number of further attempts, after the first, of requests that ended well."""


def run_seed(seed: int) -> RunReport:
    """Make a run whose workload, cluster and faults all come from the seed."""
    rng = random.Random(f"{seed} plan")
    plan = with_duplicates(draw_plan(rng, until_s=FAULTS_S), random.Random(f"{seed} duplicates"))
    plan = with_hung_engines(plan, random.Random(f"{seed} hung"))
    plan = with_dead_ranks(plan, random.Random(f"{seed} dead ranks"))
    plan = with_lost_numbers(plan, random.Random(f"{seed} numbers"))
    plan = with_sick_workers(plan, random.Random(f"{seed} sick"))
    plan = with_budgets(plan, random.Random(f"{seed} budgets"))
    plan = with_wrong_keys(plan, random.Random(f"{seed} keys"))
    plan = with_role_flips(plan, random.Random(f"{seed} role flips"))
    plan = _with_wrong_bits(plan, random.Random(f"{seed} flips").choice((0.0, 0.0, 0.002, 0.02)))
    shape = with_prefix_caching(_draw_shape(rng), random.Random(f"{seed} prefix").random() < 0.5)
    shape = _with_kv_dtypes(shape, *random.Random(f"{seed} dtypes").choice(KV_DTYPES))
    shape = _with_window(shape, random.Random(f"{seed} window").choice(WINDOWS))
    ranks = random.Random(f"{seed} ranks")
    shape = with_ranks(shape, ranks.choice(DEGREES), ranks.choice(DEGREES))
    shape = _drafting(seed, shape)
    shape = _with_unequal_workers(shape, random.Random(f"{seed} unequal"))
    asks = draw_asks(random.Random(f"{seed} workload"), rng.choice((8, 16, 24, 32)), until_s=FAULTS_S, unruly=True)
    asks = _with_priorities(asks, random.Random(f"{seed} priorities"))
    asks = _with_fields(asks, seed)
    groups = random.Random(f"{seed} groups")
    asks = with_siblings(asks, groups, groups.choice((0.0, 0.3)), unruly=True)
    poison, clients = random.Random(f"{seed} poison"), random.Random(f"{seed} clients")
    asks = with_poison(asks, poison, poison.choice((0, 0, 0, 0, 0, 0, 1, 2)))
    asks = with_clients(asks, clients, clients.choice((0, 0, 1, 3)))
    draws, salts = random.Random(f"{seed} draws"), random.Random(f"{seed} salts")
    asks = with_draws(asks, draws, draws.choice((0.0, 0.5)))
    asks = with_salts(asks, salts, until_s=FAULTS_S * 0.9) if salts.random() < 0.5 else asks
    asks = with_draft_limits(asks, random.Random(f"{seed} draft limits"))
    return simulate(seed, shape, plan, asks, Census())


def run_with_slow_reads(seed: int) -> RunReport:
    """Make a run whose reads outlive their leases: KV has a network of its own, and decode cannot renew for some time."""
    cuts = tuple(Fault(1.0, FaultKind.CUT, f"prefill{i}", 5.0, f"decode{j}") for i in range(2) for j in range(2))
    rates = {"decode0": 0.7, "decode1": 0.7}
    dtypes = KV_DTYPES[seed % len(KV_DTYPES)]
    theirs, ours = DEGREES[seed % len(DEGREES)], DEGREES[seed // 2 % len(DEGREES)]
    routes = max(theirs.tensor, ours.tensor) * max(theirs.pipeline, ours.pipeline)
    slow = 1 - 0.3 ** (1 / len(dtypes[0]) / routes)  # of 10 reads of all groups, 7 are slow
    plan = FaultPlan(cuts, Weather(), ReadFaults(slow=slow, slow_s=6.0, own_network=True), rates, FAULTS_S)
    asks = draw_asks(random.Random(f"{seed} workload"), 32, until_s=FAULTS_S, unruly=False)
    shape = _with_window(
        _with_kv_dtypes(_with_patient_reads(WorldShape()), *dtypes), WINDOWS[seed // len(KV_DTYPES) % len(WINDOWS)]
    )
    return simulate(seed, _drafting(seed, with_ranks(shape, theirs, ours)), plan, asks, Census())


def run_with_role_flips(seed: int) -> RunReport:
    """Make a run in which workers take their other role all the time, while reads are slow, fail, or are lost sight of."""
    rng = random.Random(f"{seed} role flips all the time")
    flips = tuple(Fault(rng.uniform(0.3, FAULTS_S), FaultKind.FLIP, rng.choice(WORKERS)) for _ in range(24))
    drains = (Fault(rng.uniform(0.3, FAULTS_S), FaultKind.DRAIN, rng.choice(WORKERS), other="router"),)
    reads = ReadFaults(slow=0.3, slow_s=1.0, failed=0.05, adrift=0.01)
    plan = FaultPlan(flips + drains, Weather(delay_s=0.005), reads, {}, FAULTS_S)
    asks = draw_asks(random.Random(f"{seed} workload"), 48, until_s=FAULTS_S, unruly=True)
    dtypes = KV_DTYPES[seed % len(KV_DTYPES)]
    shape = _with_window(
        _with_kv_dtypes(with_prefix_caching(WorldShape(), True), *dtypes), WINDOWS[seed // len(KV_DTYPES) % len(WINDOWS)]
    )
    shape = with_ranks(shape, DEGREES[seed % len(DEGREES)], DEGREES[seed // 2 % len(DEGREES)])
    return simulate(seed, _drafting(seed, shape), plan, asks, Census())


def run_with_gangs(seed: int) -> RunReport:
    """Make a run of gangs whose ranks die all the time, while routes of reads are slow, fail, or are lost sight of."""
    rng = random.Random(f"{seed} gangs")
    deaths = [
        Fault(rng.uniform(0.3, FAULTS_S), FaultKind.RANK, rng.choice(WORKERS), 0.1, other=rng.choice(("0", "1", "1", "1")))
        for _ in range(8)
    ]
    reads = ReadFaults(slow=0.3, slow_s=1.0, failed=0.1, adrift=0.02, flipped=rng.choice((0.0, 0.01)))
    plan = FaultPlan(tuple(deaths), Weather(delay_s=0.005), reads, {}, FAULTS_S)
    asks = draw_asks(random.Random(f"{seed} workload"), 48, until_s=FAULTS_S, unruly=True)
    shape = _with_kv_dtypes(with_prefix_caching(WorldShape(), seed % 2 == 0), *KV_DTYPES[seed % len(KV_DTYPES)])
    theirs, ours = rng.choice([(a, b) for a in DEGREES for b in DEGREES if (a, b) != (ONE_RANK, ONE_RANK)])
    return simulate(seed, _drafting(seed, with_ranks(shape, theirs, ours)), plan, asks, Census())


def run_with_foreign_engines(seed: int) -> RunReport:
    """Make a run whose workers drive foreign engines, which believe every ticket, with the faults of any run."""
    rng = random.Random(f"{seed} foreign engines")
    plan = with_hung_engines(draw_plan(rng, until_s=FAULTS_S), random.Random(f"{seed} hung"))
    if seed % 3 == 0:
        plan = with_role_flips(plan, rng)
    asks = draw_asks(random.Random(f"{seed} workload"), rng.choice((16, 32, 48)), until_s=FAULTS_S, unruly=True)
    return simulate(seed, _foreign(), plan, asks, Census())


def run_with_calm_foreign_engines(seed: int) -> RunReport:
    """Make a run with foreign engines and without faults, from which clients leave at any moment."""
    asks = draw_asks(random.Random(f"{seed} workload"), 64, until_s=4.0, unruly=True)
    asks = [replace(ask, placement=Placement.DISAGGREGATED) for ask in asks]
    return simulate(seed, _foreign(), replace(calm_plan(4.0), weather=Weather(delay_s=0.02)), asks, Census())


def _foreign() -> WorldShape:
    foreign = WorkerShape(num_blocks=96, max_num_seqs=8, max_num_batched_tokens=16, lease=LEASE, foreign=True)
    return WorldShape(prefill=foreign, decode=foreign, poison=False, check_steps=False)


def run_with_sick_workers(seed: int) -> RunReport:
    """Make a run in which one worker's logits are never finite numbers, with the router's default budget of retries. In a third
    of the runs the other decode worker is killed once the faulty decode worker is ejected."""
    sick = ("decode1", "prefill1", "decode1")[seed % 3]
    faults: tuple[Fault, ...] = (Fault(1.0, FaultKind.NO_NUMBERS, sick, FAULTS_S - 1.0),)
    if seed % 3 == 2:
        faults += (Fault(6.0, FaultKind.KILL, "decode0", 2.0),)
    plan = FaultPlan(faults, Weather(), ReadFaults(), {}, FAULTS_S)
    asks = draw_asks(random.Random(f"{seed} workload"), 120, until_s=FAULTS_S, unruly=False)
    return simulate(seed, WorldShape(), plan, asks, Census())


def run_with_poison(seed: int) -> RunReport:
    """Make a run in which one or two requests end their workers, without any other fault. The answers are longer than a
    trial."""
    asks = _streams(seed, 24, until_s=3.0)
    asks = with_poison(asks, random.Random(f"{seed} poison alone"), 1 + seed % 2)
    return simulate(seed, _wide(), calm_plan(FAULTS_S), asks, Census())


def run_with_moves(seed: int) -> RunReport:
    """Make a run in which one worker after the other drains or takes its other role and comes back, by an order or by a signal,
    and nothing goes wrong. Steps are so slow that each stream lasts longer than a drain may."""
    rng, faults = random.Random(f"{seed} moves"), []
    for number in range(4):
        at_s, name, other = 1.0 + 3.0 * number + rng.random(), rng.choice(WORKERS[1:]), rng.choice(("", "router"))
        flips = rng.random() < 0.4
        faults.append(Fault(at_s, FaultKind.FLIP if flips else FaultKind.DRAIN, name, other=other))
        faults += [Fault(at_s + 1.5, FaultKind.FLIP, name)] if flips else []
    plan = FaultPlan(tuple(faults), Weather(delay_s=0.005), ReadFaults(), {}, 14.0)
    return simulate(seed, _wide(step_s=0.04), plan, _streams(seed, 24, until_s=12.0), Census())


def run_with_lost_workers(seed: int) -> RunReport:
    """Make a run in which workers are lost one after the other, under more streams than the budget of retries has retries. With
    odd seeds each worker is killed once. With even seeds the workers only stand still for too long, again and again, and come
    back."""
    rng = random.Random(f"{seed} lost workers")
    if seed % 2:
        order = ("decode0", "decode1", "prefill0", "prefill1")
        faults = [Fault(0.7 + 0.8 * n + rng.random() / 2, FaultKind.KILL, name, 0.2) for n, name in enumerate(order)]
    else:
        order = ("decode0", "decode1") * 2
        still_s = LOST_S + NOTICED_S + 0.5
        faults = [Fault(0.7 + still_s * n + rng.random() / 5, FaultKind.STALL, name, still_s) for n, name in enumerate(order)]
    plan = FaultPlan(tuple(faults), Weather(), ReadFaults(), {}, 8.0 if seed % 2 else 16.0)
    return simulate(seed, _wide(step_s=0.02 if seed % 2 else 0.08), plan, _streams(seed, 24, until_s=0.5), Census())


def run_with_broken_links(seed: int) -> RunReport:
    """Make a run in which streams of links break all the time, and no worker is silent for long."""
    rng = random.Random(f"{seed} broken links")
    faults = tuple(Fault(0.5 + 0.4 * n + 0.3 * rng.random(), FaultKind.RESET, "router") for n in range(20))
    plan = FaultPlan(faults, Weather(delay_s=rng.choice((0.0002, 0.01))), ReadFaults(), {}, 9.0)
    asks = draw_asks(random.Random(f"{seed} workload"), 48, until_s=9.0, unruly=False)
    return simulate(seed, with_prefix_caching(WorldShape(), True), plan, asks, Census())


def run_with_adoptions(seed: int) -> RunReport:
    """Make a run in which the router is killed again and again, while its links break, are silent and are taken up again. All
    workers live on."""
    rng, faults = random.Random(f"{seed} adoptions"), []
    for number in range(4):
        at_s = 1.0 + 2.7 * number + rng.random()
        faults.append(Fault(at_s, FaultKind.KILL, "router", rng.choice((0.0005, 0.1, 0.5, 1.0))))
        faults.append(Fault(at_s - rng.choice((0.0, 0.003, 0.05, 0.3)), FaultKind.RESET, "router"))
        faults.append(Fault(at_s + 1.2 * rng.random(), FaultKind.RESET, "router"))
        silent_s = rng.choice((0.5, LOST_S - 0.5, LOST_S + 0.3))
        faults.append(Fault(at_s - rng.random(), FaultKind.CUT, rng.choice(WORKERS), silent_s, "router"))
    weather = Weather(delay_s=0.005, link_loss=rng.choice((0.0, 0.002)))
    plan = FaultPlan(tuple(sorted(faults, key=lambda fault: fault.at_s)), weather, ReadFaults(), {}, 15.0)
    asks = draw_asks(random.Random(f"{seed} workload"), 64, until_s=15.0, unruly=True)
    return simulate(seed, with_prefix_caching(WorldShape(), True), plan, asks, Census())


def _streams(seed: int, count: int, *, until_s: float) -> list[ClientAsk]:
    """Draw requests with long answers."""
    asks = draw_asks(random.Random(f"{seed} workload"), count, until_s=until_s, unruly=False)
    return [replace(ask, params=SamplingParams(max_tokens=60, seed=ask.params.seed, ignore_eos=True)) for ask in asks]


def _wide(step_s: float = STEP_S) -> WorldShape:
    """Return a cluster whose workers have room for all requests."""
    wide = WorkerShape(num_blocks=1000, max_num_seqs=32, max_num_batched_tokens=64, lease=LEASE, step_s=step_s)
    return WorldShape(prefill=wide, decode=wide, check_steps=False)


def run_with_preemptions(seed: int) -> RunReport:
    """Make a run without faults in which prompts are computed on the decode workers, and some outputs preempt others: pools are
    small, and two hundred short outputs with the same limit have taught the router to expect short outputs."""
    rng = random.Random(f"{seed} preemptions")
    asks = draw_asks(random.Random(f"{seed} workload"), 24, until_s=0.2, unruly=False)
    asks = with_constraints(with_scores(asks, rng, 0.5), rng, 0.5)
    asks = [replace(ask, at_s=ask.at_s + 2.0, params=replace(ask.params, max_tokens=60)) for ask in asks]
    first = answer((2,), SamplingParams(max_tokens=1)).ids
    short = replace(asks[0], prompt=(2,), params=SamplingParams(max_tokens=60, stop_token_ids=first), constraint=None)
    asks += [replace(short, name=f"short{i}", at_s=0.3 + 0.0075 * i) for i in range(200)]
    asks = [replace(ask, placement=Placement.COLOCATED) for ask in asks]
    dtypes = KV_DTYPES[seed % len(KV_DTYPES)]
    shape = with_prefix_caching(_with_kv_dtypes(WorldShape(), *dtypes), bool(seed & 4))
    narrow = replace(shape.decode, num_blocks=MAX_MODEL_LEN // BLOCK_SIZE, max_num_batched_tokens=8)
    return simulate(seed, _drafting(seed, replace(shape, decode=narrow)), calm_plan(6.0), asks, Census())


def _with_fields(asks: list[ClientAsk], seed: int) -> list[ClientAsk]:
    """Let requests of half of the runs have scored prompts, and requests of half of the runs constraints."""
    scores, constraints = random.Random(f"{seed} scores"), random.Random(f"{seed} constraints")
    asks = with_scores(asks, scores, scores.choice((0.0, 0.4)))
    return with_constraints(asks, constraints, constraints.choice((0.0, 0.4)))


def _with_unequal_workers(shape: WorldShape, rng: random.Random) -> WorldShape:
    """Change the workers of two thirds of the runs.

    In one third, one worker of each pool has fewer blocks or slots, or takes shorter requests, than the other. In another
    third, both decode workers have only two slots, so that new requests find them full.
    """
    kind = rng.choice(("equal", "unequal", "narrow"))
    if kind == "equal":
        return shape
    if kind == "narrow":
        return replace(shape, decode=replace(shape.decode, max_num_seqs=2))
    unequal = {}
    for name, base in (("prefill1", shape.prefill), ("decode1", shape.decode)):
        blocks, slots = rng.choice((16, 24, base.num_blocks - 1)), rng.choice((1, 3, base.max_num_seqs))
        length = min(base.max_model_len, blocks * BLOCK_SIZE) - rng.choice((0, 1))
        unequal[name] = replace(base, num_blocks=blocks, max_num_seqs=slots, max_model_len=length)
    return replace(shape, unequal=unequal)


def _with_priorities(asks: list[ClientAsk], rng: random.Random) -> list[ClientAsk]:
    return [replace(ask, priority=rng.choice((0, 0, -100, 1, 100))) for ask in asks]


def with_prefix_caching(shape: WorldShape, on: bool) -> WorldShape:
    """Let all workers share blocks, or none."""
    return replace(shape, prefill=replace(shape.prefill, prefix_caching=on), decode=replace(shape.decode, prefix_caching=on))


def _with_wrong_bits(plan: FaultPlan, share: float) -> FaultPlan:
    return replace(plan, reads=replace(plan.reads, flipped=share))


def _with_kv_dtypes(shape: WorldShape, prefill: tuple[str, ...], decode: tuple[str, ...]) -> WorldShape:
    return replace(shape, prefill=replace(shape.prefill, kv_dtypes=prefill), decode=replace(shape.decode, kv_dtypes=decode))


def _with_window(shape: WorldShape, window: int | None) -> WorldShape:
    return replace(shape, prefill=replace(shape.prefill, window=window), decode=replace(shape.decode, window=window))


def _drafting(seed: int, shape: WorldShape) -> WorldShape:
    """Let most runs draft."""
    return with_drafting(shape, draw_drafting(random.Random(f"{seed} drafting")))


def with_drafting(shape: WorldShape, drafting: Drafting | None) -> WorldShape:
    """Let all workers draft in this way."""
    return replace(shape, prefill=replace(shape.prefill, drafting=drafting), decode=replace(shape.decode, drafting=drafting))


def with_ranks(shape: WorldShape, prefill: Degrees, decode: Degrees) -> WorldShape:
    """Let the workers of each pool have these ranks."""
    return replace(shape, prefill=replace(shape.prefill, degrees=prefill), decode=replace(shape.decode, degrees=decode))


def _with_patient_reads(shape: WorldShape) -> WorldShape:
    """Let a read take longer than a lease lasts. Then only Commit keeps decode from using the KV of a late read."""
    lease = replace(LEASE, transfer_deadline_floor_s=2 * LEASE.ttl_s)
    return replace(shape, prefill=replace(shape.prefill, lease=lease), decode=replace(shape.decode, lease=lease))


def calm_plan(until_s: float) -> FaultPlan:
    """Return a plan without faults."""
    return FaultPlan((), Weather(), ReadFaults(), {}, until_s)


def draw_asks(rng: random.Random, count: int, *, until_s: float, unruly: bool) -> list[ClientAsk]:
    """Draw the requests of a run. `unruly`: some clients leave early, and some have short deadlines."""
    prefixes = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)) for length in (8, 13, 24)]
    span_s = until_s * rng.choice((0.1, 0.5, 0.9))
    return [draw_ask(f"r{i}", 0.3 + rng.random() * span_s, rng, prefixes, unruly=unruly) for i in range(count)]


def simulate(seed: int, shape: WorldShape, plan: FaultPlan, asks: list[ClientAsk], census: Census) -> RunReport:
    """Run a cluster. `RunReport.problems` lists every problem; no problem raises."""
    logging.disable(logging.CRITICAL)  # the checkers judge a run; formatting log lines would only take time
    gc_was_on = gc.isenabled()
    gc.disable()
    world = World(seed, shape, plan, census, census.reached)
    census.world = world
    report = RunReport(seed)
    try:
        _drive(world, asks, report)
    except Exception:  # noqa: BLE001 - a failed run is a result
        report.problems.append(traceback.format_exc(limit=-4))
    finally:
        errors = world.timeline.errors[:5]  # copied before `end`, because errors of `end` itself do not count
        world.end()
        if gc_was_on:
            gc.enable()
        logging.disable(logging.NOTSET)
    report.problems[:0] = errors
    report.problems += [problem for notes in world.recorded for problem in notes.problems()]
    report.digest = world.network.digest
    report.callbacks = world.timeline.callbacks
    report.messages = world.network.messages
    report.virtual_s = world.timeline.now_s
    report.flips = world.num_flips
    report.deaths = world.deaths
    report.abandoned = world.tickets.abandoned
    report.resumed = sum(worker.member.link.streams_resumed for worker in world.workers.values())
    report.ended = len(world.poison.ended_by)
    for number, watch in enumerate(world.watches):
        report.migrations += watch.migrations
        report.unplaced += watch.unplaced
        report.lost += watch.lost
        report.longest_drain_s = max([report.longest_drain_s, *watch.drained_s])
        report.adopted += len(watch.met & world.watches[number - 1].met) if number else 0
    if report.longest_drain_s > DRAINED_S:
        report.problems.append(f"a worker drained for {report.longest_drain_s:.1f} s")
    if world.router.service is not None:
        report.ejections = world.router.core.health.ejections.total()
    return report


def _drive(world: World, asks: list[ClientAsk], report: RunReport) -> None:
    timeline, until_s = world.timeline, world.plan.until_s
    numerics = {name: worker.shape.numerics for name, worker in world.workers.items()}
    clients = [world.ask(ask) for ask in asks]
    latest_s = max([until_s, *(_bound_s(world, ask) for ask in asks)])
    timeline.run(lambda: False, until_s=until_s)
    timeline.run(lambda: all(c.outcome.ended_s is not None for c in clients), until_s=latest_s)
    for client in clients:
        outcome = client.outcome
        report.problems += check_outcome(
            outcome,
            bound_s=_bound_s(world, outcome.ask),
            had_time=_had_time(world, outcome.ask),
            unequal=bool(world.shape.unequal) or world.flips,
        )
        report.problems += untrue_exactness(outcome, numerics)
        report.problems += untold_drafts(outcome, world.told)
        if outcome.ok and outcome.report is not None and outcome.report.speculation is not None:
            report.drafts = report.drafts.plus(outcome.report.speculation)
        report.outcomes["ok" if outcome.ok else outcome.error.code.value if outcome.error else "never ended"] += 1
        if outcome.ok and outcome.report is not None:
            report.attempts += outcome.report.attempts - 1
    report.problems += false_alarms(world)
    if report.problems or timeline.errors:
        return
    # A link that the last fault cut in one direction looks whole until its silence is noticed.
    timeline.run(lambda: False, until_s=until_s + LOST_S + NOTICED_S)
    _settle(world, report)
    _ask_afresh(world, report)


def _bound_s(world: World, ask: ClientAsk) -> float:
    """Return the time by which a request must have ended.

    Its deadline runs on the router's clock. A router that was disturbed may notice it only after the faults.
    """
    end_s = _deadline_s(world, ask)
    if world.router_undisturbed:
        return end_s + NOTICED_S
    return max(end_s, world.plan.until_s) + SLACK_S


def _had_time(world: World, ask: ClientAsk) -> bool:
    """Tell whether a request that the last fault hit can be done again before its deadline."""
    redo_s = REDO_S + (FLIP_S if world.lacked_a_role else 0.0)
    return _deadline_s(world, ask) > world.plan.until_s + redo_s


def _deadline_s(world: World, ask: ClientAsk) -> float:
    return ask.at_s + ask.deadline_s / world.plan.clock_rates.get("router", 1.0)


def _settle(world: World, report: RunReport) -> None:
    """Wait until all processes are up and hold no blocks or work, and report what they still hold after `SETTLE_S`.

    Processes with a hung engine are killed first, since an idle worker does not notice that its engine hangs.
    """
    for process in list(world.processes.values()):
        if process.hung:
            process.kill()
    quiet = world.timeline.run(
        lambda: world.everybody_up() and not _held(world) and _all_pairs_usable(world),
        until_s=world.timeline.now_s + SETTLE_S,
    )
    if not quiet:
        up = [name for name, process in world.processes.items() if process.alive]
        report.problems += _held(world) or [f"not everybody is back: {up}, {len(world.router.core.registry)} linked"]


def _held(world: World) -> list[str]:
    return leftovers(world) or unlike_keys(world) or unlike_roles(world)


def _wait_for_tasks(world: World) -> None:
    """Wait until no task is left over, for at most `SETTLE_S`.

    A call whose result is not awaited, such as a handshake with a peer that has gone, ends only by its own limit.
    """
    end_s = world.timeline.now_s + SETTLE_S
    while leftover_tasks(world) and world.timeline.now_s < end_s:
        world.timeline.run(lambda: False, until_s=world.timeline.now_s + 1.0)


def _all_pairs_usable(world: World) -> bool:
    return not any(True for _ in world.router.core.pairs.set_aside(now_s=world.router.process.loop.time()))


def _ask_afresh(world: World, report: RunReport) -> None:
    """Check that the cluster serves new requests after the faults, by both placements, and then holds nothing."""
    if report.problems:
        return
    rng = random.Random(f"{world.seed} afresh")
    asks = draw_asks(rng, 4, until_s=1.0, unruly=False)
    placements = (Placement.DISAGGREGATED, Placement.COLOCATED, None, Placement.DISAGGREGATED)
    now_s = world.timeline.now_s
    clients = [
        world.ask(
            replace(ask, name=f"fresh-{ask.name}", at_s=now_s + ask.at_s, placement=placement, deadline_s=CALM_DEADLINE_S)
        )
        for ask, placement in zip(asks, placements, strict=True)
    ]
    end_s = now_s + 1.5 + FRESH_DEADLINE_S
    world.timeline.run(lambda: all(c.outcome.ended_s is not None for c in clients), until_s=end_s)
    for client in clients:
        outcome = client.outcome
        report.problems += check_outcome(outcome, bound_s=end_s)
        if outcome.error is not None:
            report.problems.append(f"{outcome.ask.name} failed after the faults: {outcome.error!r}")
    _settle(world, report)
    if not report.problems:
        _wait_for_tasks(world)
        report.problems += leftover_tasks(world)


def _draw_shape(rng: random.Random) -> WorldShape:
    shape = WorldShape(poison=rng.random() < 0.5, check_steps=rng.random() < 0.25)
    tight = rng.random() < 0.3
    shape = _with_patient_reads(shape) if rng.random() < 0.3 else shape
    return replace(
        shape,
        prefill=replace(shape.prefill, num_blocks=40 if tight else 80, max_num_batched_tokens=rng.choice((8, 16, 32))),
        decode=replace(shape.decode, num_blocks=44 if tight else 96),
    )
