"""A whole cluster on one timeline. It starts and restarts the processes, sends the requests and makes the faults happen."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from pdserve.config import LeaseConfig, RouterConfig
from pdserve.core.errors import CannotFlip, InvalidRequest, StaleOrder, UnknownWorker
from pdserve.core.speculation import DraftCounts
from pdserve.core.worker import Role
from sim.faults.actuator import RollingUpgrade, UpgradeWatch
from sim.faults.client import ClientAsk, SimClient
from sim.faults.engine import Poison
from sim.faults.faults import ALL, WORKERS, Fault, FaultKind, FaultPlan
from sim.faults.foreign import Tickets
from sim.faults.recorded import MemoryNotes
from sim.faults.router import SimRouter
from sim.faults.transfer import ReadFaults, SimPools
from sim.faults.watch import CoreWatch
from sim.faults.worker import SimWorker, WorkerShape
from sim.world.clock import Timeline, bury
from sim.world.network import Network, Tap, Weather
from sim.world.process import Process, Waker

RESTART_S: Final = 0.5  # the delay before the restart of a process that ended without a planned kill
CLIENT_DELAY_S: Final = 0.001  # clients are on the router's machine
GANG_ENDS_S: Final = 0.02
"""A gang ends this long after one of its ranks at most: a rank looks every 20 ms whether the others live."""
CHECK_EVERY_S: Final = 0.2
LOOK_AT_ROLES_S: Final = 0.5
LOOK_AT_UPGRADES_S: Final = 0.004

LEASE: Final = LeaseConfig(
    ttl_s=3.0,
    transfer_deadline_floor_s=1.5,
    transfer_bandwidth_bytes_s=1e6,
    commit_timeout_s=0.4,
    stalled_s=8.0,
)
"""About a tenth of the production values, in the same proportions, so that leases expire and deadlines pass within a run."""


PREFILL: Final = WorkerShape(num_blocks=40, max_num_seqs=6, max_num_batched_tokens=16, lease=LEASE)
DECODE: Final = WorkerShape(num_blocks=48, max_num_seqs=8, max_num_batched_tokens=16, lease=LEASE)


@dataclass(frozen=True, slots=True)
class WorldShape:
    """The sizes of the cluster. They are small, so that pools fill and blocks are used again at once."""

    prefill: WorkerShape = PREFILL
    decode: WorkerShape = DECODE
    poison: bool = True
    check_steps: bool = True
    router: RouterConfig | None = None
    unequal: Mapping[str, WorkerShape] = field(default_factory=dict)
    """The workers that differ from the rest of their pool, by name."""

    def of(self, name: str, role: str) -> WorkerShape:
        """Return the shape of one worker."""
        return self.unequal.get(name) or (self.prefill if role == "prefill" else self.decode)


def role_of(name: str) -> str:
    """Return the role with which a process of this name starts."""
    return name.rstrip("0123456789")


@dataclass(eq=False)
class World:
    """One cluster with its network, clients and faults. `tap` and `reached` see every step of the protocol."""

    seed: int
    shape: WorldShape
    plan: FaultPlan
    tap: Tap
    reached: Callable[[str, Process], None]
    timeline: Timeline = field(default_factory=Timeline)
    processes: dict[str, Process] = field(default_factory=dict)
    workers: dict[str, SimWorker] = field(default_factory=dict)
    clients: list[SimClient] = field(default_factory=list)
    restarts: int = 0
    deaths: int = 0
    """The workers that died."""
    num_flips: int = 0
    """The lives that began with a role flip."""
    lacked_a_role: bool = False
    """True: after the faults some requests had to wait for a worker that takes its old role again."""

    told: dict[tuple[int, int], list[DraftCounts | None]] = field(default_factory=dict)
    """What engines told of drafts with a token, by the seed of its request and its index."""
    upgrade: UpgradeWatch | None = None
    routers: list[SimRouter] = field(default_factory=list)
    """All incarnations of the router."""

    def __post_init__(self) -> None:
        self._orders: dict[str, tuple[Role, int]] = {}  # the last flip that the router was asked for, by worker
        self.network = Network(self.timeline, self._rng("network"), self.plan.weather, self.tap)
        self.pools = SimPools(faults=self.plan.reads)
        self.poison = Poison()
        self.tickets = Tickets(self._rng("tickets"))
        self._world = Waker(self.timeline)
        self._graveyard: list[Process] = []
        self._incarnations = 0
        self._down: dict[str, float] = {}  # delays of restarts, by name of the process that a plan killed
        for name in ("router", *WORKERS):
            self.start(name)
        self._first_router = self.router
        for fault in self.plan.faults:
            self._world.post(fault.at_s, self.inject, fault)
        self._world.post(self.plan.until_s, self._calm)
        self._world.post(CHECK_EVERY_S, self._check)

    # Processes -------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a new incarnation of the process `name`."""
        self._incarnations += 1
        rng = self._rng(f"{name} {self._incarnations}")
        role = role_of(name)
        rate = self.plan.clock_rates.get(name, 1.0)
        process = Process(self.timeline, name, role, rate=rate, offset_s=rng.uniform(0, 1e4))
        process.on_death[self] = lambda: self._died(process)
        self.processes[name] = process
        if role == "router":
            self.router = SimRouter(process, self.network, rng, self.shape.router, self.poison.ended_by)
            self.routers.append(self.router)
            self._spawn(process, self.router.run())
        else:
            self.workers[name] = self._start_worker(process, name, rng)

    def _start_worker(self, process: Process, worker_id: str, rng: random.Random) -> SimWorker:
        worker = SimWorker(
            process,
            self.shape.of(worker_id, process.role),
            self.network,
            self.pools,
            rng,
            self.reached,
            poison=self.shape.poison,
            check_steps=self.shape.check_steps,
            worker_id=worker_id,
            flipped=self._flipped,
            poisonous=self.poison,
            tickets=self.tickets,
            told=self._told,
        )
        self._spawn(process, worker.run(process.kill))
        return worker

    def _told(self, seed: int, index: int, counts: DraftCounts | None) -> None:
        self.told.setdefault((seed, index), []).append(counts)

    def _flipped(self) -> None:
        self.num_flips += 1

    def _died(self, process: Process) -> None:
        """Plan the restart of a process that died, under the same name and address."""
        self._graveyard.append(process)
        self.restarts += 1
        self.deaths += process.role != "router"
        wait_s = self._down.pop(process.name, None)
        self._world.post(RESTART_S if wait_s is None else wait_s, self.start, process.name)

    def _spawn(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        process.loop.call_soon(process.loop.create_task, work)

    # Requests --------------------------------------------------------------------------------------------------------

    def ask(self, ask: ClientAsk) -> SimClient:
        """Add a client that sends its request at `ask.at_s`, or now if that has passed."""
        client = SimClient(ask, lambda: self.timeline.now_s)
        self.clients.append(client)
        if ask.ends_at is not None:
            self.poison.add(ask.name, ask.params.seed, ask.ends_at)
        self._world.post(max(0.0, ask.at_s - self.timeline.now_s), self._send, client)
        return client

    def _send(self, client: SimClient) -> None:
        router, process = self.router, self.router.process
        if not process.alive or router.service is None:
            client.lost()
            return
        process.on_death[client] = client.lost
        process.loop.post(CLIENT_DELAY_S, client.send, router)
        leaves_after_s = client.outcome.ask.leaves_after_s
        if leaves_after_s is not None:
            process.loop.post(leaves_after_s + 0.1, client.leave)

    # Faults ----------------------------------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Make a fault happen now."""
        process = self.processes[fault.target]
        match fault.kind:
            case FaultKind.KILL:
                self._end(process, fault)
            case FaultKind.RANK:
                self._lose_rank(process, fault)
            case FaultKind.STALL:
                process.stop(fault.lasts_s)
            case FaultKind.STALL_LOOP:
                process.stop_loop(fault.lasts_s)
            case FaultKind.STALL_ENGINE:
                process.stop_engine(fault.lasts_s)
            case FaultKind.HANG_ENGINE:
                process.hang_engine()
            case FaultKind.NO_NUMBERS:
                kv = self.workers[fault.target].kv
                kv.no_numbers = True
                self._world.post(fault.lasts_s, setattr, kv, "no_numbers", False)
            case FaultKind.CUT:
                self._cut(fault, both=True)
            case FaultKind.CUT_ONE_WAY:
                self._cut(fault, both=False)
            case FaultKind.RESET:
                for break_off in list(self.network.breaking.values()):
                    break_off()
            case FaultKind.DUPLICATE:
                self._duplicate(fault)
            case FaultKind.WRONG_KEYS:
                self.workers[fault.target].wrong_delta = fault.other
            case FaultKind.DRAIN:
                self._drain(fault)
            case FaultKind.FLIP:
                self._flip(fault)
            case FaultKind.UPGRADE:
                self._upgrade(fault)
            case FaultKind.BUDGET:
                self.router.process.loop.post(0.0, self._set_budget, fault)

    def _end(self, process: Process, fault: Fault) -> None:
        if process.alive:
            self._down[fault.target] = fault.lasts_s
            process.kill()

    def _lose_rank(self, process: Process, fault: Fault) -> None:
        """Let a rank of a gang die. The gang ends when a thread of rank 0 notices it; without rank 0 it ends at once."""
        worker = self.workers[fault.target]
        rank = int(fault.other) % worker.shape.degrees.ranks
        if not rank:
            self._end(process, fault)
        elif process.alive:
            worker.lose_rank(rank)
            ends_s = self._rng(f"rank of {process.name} at {fault.at_s}").random() * GANG_ENDS_S
            self._world.post(ends_s, self._end, process, fault)

    def _duplicate(self, fault: Fault) -> None:
        """Start a second process with the target's worker id, at an address of its own. It is not restarted."""
        self._incarnations += 1
        name = f"{fault.target}-duplicate{self._incarnations}"
        process = Process(self.timeline, name, self.processes[fault.target].role)
        self._graveyard.append(process)
        self._start_worker(process, fault.target, self._rng(name))
        self._world.post(fault.lasts_s, process.kill)

    def _drain(self, fault: Fault) -> None:
        """Drain the target: ask the router if `other` is the router and knows the worker, else signal the worker."""
        service, router = self.router.service, self.router.process
        if (
            fault.other == router.name
            and service is not None
            and fault.target in {w.hello.worker_id for w in service.snapshot().workers}
        ):
            router.loop.post(0.0, lambda: service.drain(fault.target, force=True))
        else:
            self.processes[fault.target].loop.post(0.0, self.workers[fault.target].member.drain)

    def _flip(self, fault: Fault) -> None:
        """Ask for the target's other role. The router may refuse it, and so may the worker."""
        worker = self.workers[fault.target]
        if fault.other == "":
            worker.process.loop.post(0.0, worker.flip)
            return
        if fault.other == "router":
            role = Role.DECODE if worker.process.role == "prefill" else Role.PREFILL
            self._orders[fault.target] = (role, worker.incarnation)
        if fault.target in self._orders:
            self.router.process.loop.post(0.0, self._ask_to_flip, fault.target, *self._orders[fault.target])

    def _ask_to_flip(self, name: str, role: Role, incarnation: int) -> None:
        if self.router.service is not None:
            with suppress(CannotFlip, StaleOrder, UnknownWorker):
                self.router.service.flip(name, role, incarnation)

    def _upgrade(self, fault: Fault) -> None:
        if self.upgrade is None:
            self.upgrade = UpgradeWatch({name: worker.incarnation for name, worker in self.workers.items()})
            self._watch_upgrade(self.upgrade)
        old = self.upgrade.old
        order = {name: old[name] for name in (reversed(old) if fault.other else old)}
        actuator = RollingUpgrade(self.router.admin, f"actuator at {fault.at_s} s", order, fault.lasts_s)
        self._spawn(self.router.process, actuator.run())

    def _watch_upgrade(self, upgrade: UpgradeWatch) -> None:
        if self.router.service is not None:
            serving: dict[str, int] = {w.hello.worker_id: w.hello.incarnation for w in self.router.core.registry if w.serves}
            self.timeline.errors += upgrade.look(self.workers.values(), serving)
        self._world.post(LOOK_AT_UPGRADES_S, self._watch_upgrade, upgrade)

    def _give_back_roles(self) -> None:
        """After the faults, flip a worker to each role that no worker has, as an operator would. Unequal workers all go back to
        the roles for which their sizes were chosen."""
        for role, first in (("prefill", "prefill0"), ("decode", "decode0")):
            if not any(worker.process.role == role for worker in self.workers.values()):
                self._flip_back(first)
        for name, worker in self.workers.items():
            if self.shape.unequal and worker.process.role != role_of(name):
                self._flip_back(name)
        self._world.post(LOOK_AT_ROLES_S, self._give_back_roles)

    def _flip_back(self, name: str) -> None:
        self.lacked_a_role = True
        self.workers[name].process.loop.post(0.0, self.workers[name].flip)

    def _set_budget(self, fault: Fault) -> None:
        """Ask the router for a budget. It refuses what the worker cannot have, and a worker that is not there."""
        service = self.router.service
        if service is not None:
            with suppress(InvalidRequest):
                service.set_budget([fault.target], int(fault.other))

    def _cut(self, fault: Fault, *, both: bool) -> None:
        for src, dst in ((fault.target, fault.other), (fault.other, fault.target))[: 2 if both else 1]:
            self.network.cut(src, dst)
            self._world.post(fault.lasts_s, self.network.heal, src, dst)

    def _calm(self) -> None:
        """End the faults: all paths are whole, and neither messages nor reads are lost or late any more."""
        self.network.weather = Weather()
        self.pools.faults = ReadFaults()
        self.network.heal_all()
        self._give_back_roles()

    # Looking ---------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.router.process.alive and self.router.service is not None:
            self.router.core.check_invariants()
            self.router.core.prefix_index.check_invariants()
        for worker in self.workers.values():
            if worker.process.alive:
                worker.engine.check_invariants()
        self._world.post(CHECK_EVERY_S, self._check)

    @property
    def recorded(self) -> list[MemoryNotes]:
        """The events of each incarnation of the router."""
        return [router.notes for router in self.routers]

    @property
    def watches(self) -> list[CoreWatch]:
        """The watches over the cores of all incarnations of the router."""
        return [router.watch for router in self.routers if router.watch is not None]

    @property
    def router_undisturbed(self) -> bool:
        """True if the router has run since the start, and was neither killed nor stopped."""
        return self.router is self._first_router and not self.router.process.disturbed

    @property
    def flips(self) -> bool:
        """True if the plan lets workers change their roles."""
        return any(fault.kind is FaultKind.FLIP for fault in self.plan.faults)

    def everybody_up(self) -> bool:
        """Tell whether all processes live and all workers are linked and take requests, their probes included. An ejected
        worker is out for longer than a run lasts."""
        linked = list(self.router.core.registry)
        alive = all(self.processes[name].alive for name in ALL)
        return alive and len(linked) == len(WORKERS) and all(w.serves or self.router.core.health.is_out(w) for w in linked)

    def end(self) -> None:
        """End all tasks of this world, without warnings from asyncio."""
        for process in [*self._graveyard, *self.processes.values()]:
            for thread in process.threads:
                bury(thread)

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")
