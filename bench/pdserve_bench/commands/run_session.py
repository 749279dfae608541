"""One run of the load generator, from checked flags to tables and files."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from pdserve.commands.console import make_console
from pdserve.commands.requests import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from pdserve.core.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer
from pdserve_bench.commands.live_line import live_line
from pdserve_bench.commands.preflight import ask_router, check_files, check_memory, check_text
from pdserve_bench.commands.run_flags import (
    arrivals_of_flags,
    limits_of_flags,
    metadata_of_flags,
    percentiles_of_flag,
    slo_of_flags,
    workload_text,
)
from pdserve_bench.layout import Slo
from pdserve_bench.load.generator import run_load
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.http_target import BaseUrl, HttpOptions, HttpTarget
from pdserve_bench.load.lateness import refusal
from pdserve_bench.load.limits import RunLimits
from pdserve_bench.load.live import LiveFigures
from pdserve_bench.load.options import RequestOptions
from pdserve_bench.load.priority import raised_priority
from pdserve_bench.load.server_info import ServerInfo, ask_server
from pdserve_bench.load.target import Target
from pdserve_bench.load.watch import RunProgress
from pdserve_bench.report.columns import columns
from pdserve_bench.report.compare import compare_runs
from pdserve_bench.report.files import Run, RunFileError, read_run, write_run
from pdserve_bench.report.meta import cluster_meta, collect_meta, slos_of
from pdserve_bench.report.summary import summarise
from pdserve_bench.report.table import comparison_table, summary_table
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.arrivals import Arrivals
from pdserve_bench.workload.parse import read_spec
from pdserve_bench.workload.request import BenchRequest, Ids, PromptPart
from pdserve_bench.workload.spec import SessionSource, TextSource
from pdserve_bench.workload.workload import Workload, load_workload

STOPS = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a run early. It is reported and written all the same."""
SECRET = ("api_key", "cluster_token")
"""Flags that no file gets."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run, as the exit status tells it."""

    requests: int
    completed: int
    refused: str
    stopped_by: int
    """The signal that ended the run early. 0: none did."""


@dataclass(frozen=True, slots=True)
class _RunPlan:
    """All that is decided before the first request."""

    workload: Workload
    arrivals: Arrivals
    limits: RunLimits
    slo: Slo
    percentiles: list[float]
    metadata: dict[str, str]
    earlier: Run | None
    tokenizer: Tokenizer | None
    backend: str
    info: ServerInfo
    url: BaseUrl | None
    cluster: dict[str, Any] | None
    """The workers, from `cluster_meta`. None: the router was not asked."""

    def slo_of(self, slo_class: str) -> Slo:
        """Return the targets, which are the same for all classes."""
        return self.slo

    @property
    def continuous_usage(self) -> bool:
        """The server is known to tell the tokens of each chunk."""
        return self.info.knows_continuous_usage


def measure(flags: Mapping[str, Any]) -> RunOutcome:
    """Make the run that the flags describe, print its figures and write its files. Raises `ConfigError`."""
    console = make_console()
    rows: list[BenchRow] = []
    progress = RunProgress()
    with raised_priority() as real_time:  # it begins before the first thread of grpc, which inherits it
        plan = _plan(flags)
        started = datetime.datetime.now(datetime.UTC)
        stopped_by = uvloop.run(_run(plan, flags, rows, progress, console))
    ended = datetime.datetime.now(datetime.UTC)
    refused = refusal(rows)
    meta = collect_meta(
        workload=plan.workload.to_dict(),
        configuration=_configuration(flags, plan),
        seed=flags["seed"],
        slos={"": plan.slo},
        started=started,
        ended=ended,
        cluster=plan.cluster,
    )
    meta |= {
        "refused": refused,
        "interrupted": bool(stopped_by),
        "generator": {"real_time": real_time},
        "held": progress.held,
        "error_messages": dict(progress.messages),
        "token_counts": "server" if plan.url is None or _continuous(flags, plan) else "chunks",
        "metadata": plan.metadata,
        "notes": list(plan.workload.notes),
    }
    this = Run(tuple(rows), meta)
    try:
        _write(this, [path for path in (flags["result_file"], flags["parquet"]) if path is not None])
    finally:  # the figures of a run are shown also if the disk refuses its rows
        _show(this, plan, progress, console)
    return RunOutcome(len(rows), sum(row.ok for row in rows), refused, stopped_by)


def _write(this: Run, paths: list[Path]) -> None:
    """Write the files. A file that cannot be written does not keep the others from it. Raises `RunFileError` of the first."""
    failed: RunFileError | None = None
    for path in paths:
        try:
            write_run(path, this)
        except RunFileError as exc:
            failed = failed or exc
    if failed is not None:
        raise failed


def _plan(flags: Mapping[str, Any]) -> _RunPlan:
    """Check all flags, ask the server, and read the workload, before the first request is sent."""
    backend = flags["backend"] or ("openai" if flags["base_url"] else "grpc")
    if backend != "grpc" and not flags["base_url"]:
        raise ConfigError(f"--base-url: is missing; --backend {backend} needs it, such as http://127.0.0.1:8000")
    if backend == "grpc" and flags["base_url"]:
        raise ConfigError("--base-url: is for the backends openai and openai-chat; --backend grpc takes --address")
    text = workload_text(flags["workload"], flags["random_input_len"], flags["random_output_len"])
    limits = limits_of_flags(
        *(flags[name] for name in ("num_prompts", "duration_s", "max_concurrency")),
        *(flags[name] for name in ("warmup_requests", "warmup_s", "request_timeout_s")),
    )
    slo, percentiles = slo_of_flags(flags["goodput"]), percentiles_of_flag(flags["percentiles"])
    metadata = metadata_of_flags(flags["metadata"])
    check_text(flags)
    check_files(flags)
    earlier = None if flags["compare"] is None else read_run(flags["compare"])
    tokenizer = _tokenizer(flags["tokenizer"])
    url, info, vocab_size, max_model_len = None, ServerInfo(flags["model"]), None, None
    if backend == "grpc":
        vocab_size, max_model_len = ask_router(flags["address"])
    else:
        url = BaseUrl.parse(flags["base_url"])
        asked = uvloop.run(ask_server(url, flags["api_key"]))
        info, vocab_size, max_model_len = (
            replace(asked, model=flags["model"] or asked.model),
            asked.vocab_size,
            asked.max_model_len,
        )
        if not info.model:
            raise ConfigError("--model: the server names none under /v1/models; set it")
    workload = _load(text, tokenizer, vocab_size, max_model_len)
    if backend != "grpc" and tokenizer is None and isinstance(workload.spec.source, SessionSource):
        raise ConfigError(
            "--tokenizer: is missing; turns repeat earlier answers as token ids, and HTTP servers answer with text"
        )
    check_memory(limits, workload.mean_output_tokens)
    arrivals = arrivals_of_flags(
        workload.spec.arrivals,
        flags["request_rate"],
        flags["burstiness"],
        flags["trace_timestamps"],
        flags["max_concurrency"],
    )
    return _RunPlan(
        workload, arrivals, limits, slo, percentiles, metadata, earlier, tokenizer, backend, info, url, _cluster(flags, backend)
    )


def _tokenizer(name: str | None) -> Tokenizer | None:
    if name is None:
        return None
    from pdserve.checkpoint.resolve import resolve

    return Tokenizer.load(resolve(name))


def _cluster(flags: Mapping[str, Any], backend: str) -> dict[str, Any] | None:
    """Ask the router for its workers before the run. A port that nobody named need not answer. Raises `CallFailed`."""
    named = flags["admin_address"]
    if named is None and (backend != "grpc" or flags["address"] != DEFAULT_ADDRESS):
        return None
    from pdserve.client import AdminClient, CallFailed

    with AdminClient(named or DEFAULT_ADMIN_ADDRESS, flags["cluster_token"]) as client:
        try:
            return cluster_meta(client.cluster_state())
        except CallFailed:
            if named is not None:
                raise
            return None


def _load(text: str, tokenizer: Tokenizer | None, vocab_size: int | None, max_model_len: int | None) -> Workload:
    """Load the workload. Without a tokenizer, random tokens are those of the server's vocabulary."""
    overrides, spec = [], read_spec(text)
    if tokenizer is None and isinstance(spec.source, TextSource):
        raise ConfigError("--tokenizer: is missing; pieces of a text are cut between the tokens of the model")
    if tokenizer is None and vocab_size is None and spec.vocab_size is None:
        raise ConfigError("--tokenizer: is missing, and this server does not tell the size of its vocabulary")
    if tokenizer is None and spec.vocab_size is None:
        overrides.append(f"vocab_size={vocab_size}")
    return load_workload(text, tokenizer, max_model_len=max_model_len, overrides=overrides)


async def _run(plan: _RunPlan, flags: Mapping[str, Any], rows: list[BenchRow], progress: RunProgress, console: Console) -> int:
    """Make the run, and fill `rows`. Return the signal that ended it early, or 0."""
    limits = plan.limits
    count = None if limits.num_requests is None else limits.num_requests + limits.warmup_requests
    seconds = None if limits.duration_s is None else limits.duration_s + limits.warmup_s
    figures = LiveFigures(plan.slo_of, duration_s=seconds, requests=count)

    def watch(row: BenchRow) -> bool:
        rows.append(row)
        figures.add(row)
        return False

    requests = _fitting(plan.workload.requests(plan.arrivals, flags["seed"]), plan)
    target = _target(plan, flags)
    try:
        async with live_line(console, figures, progress):
            work = run_load(requests, target, limits, watch, encode=_encode(plan.tokenizer), progress=progress)
            return await _until_interrupted(asyncio.create_task(work))
    finally:
        await target.close()


async def _until_interrupted(task: asyncio.Task[list[BenchRow]]) -> int:
    """Await the run. Return the signal that has ended it, or 0."""
    loop = asyncio.get_running_loop()
    got: list[int] = []

    def stop(number: int) -> None:
        got.append(number)
        task.cancel()

    for one in STOPS:
        loop.add_signal_handler(one, stop, one)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            task.cancel()
            raise
        return got[0] if got else int(signal.SIGINT)
    finally:
        for one in STOPS:
            loop.remove_signal_handler(one)
    return 0


def _fitting(requests: Iterator[BenchRequest], plan: _RunPlan) -> Iterator[BenchRequest]:
    """Return the requests as the server's API takes them: as text for chats. Raises `ConfigError` when it cannot take them."""
    first = next(requests, None)
    if first is None:
        raise ConfigError("--workload: has no requests")
    whole, tokenizer = itertools.chain([first], requests), plan.tokenizer
    if plan.backend != "openai-chat" or not any(isinstance(part, tuple) for part in first.prompt):
        return whole
    if tokenizer is None:
        raise ConfigError("--tokenizer: is missing; this workload has token ids, and --backend openai-chat sends text")

    def as_text(part: PromptPart) -> PromptPart:
        return tokenizer.decode(part) if isinstance(part, tuple) else part

    return (replace(request, prompt=tuple(map(as_text, request.prompt))) for request in whole)


def _target(plan: _RunPlan, flags: Mapping[str, Any]) -> Target:
    options = RequestOptions(plan.info.model, flags["ignore_eos"], flags["temperature"])
    if plan.url is None:
        return GrpcTarget(flags["address"], options)
    http = HttpOptions(
        chat=plan.backend == "openai-chat",
        ours=plan.info.ours,
        continuous_usage=_continuous(flags, plan),
        api_key=flags["api_key"],
    )
    return HttpTarget(plan.url, options, http)


def _continuous(flags: Mapping[str, Any], plan: _RunPlan) -> bool:
    chosen = flags["continuous_usage"]
    return plan.continuous_usage if chosen is None else bool(chosen)


def _encode(tokenizer: Tokenizer | None) -> Callable[[str], Ids] | None:
    if tokenizer is None:
        return None
    return lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))


def _configuration(flags: Mapping[str, Any], plan: _RunPlan) -> dict[str, Any]:
    """Return the flags as a file keeps them: no secrets, no paths, and arrivals as they were decided."""
    left_out = {*SECRET, "result_file", "parquet", "compare", "metadata", "goodput"}
    kept = {name: value for name, value in flags.items() if name not in left_out and value is not None}
    if plan.tokenizer is not None:
        kept["tokenizer"] = str(kept["tokenizer"]).rstrip("/").rpartition("/")[2]
    if plan.url is not None:
        del kept["address"]
    kept |= {"backend": plan.backend, "model": plan.info.model, "server": plan.info.owner}
    kept["arrivals"] = {"kind": plan.arrivals.kind, "rate_per_s": plan.arrivals.rate_per_s}
    if kept.get("request_rate") == float("inf"):
        kept["request_rate"] = "inf"  # JSON has no infinity
    return kept


def _show(this: Run, plan: _RunPlan, progress: RunProgress, console: Console) -> None:
    """Print the figures, and the comparison where one is wanted."""
    for note in plan.workload.notes:
        console.print(note)
    workers = None if plan.cluster is None else len(plan.cluster["workers"])
    summary = summarise(this.rows, plan.slo_of, workers=workers)
    targets = plan.slo.words + (", for every class" if len(summary.classes) > 1 else "")
    console.print(summary_table(summary, targets, progress.messages))
    run = columns(this.rows, plan.slo_of)
    times = (("TTFT", run.ttft_s), ("TPOT", run.tpot_s), ("ITL", run.gap_s), ("E2E", run.e2e_s))
    for name, values in times:
        known = values[~np.isnan(values)]
        if known.size:
            told = [f"p{one:g} {np.percentile(known, one) * 1000:.2f}" for one in plan.percentiles]
            console.print(f"{name} ms: " + ", ".join(told))
    if progress.held:
        console.print(f"{progress.held:,} requests had to wait for a place: --max-concurrency made the load less than planned")
    if plan.earlier is not None:
        console.print(comparison_table(compare_runs(plan.earlier, this, slos_of(plan.earlier.meta))))
