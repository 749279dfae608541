"""A cluster on the virtual clock: the production core of the router, simulated workers, and the requests of a trace.

Nothing fails here (`sim.faults` has failures), and the router's own work takes no time. A message takes `hop_s`, whatever its
size. The same cluster, requests and seed give the same run. `elastic.py` has a cluster whose workers come, go and flip.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.config import RouterConfig
from pdserve.core.errors import PdserveError
from pdserve.core.ids import RequestId
from pdserve.core.report import Report
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.core.slo import BUILT_IN, SloClass
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.router_core import RouterCore
from router.service.policies import rankings_of
from sim.perf.clock import Clock
from sim.perf.report import SimReport, SimServed, Used
from sim.perf.traces import TraceRequest
from sim.perf.workers import PerfWorker, PerfWorkerShape, PerfWorld, SimDecodeWorker, SimPrefillWorker

TICK_S = 0.1
"""The router's own interval while requests run."""


def calm_router(**settings: object) -> RouterConfig:
    """Return settings of a router that refuses no request and probes no worker, with changes."""
    ample = {"max_queued_requests": 1 << 20, "max_queued_tokens": 1 << 40, "default_deadline_s": 1e6, "max_deadline_s": 1e6}
    return RouterConfig(**{**ample, "probe_workers": False, **settings})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """A cluster: its workers and settings."""

    prefill: Sequence[PerfWorkerShape]
    decode: Sequence[PerfWorkerShape]
    router: RouterConfig = field(default_factory=calm_router)
    block_size: int = 512
    prefix_caching: bool = True
    max_tokens: int = 2048
    """The largest output that clients ask for. The router does not know when an output will end before."""
    classes: Mapping[str, SloClass] = field(default_factory=lambda: BUILT_IN)
    judged_by: Mapping[str, SloClass] | None = None
    """The classes whose targets the report compares with. None: the report uses `classes`, the classes that the router knows.
    The router refuses requests that would miss a target for TTFT."""
    hop_s: float = 0.0005
    seed: int = 0
    """It decides the phases of the heartbeats and what policies draw."""


class PerfCluster:
    """One run of a cluster: its clock, its workers, the router's core, and the requests of a trace."""

    def __init__(
        self, spec: ClusterSpec, requests: Sequence[TraceRequest], on_end: Callable[[], object] = lambda: None
    ) -> None:
        """Prepare a run. `requests` are in the order of arrival. `on_end` is called when a request has ended."""
        self.clock = Clock()
        self.report = SimReport()
        self._spec = spec
        self._requests = requests
        self._on_end = on_end
        outputs = {_id(number): request.output_tokens for number, request in enumerate(requests)}
        self._world = PerfWorld(self.clock, self._tell, outputs, spec.block_size, spec.hop_s)
        fingerprint = (*spec.prefill, *spec.decode)[0].costs.family
        self._salt = fingerprint.encode() if spec.prefix_caching else None
        self.workers: dict[ev.LinkId, PerfWorker] = {}
        """The linked workers."""
        self._links = 0
        self._rng = random.Random(spec.seed)
        for role, shapes in ((Role.PREFILL, spec.prefill), (Role.DECODE, spec.decode)):
            for shape in shapes:
                self._make(role, f"{role.value}-{self._links}", shape)
        self.core = RouterCore(spec.router, fingerprint, rankings_of(spec.router, _no_faults), spec.seed)
        self._open: dict[RequestId, TraceRequest] = {}
        self._ended = 0
        self._tokens: dict[int, SamplingParams] = {}

    def run(self) -> SimReport:
        """Run until all requests have ended and nothing is left, and return the report."""
        for worker in self.workers.values():
            self._join(worker)
        self.clock.after(TICK_S, self._tick)
        if self._requests:
            self.clock.at(self._requests[0].arrived_s, self._arrive, 0)
        while self.clock.step():
            pass
        self._note_workers()
        return self.report

    def assert_empty(self) -> None:
        """Assert that no request, lease, work or block is left, and that all books agree."""
        self.core.check_invariants()
        assert self.core.num_requests == 0
        assert not self._open
        assert not self._world.leases
        for worker in self.workers.values():
            worker.engine.scheduler.check_invariants()
            assert worker.idle, f"{worker.worker_id} still holds something"

    @property
    def _over(self) -> bool:
        return self._ended == len(self._requests)

    # Workers ---------------------------------------------------------------------------------------------------------

    def _make(self, role: Role, worker_id: str, shape: PerfWorkerShape, earlier: PerfWorker | None = None) -> PerfWorker:
        """Return a new worker, which gets the messages of a link of its own. `earlier` is the last life of its process."""
        make = SimPrefillWorker if role is Role.PREFILL else SimDecodeWorker
        link = ev.LinkId(self._links)
        self._links += 1
        worker = self.workers[link] = make(self._world, link, worker_id, shape, self._salt, earlier)
        return worker

    def _join(self, worker: PerfWorker) -> None:
        self._handle(ev.WorkerJoined(worker.link, worker.hello()))
        self.clock.after(self._rng.random() * self._spec.router.heartbeat_interval_s, self._heartbeat, worker)

    def _command(self, command: ev.Command) -> None:
        """Give a command to its worker. A worker that has left had no work any more, so it can only miss a cancel."""
        worker = self.workers.get(command.link)
        if worker is not None:
            worker.on_command(command)
        else:
            assert isinstance(command, ev.SendCancel | ev.SendPrefixResync), f"{command} came after the worker had left"

    # The router's shell --------------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        request = self._requests[number]
        request_id = _id(number)
        self._open[request_id] = request
        submit = self._submit_of(request_id, request)
        try:
            self._handle(submit)
        except PdserveError as exc:
            self.report.refused += 1
            self._end(request_id, exc, Report(Placement.AUTO, "", request.prompt_tokens, 0))
        if number + 1 < len(self._requests):
            self.clock.at(max(self.clock.now_s, self._requests[number + 1].arrived_s), self._arrive, number + 1)

    def _submit_of(self, request_id: RequestId, request: TraceRequest) -> ev.Submit:
        slo = self._spec.classes[request.slo_class]
        most = max(self._spec.max_tokens, request.output_tokens)
        sampling = self._tokens.setdefault(most, SamplingParams(max_tokens=most, temperature=0.0))
        spec = RequestSpec(request.prompt_ids, sampling, priority=request.priority + slo.priority, tpot_s=slo.tpot_s or 0.0)
        return ev.Submit(
            request_id,
            spec,
            arrived_s=self.clock.now_s,
            deadline_s=self.clock.now_s + self._spec.router.default_deadline_s,
            slo=slo,
            session_id=request.session_id,
            prefix_keys=() if self._salt is None else request.prefix_keys(self._spec.block_size, self._salt),
        )

    def _tell(self, event: ev.WorkerEvent) -> None:
        self.clock.after(self._spec.hop_s, self._handle, event)

    def _handle(self, event: ev.Event) -> None:
        for effect in self.core.handle(event, now_s=self.clock.now_s):
            match effect:
                case (
                    ev.SendBind()
                    | ev.SendPrefill()
                    | ev.SendAttach()
                    | ev.SendCancel()
                    | ev.SendPrefixResync()
                    | ev.SendDrain()
                ):
                    self.clock.after(self._spec.hop_s, self._command, effect)
                case ev.EmitDone(request_id, report):
                    self._end(request_id, None, report)
                case ev.EmitFailed(request_id, error, report):
                    self._end(request_id, error, report)
                case ev.ReportBug(bug):
                    raise bug
                case ev.CloseLink(link, error):
                    raise AssertionError(f"the router closed the link of {self.workers[link].worker_id}: {error}")

    def _end(self, request_id: RequestId, error: PdserveError | None, report: Report) -> None:
        request = self._open.pop(request_id)
        self._ended += 1
        served = SimServed(
            request_id,
            (self._spec.judged_by or self._spec.classes)[request.slo_class],
            request.arrived_s,
            self.clock.now_s,
            request.prompt_tokens,
            self._world.computed.get(request_id, 0),
            report,
            "" if error is None else error.code.value,
        )
        self.report.served.append(served)
        self._on_end()

    # Time ----------------------------------------------------------------------------------------------------------

    def _heartbeat(self, worker: PerfWorker) -> None:
        if not self._over and worker.link in self.workers:
            self._tell(ev.HeartbeatSeen(worker.link, worker.load()))
            if (delta := worker.prefix_delta()) is not None:
                self._tell(ev.PrefixSeen(worker.link, delta))
            self.clock.after(self._spec.router.heartbeat_interval_s, self._heartbeat, worker)

    def _tick(self) -> None:
        if not self._over:
            self._handle(ev.Tick())
            self.clock.after(TICK_S, self._tick)

    def _note_workers(self) -> None:
        served = self.report.served
        if served:
            self.report.span_s = max(one.ended_s for one in served) - min(one.arrived_s for one in served)
        for worker in self.workers.values():
            self._note(worker)

    def _note(self, worker: PerfWorker) -> None:
        engine, prefix = worker.engine, worker.engine.scheduler.prefix
        self.report.workers.append(Used(worker.worker_id, engine.steps, engine.busy_s, prefix.queried, prefix.hit))


def simulate(spec: ClusterSpec, requests: Sequence[TraceRequest], on_end: Callable[[], object] = lambda: None) -> SimReport:
    """Run a cluster over a trace, check that nothing is left, and return the report."""
    return run_cluster(PerfCluster(spec, requests, on_end))


def run_cluster(cluster: PerfCluster) -> SimReport:
    """Run a cluster, check that nothing is left, and return the report."""
    gc_was_on = gc.isenabled()
    gc.disable()  # nearly no object is in a cycle, and a search for cycles takes a sixth of the time
    try:
        report = cluster.run()
    finally:
        if gc_was_on:
            gc.enable()
    cluster.assert_empty()
    return report


def _id(number: int) -> RequestId:
    return RequestId(f"r{number}")


def _no_faults(role: str, reason: str) -> None:
    raise AssertionError(f"the policy of the {role} pool {reason}")
