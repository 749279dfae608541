"""One search for goodput on a live cluster, from checked flags to tables and the file."""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.client import AdminClient, InferenceClient
from pdserve.commands.console import make_console
from pdserve.commands.tables import table
from pdserve.core.errors import ConfigError, PdserveError
from pdserve.rpc.v1 import inference_pb2
from pdserve.text.tokenizer import Tokenizer
from pdserve_bench.commands.run_session import encoder, open_tokenizer, until_interrupted
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.load.generator import raised_priority
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.target import RequestOptions
from pdserve_bench.load.watch import refusal
from pdserve_bench.report.meta import cluster_meta, collect_meta
from pdserve_bench.row import BenchRow
from pdserve_bench.search.degrees import DegreeSpace, degree_space
from pdserve_bench.search.goodput import GoodputSearch, RunAction, StopAction
from pdserve_bench.search.live import LiveMeasure, carry_out
from pdserve_bench.search.reshape import Home, home_of, pids_of
from pdserve_bench.search.result import GoodputResult, Point, SearchFile, check_same, prompt_share, read_search, write_search
from pdserve_bench.search.settings import (
    AUTO,
    SearchSettings,
    SpaceLimits,
    chunks_of,
    first_chunk,
    limits_of,
    prefill_ranks_of,
    split_ranks,
    splits_of,
)
from pdserve_bench.search.shaper import AdminPort, LiveCluster, Shaper
from pdserve_bench.search.trial import Trial
from pdserve_bench.workload.request import Arrivals
from pdserve_bench.workload.spec import read_spec
from pdserve_bench.workload.workload import Workload, load_workload

_POINTS_OF_A_FAMILY: Final = 8
"""A run of one rate gets such a part of a family's share of the budget, in which its best layout can be settled."""
_PROBE_S: Final = 10.0
_SAFE_SHARE: Final = 0.7
"""The share of the rate of the first short measurement with which the search begins. Goodput is mostly lower than that rate."""
MAX_BUDGET_MINUTES: Final = 7 * 24 * 60


@dataclass(frozen=True, slots=True)
class GoodputOutcome:
    """The end of a search, as the exit status tells it."""

    complete: bool
    reason: str
    interrupted: bool


@dataclass(frozen=True, slots=True)
class _Site:
    """The cluster on which a search goes on."""

    address: str
    admin: AdminClient
    started_for: Layout | None = None
    """The search has started the cluster for this layout, and stops it. None: somebody else's cluster, which it gives back."""

    def fits(self, layout: Layout) -> bool:
        """Tell whether the cluster can be brought to a layout."""
        return self.started_for is None or DegreeSpace.fits(self.started_for, layout)


@dataclass(frozen=True, slots=True)
class _GoodputPlan:
    """All that is known before the first request."""

    workload: Workload
    arrivals: Arrivals
    tokenizer: Tokenizer | None
    slo: Slo
    limits: SpaceLimits
    state: inference_pb2.GetClusterStateResponse
    model: inference_pb2.GetModelInfoResponse
    earlier: SearchFile | None
    earlier_path: Path | None
    budget_s: float
    began_s: float
    space: DegreeSpace | None
    """The degrees of a search that starts its clusters itself. None: the cluster runs already, and keeps its degrees."""


def search(flags: Mapping[str, Any]) -> GoodputOutcome:
    """Make the search that the flags describe, print its tables and keep its file. Raises `PdserveError`."""
    console = make_console()
    _check(flags)
    if flags["tensor_parallel_size"] is None:
        with raised_priority(), AdminClient(flags["admin_address"], flags["cluster_token"]) as admin:
            site = _Site(flags["address"], admin)
            end = uvloop.run(_Session(flags, _plan(flags, site, time.monotonic(), None), console).run(site))
            assert isinstance(end, GoodputOutcome), "the cluster fits every layout"
            return end
    space = degree_space(flags)
    began_s, wanted = time.monotonic(), space.first
    session: _Session | None = None
    while True:
        console.print(f"starting a cluster for {wanted.name}")
        try:
            with space.start(wanted) as cluster, AdminClient(cluster.admin_address) as admin, raised_priority():
                site = _Site(cluster.address, admin, wanted)
                session = session or _Session(flags, _plan(flags, site, began_s, space), console)
                try:
                    end = uvloop.run(session.run(site))
                except PdserveError:
                    cluster.check()  # if it has ended, that says more
                    raise
        except (KeyboardInterrupt, PdserveError) as exc:  # also while a further cluster starts
            if session is None:
                raise
            end = session.finish(False, f"the cluster for {wanted.name} was not there", interrupted=True)
            if isinstance(exc, PdserveError):
                raise
        if isinstance(end, GoodputOutcome):
            return end
        wanted = end


def _check(flags: Mapping[str, Any]) -> None:
    """Refuse wrong flags. Raises `ConfigError`."""
    if not 0 < flags["budget_minutes"] <= MAX_BUDGET_MINUTES:
        raise ConfigError(f"--budget-minutes: {flags['budget_minutes']:g} is not above 0 and at most {MAX_BUDGET_MINUTES}")
    for name in ("ttft", "tpot"):
        if not 0 <= flags[name] < math.inf:
            raise ConfigError(f"--{name}: {flags[name]:g} is not a number of seconds of at least 0")
    result_file: Path | None = flags["result_file"]
    if result_file is not None and not result_file.parent.is_dir():
        raise ConfigError(f"--result-file: the folder {result_file.parent} does not exist")
    if flags["tensor_parallel_size"] is None:
        for name in ("config", "model", "cores", "gpus"):
            if flags[name] is not None:
                raise ConfigError(
                    f"--{name} is for clusters that the search starts: give --tensor-parallel-size too, such as 1,2"
                )


def _plan(flags: Mapping[str, Any], site: _Site, began_s: float, space: DegreeSpace | None) -> _GoodputPlan:
    """Ask the cluster, and read the workload and the file of an earlier search."""
    result_file: Path | None = flags["result_file"]
    tokenizer = open_tokenizer(flags["tokenizer"])
    with InferenceClient(site.address) as client:
        model = client.model_info()
    overrides = []
    if tokenizer is None and read_spec(flags["workload"]).vocab_size is None:
        overrides.append(f"vocab_size={model.vocab_size}")
    workload = load_workload(flags["workload"], tokenizer, max_model_len=model.max_model_len, overrides=overrides)
    own = workload.spec.arrivals
    arrivals = Arrivals() if own.kind in ("inf", "closed") else own
    state = site.admin.cluster_state()
    path = flags["resume"] or result_file
    earlier = read_search(path) if path is not None and (flags["resume"] is not None or path.exists()) else None
    slo = Slo(flags["ttft"] or None, flags["tpot"] or None)
    return _GoodputPlan(
        workload,
        arrivals,
        tokenizer,
        slo,
        limits_of(state),
        state,
        model,
        earlier,
        path if earlier else None,
        flags["budget_minutes"] * 60,
        began_s,
        space,
    )


class _Session:
    """One search, on one cluster or on several ones in turn. It owns the target and the view."""

    def __init__(self, flags: Mapping[str, Any], plan: _GoodputPlan, console: Console) -> None:
        self._flags = flags
        self._plan = plan
        self._console = console
        now = datetime.datetime.now(datetime.UTC)
        left_out = {
            "cluster_token",
            "result_file",
            "resume",
            "tokenizer",
            "workload",
            "config",
            "model",
        }  # a file keeps no secrets and no paths
        self._meta = collect_meta(
            workload=plan.workload.spec.to_dict(),
            configuration={name: value for name, value in flags.items() if name not in left_out and value is not None},
            seed=flags["seed"],
            slos={"": plan.slo},
            started=now,
            ended=now,
            cluster=cluster_meta(plan.state, plan.model),
        )
        self._points: list[Point] = list(plan.earlier.result.points) if plan.earlier else []
        self._settings: SearchSettings | None = None
        self._result: GoodputResult | None = None
        self._home: Home | None = None
        for note in plan.workload.notes:
            console.print(note)
        if plan.arrivals.kind != plan.workload.spec.arrivals.kind:
            given = plan.workload.spec.arrivals.kind
            console.print(f"arrivals of kind {given} have no rate: the search sends {plan.arrivals.kind} ones instead")

    async def run(self, site: _Site) -> GoodputOutcome | Layout:
        """Search on a cluster, and print the table of the layouts at the end, also after Ctrl-C.

        Returns a layout if the next point needs another cluster, on which the search goes on.
        """
        target = GrpcTarget(site.address, RequestOptions())
        self._shaper = Shaper(AdminPort(site.admin))
        try:
            stop, _ = await until_interrupted(self._search(target, site))
        finally:
            await target.close()
        if isinstance(stop, Layout):
            return stop
        complete, reason = (False, "it was interrupted") if stop is None else (stop.complete, stop.reason)
        if refused := [one.refused for one in self._points if one.refused]:
            reason += f". {len(refused)} of {len(self._points)} points do not count; the last one because {refused[-1]}"
        if self._shaper.restored:
            self._home = None
        elif stop is None and site.started_for is None:
            reason += (
                ". The first layout is not back: look at `pdserve status`, and run the same command again or `pdserve flip`"
            )
            self._console.print(reason)
        return self.finish(complete, reason, interrupted=stop is None)

    def finish(self, complete: bool, reason: str, *, interrupted: bool) -> GoodputOutcome:
        """Keep what is known, print the table of the layouts, and return the outcome."""
        if self._settings is not None:
            self._keep(self._points, complete)
        if self._result is not None and self._settings is not None:
            self._console.print(layouts(self._result))
            found = any(one.goodput_per_s for one in self._result.layouts)
            for name, seqs in (GoodputSearch(self._settings).knees(self._points) if found else {}).items():
                self._console.print(f"{name}: max_num_seqs {seqs} is the smallest that was seen to cost no goodput")
        return GoodputOutcome(complete, reason, interrupted)

    async def _search(self, target: GrpcTarget, site: _Site) -> StopAction | Layout:
        """Search until the end or the budget, and return why it ended. A layout: it needs another cluster."""
        plan, flags = self._plan, self._flags
        cluster = LiveCluster(site.admin)
        await cluster.wait_idle(0.0)
        encode = encoder(plan.tokenizer)
        if site.started_for is None:
            await self._remember_home(AdminPort(site.admin))
        with SearchView(self._console, lambda points: self._keep(points, False)) as view:
            settings = self._settings or self._settings_of(await self._guess(target, cluster))
            if plan.earlier is not None and plan.earlier_path is not None:
                check_same(plan.earlier_path, plan.earlier, settings, self._identity())
            self._settings = settings
            self._keep(self._points, False)  # with the first layout, before it is changed
            measure = LiveMeasure(
                settings,
                plan.workload,
                plan.arrivals,
                target,
                cluster,
                flags["seed"],
                (lambda rows: "") if flags["allow_late"] else refusal,
                observe=view.row,
                encode=encode,
                placement=flags["placement"],
            )
            left_s = plan.budget_s - (time.monotonic() - plan.began_s)
            _, end = await carry_out(
                GoodputSearch(settings),
                measure,
                self._shaper,
                view,
                points=self._points,
                budget_s=left_s,
                clock=time.monotonic,
                fits=site.fits,
                restore=site.started_for is None,
            )
        return end

    async def _remember_home(self, port: AdminPort) -> None:
        """Note the layout that must come back: that of an earlier search which did not, while its workers still run."""
        now = await port.look()
        owed = self._plan.earlier.home if self._plan.earlier else None
        if owed is not None and owed.pids == pids_of(now):
            self._home, self._shaper = owed, Shaper(port, owed=owed)
            self._console.print("the earlier search did not bring the first layout back: this one will")
        else:
            self._home = home_of(now)

    async def _guess(self, target: GrpcTarget, cluster: LiveCluster) -> tuple[float, float | None]:
        """Return a rate to begin with, and the share of prompts in the computing. A short run tells both.

        An earlier search tells its own, so that it goes on as it would have.
        """
        plan, flags = self._plan, self._flags
        if plan.earlier is not None:
            return plan.earlier.settings.first_rate_per_s, None
        if flags["first_rate"] is not None:
            return flags["first_rate"], None
        longest_s = (plan.slo.ttft_s or 0.0) + (plan.slo.tpot_s or 0.0) * plan.workload.mean_output_tokens
        probe_s = min(max(_PROBE_S, 2 * longest_s), plan.budget_s / 4)
        settings = self._settings_of((1.0, None))
        measure = LiveMeasure(
            settings, plan.workload, plan.arrivals, target, cluster, flags["seed"], refusal, encode=encoder(plan.tokenizer)
        )
        self._console.print(f"measuring for {probe_s:.0f} s to find a first rate")
        before = await cluster.counters()
        rate_per_s = await measure.probe(4 * plan.limits.workers, probe_s)
        share = prompt_share(before, await cluster.counters())
        if rate_per_s == 0.0:
            raise ConfigError(
                f"--first-rate: no request was answered whole within {probe_s:.0f} s, so no first rate is known: send one with "
                "`pdserve generate`, or set --first-rate"
            )
        return rate_per_s * _SAFE_SHARE, share

    def _settings_of(self, guess: tuple[float, float | None]) -> SearchSettings:
        plan, flags = self._plan, self._flags
        first_rate_per_s, share = guess
        chunks = chunks_of(flags["chunks"], plan.limits)
        degrees: tuple[tuple[int, int], ...] = (plan.limits.degrees,)
        if plan.space is None:
            ranks = plan.limits.ranks
            prefills = prefill_ranks_of(flags["splits"], plan.limits, share)
        else:
            ranks, degrees = plan.space.ranks, plan.space.pairs
            prefills = splits_of(flags["splits"], ranks, share, f"{plan.space.device}s")
        if plan.earlier is not None and flags["splits"] == AUTO:
            prefills = plan.earlier.settings.prefills
        families = sum(map(bool, itertools.chain(*(split_ranks(prefills, ranks, *pair) for pair in degrees))))
        return SearchSettings(
            slo=plan.slo,
            ranks=ranks,
            prefills=prefills,
            chunks=chunks,
            chunk_tokens=first_chunk(chunks, plan.limits),
            max_num_seqs=plan.limits.max_num_seqs,
            first_rate_per_s=first_rate_per_s,
            mean_output_tokens=plan.workload.mean_output_tokens,
            attainment=flags["attainment"],
            tolerance=flags["tolerance"],
            max_point_s=flags["max_point_s"] or plan.budget_s / (_POINTS_OF_A_FAMILY * max(2, families)),
            degrees=degrees,
        )

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal for a search to go on."""
        hellos = [one.hello for one in self._plan.state.workers]
        return {
            "workload": self._plan.workload.fingerprint,
            "seed": self._flags["seed"],
            "placement": self._flags["placement"],
            "model": sorted({one.model_fingerprint for one in hellos}),
            "dtype": sorted({one.dtype for one in hellos}),
            "quantization": sorted({one.quantization for one in hellos}),
        }

    def _keep(self, points: Sequence[Point], complete: bool) -> None:
        """Keep the points and, where a file is wanted, write it."""
        assert self._settings is not None
        self._points = list(points)
        plan, settings = self._plan, self._settings
        search = GoodputSearch(settings)
        ended = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        meta = self._meta | {"ended": ended, "max_num_seqs_knee": search.knees(self._points)}
        self._result = GoodputResult(
            plan.slo,
            settings.attainment,
            plan.workload.spec.to_dict(),
            search.results(self._points),
            tuple(self._points),
            complete,
            meta,
            plan.space.device if plan.space is not None else "rank" if max(plan.limits.degrees) > 1 else "worker",
        )
        if self._flags["result_file"] is not None:
            write_search(self._flags["result_file"], SearchFile(settings, self._identity(), self._result, self._home))


# The view of a search: the point that runs, a line for each point, and the table of the layouts.


_INTERVAL_S = 0.25


class SearchView:
    """It shows runs and points, and lets `keep` write each point. Inside `with`, a terminal shows the point that runs."""

    def __init__(self, console: Console, keep: Callable[[Sequence[Point]], None]) -> None:
        """Prepare the view."""
        self._console = console
        self._keep = keep
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._run: RunAction | None = None
        self._end_s = math.inf
        self._drawn_s = 0.0

    def __enter__(self) -> SearchView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begins(self, run: RunAction, points: Sequence[Point], left_s: float) -> None:
        """Show that a run begins."""
        self._run, self._end_s = run, time.monotonic() + left_s
        self._draw(f"{_what(run.layout, run.rate_per_s)}: preparing")

    def row(self, trial: Trial, row: BenchRow) -> None:
        """Show what a run has shown so far, a few times a second."""
        if self._run is None or time.monotonic() < self._drawn_s + _INTERVAL_S:
            return
        seen = trial.estimate
        share = f"attainment {_share(seen.attained, seen.requests)} ({seen.low:.3f} to {seen.high:.3f})"
        said = share if seen.requests else "no interval yet"
        self._draw(f"{_what(self._run.layout, self._run.rate_per_s)}: {row.ended_s:.0f} s, {trial.in_flight} running, {said}")

    def ends(self, points: Sequence[Point]) -> None:
        """Keep the points, and print the last one."""
        self._keep(points)
        self._console.print(line(points[-1]))

    def _draw(self, text: str) -> None:
        if self._live is not None:
            self._drawn_s = time.monotonic()
            left_s = max(0.0, self._end_s - self._drawn_s)
            self._live.update(Text(f"{text}; {left_s / 60:.1f} min left"), refresh=True)


def line(point: Point) -> str:
    """Return one line about a point."""
    if point.refused:
        return f"{_what(point.layout, point.rate_per_s)}: does not count: {point.refused.partition('. ')[0]}"
    share = f"attainment {_share(point.attained, point.requests)} ({point.low:.3f} to {point.high:.3f})"
    said = f"{share} of {point.requests} requests in {point.measured_s:.0f} s"
    apart = point.figures.disaggregated_share
    if point.layout.disaggregated and apart is not None and apart < 1.0:
        said += f", {1 - apart:.1%} of them colocated"
    return f"{_what(point.layout, point.rate_per_s)}: {said}{', the backlog grew without bound' if point.overloaded else ''}"


def layouts(result: GoodputResult) -> Table:
    """Return the table of all layouts, the best one first."""
    title = f"goodput: requests a second of which {result.attainment:.0%} meet their targets"
    right = ["chunk", "max_num_seqs", "req/s", "interval", f"req/s a {result.device}", "points"]
    view = table(title, ["layout", "settled"], right)
    for one in result.layouts:
        count = sum(point.layout == one.layout for point in result.points)
        high = "?" if math.isinf(one.high_per_s) else f"{one.high_per_s:.3g}"
        view.add_row(
            one.layout.name,
            "yes" if one.settled else "no",
            str(one.layout.chunk_tokens),
            str(one.layout.max_num_seqs),
            f"{one.goodput_per_s:.3g}",
            f"{one.low_per_s:.3g} to {high}",
            f"{one.goodput_per_s / one.layout.ranks:.3g}",
            str(count),
        )
    return view


def _what(layout: Layout, rate_per_s: float) -> str:
    return f"{layout.name}, chunk {layout.chunk_tokens}, max_num_seqs {layout.max_num_seqs}, {rate_per_s:.3g} req/s"


def _share(attained: int, requests: int) -> str:
    return f"{attained / requests:.3f}" if requests else "unknown"
