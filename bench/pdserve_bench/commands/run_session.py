"""One run of the load generator, from checked flags to tables and files."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import math
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import msgspec
import numpy as np
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console
from rich.live import Live as LiveArea
from rich.text import Text

from pdserve.client import CALL_TIMEOUT_S, OPTIONS, InferenceClient
from pdserve.commands.console import make_console
from pdserve.commands.requests import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.text.tokenizer import Tokenizer
from pdserve_bench.layout import Slo
from pdserve_bench.load.generator import Encode, raised_priority, run_load
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.http_target import BaseUrl, HttpOptions, HttpTarget, ServerInfo, ask_server
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.load.target import RequestOptions, Target
from pdserve_bench.load.watch import Live, LiveFigures, RunProgress, refusal
from pdserve_bench.report.compare import compare_runs
from pdserve_bench.report.files import Run, RunFileError, read_run, write_run
from pdserve_bench.report.meta import cluster_meta, collect_meta, slos_of
from pdserve_bench.report.summary import columns, summarise
from pdserve_bench.report.table import comparison_table, summary_table
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.request import Arrivals, BenchRequest, PromptPart
from pdserve_bench.workload.spec import SessionSource, TextSource, read_spec
from pdserve_bench.workload.workload import Workload, load_workload

T = TypeVar("T")

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
    tokenizer = open_tokenizer(flags["tokenizer"])
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


def open_tokenizer(name: str | None) -> Tokenizer | None:
    """Load the tokenizer of a checkpoint by its name. None: none was named."""
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
            work = run_load(requests, target, limits, watch, encode=encoder(plan.tokenizer), progress=progress)
            return (await until_interrupted(work))[1]
    finally:
        await target.close()


async def until_interrupted(work: Coroutine[Any, Any, T]) -> tuple[T | None, int]:
    """Await the work. Return its result and 0, or None and the signal that has ended it."""
    task, loop = asyncio.create_task(work), asyncio.get_running_loop()
    got: list[int] = []

    def stop(number: int) -> None:
        got.append(number)
        task.cancel()

    for one in STOPS:
        loop.add_signal_handler(one, stop, one)
    try:
        return await task, 0
    except asyncio.CancelledError:
        if not task.cancelled():
            task.cancel()
            raise
        return None, got[0] if got else int(signal.SIGINT)
    finally:
        for one in STOPS:
            loop.remove_signal_handler(one)


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


def encoder(tokenizer: Tokenizer | None) -> Encode | None:
    """Return the function that makes token ids of an answer's text. None: there is no tokenizer."""
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


# The flags of `pdserve bench run`, checked, and what follows from them. The names are those of `vllm bench serve`.


DEFAULT_PROMPTS: Final = 1000
DEFAULT_INPUT_LEN: Final = 1024
DEFAULT_OUTPUT_LEN: Final = 128
_SLO_FIELDS: Final = {"ttft": "ttft_s", "tpot": "tpot_s"}
MAX_PERCENTILES: Final = 20


def slo_of_flags(values: Sequence[str]) -> Slo:
    """Read `--goodput`, in vLLM's form: `ttft:1000 tpot:50`, in milliseconds. Without it, the default targets count, both of
    them. Raises `ConfigError`."""
    if not values:
        return Slo()
    targets: dict[str, float | None] = {"ttft_s": None, "tpot_s": None}
    for value in " ".join(values).split():
        name, _, number = value.partition(":")
        if name not in _SLO_FIELDS:
            raise ConfigError(f"--goodput: {value!r} is not of the form ttft:MS or tpot:MS")
        try:
            ms = float(number)
        except ValueError:
            ms = math.nan
        if not 0 < ms < math.inf:
            raise ConfigError(f"--goodput: {value!r} needs a number of milliseconds above 0")
        targets[_SLO_FIELDS[name]] = ms / 1000
    return Slo(**targets)


def metadata_of_flags(values: Sequence[str]) -> dict[str, str]:
    """Read `--metadata`: `KEY=VALUE`. Raises `ConfigError`."""
    found: dict[str, str] = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not key or not equals:
            raise ConfigError(f"--metadata: {value!r} is not of the form KEY=VALUE")
        if key in found:
            raise ConfigError(f"--metadata: {key!r} is given twice")
        found[key] = rest
    return found


def percentiles_of_flag(value: str) -> list[float]:
    """Read `--percentiles`: numbers from 0 to 100 with commas between. Raises `ConfigError`."""
    try:
        numbers = [float(one) for one in value.split(",")]
    except ValueError:
        numbers = [math.nan]
    if len(numbers) > MAX_PERCENTILES or not all(0 <= one <= 100 for one in numbers):
        raise ConfigError(f"--percentiles: {value!r} is not a list of at most {MAX_PERCENTILES} numbers from 0 to 100")
    return numbers


def workload_text(workload: str | None, input_len: int | None, output_len: int | None) -> str:
    """Return the workload that the flags name. Raises `ConfigError` when two flags name different ones."""
    if workload is None:
        lengths = (
            DEFAULT_INPUT_LEN if input_len is None else input_len,
            DEFAULT_OUTPUT_LEN if output_len is None else output_len,
        )
        return "random:{}/{}".format(*lengths)
    for flag, value in (("--random-input-len", input_len), ("--random-output-len", output_len)):
        if value is not None:
            raise ConfigError(f"{flag}: --workload {workload} has lengths of its own; leave one of the two flags out")
    return workload


def arrivals_of_flags(
    own: Arrivals, rate: float | None, burstiness: float | None, trace: bool, max_concurrency: int | None
) -> Arrivals:
    """Return the arrivals of a run: those of the workload, changed by flags. Raises `ConfigError`.

    rate: requests a second; infinite sends all at once, or as fast as `max_concurrency` allows. None: the workload's own, or
    else infinite, as in vLLM.
    """
    if trace:
        if burstiness is not None:
            raise ConfigError("--burstiness: recorded times have their own; leave --trace-timestamps or --burstiness out")
        return Arrivals(kind="trace", rate_per_s=None if rate is None or rate == math.inf else rate)
    if rate is not None and not rate > 0:
        raise ConfigError(f"--request-rate: {rate:g} is not above 0")
    if rate is None and (own.rate_per_s is not None or own.kind in ("trace", "inf", "closed")):
        chosen = own
    elif rate is None or rate == math.inf:
        chosen = Arrivals(kind="inf" if max_concurrency is None else "closed")
    elif own.kind in ("inf", "closed"):
        chosen = Arrivals(kind="poisson", rate_per_s=rate)
    else:
        chosen = own.with_rate(rate)
    if burstiness is None:
        return chosen
    if chosen.kind not in ("poisson", "gamma"):
        raise ConfigError(f"--burstiness: arrivals of kind {chosen.kind} have none; set a finite --request-rate")
    return msgspec.structs.replace(chosen, kind="gamma" if burstiness != 1 else "poisson", burstiness=burstiness)


def limits_of_flags(
    num_prompts: int | None,
    duration_s: float | None,
    max_concurrency: int | None,
    warmup_requests: int,
    warmup_s: float,
    request_timeout_s: float,
) -> RunLimits:
    """Return the limits of a run. A run without any end has `DEFAULT_PROMPTS` requests, as in vLLM. Raises `ConfigError`."""
    count = DEFAULT_PROMPTS if num_prompts is None and duration_s is None else num_prompts
    return RunLimits(duration_s, count, max_concurrency, warmup_requests, warmup_s, request_timeout_s)


# The view of a run of the load generator: two lines on a terminal, drawn four times a second. A file gets none.


INTERVAL_S: Final = 0.25


@asynccontextmanager
async def live_line(console: Console, figures: LiveFigures, progress: RunProgress) -> AsyncIterator[None]:
    """Draw the figures inside `async with`, on the event loop itself: a thread would take turns with it at any moment."""
    if not console.is_terminal:
        yield
        return
    with LiveArea(console=console, auto_refresh=False, transient=True) as area:
        task = asyncio.create_task(_draw(area, figures, progress))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _draw(area: LiveArea, figures: LiveFigures, progress: RunProgress) -> None:
    while True:
        area.update(Text(line(figures.of(progress))), refresh=True)
        await asyncio.sleep(INTERVAL_S)


def line(live: Live) -> str:
    """Write the figures as two lines."""
    eta = "" if live.eta_s is None else f", {live.eta_s:.0f} s left"
    return (
        f"{live.elapsed_s:.0f} s{eta}: {live.sent:,} sent, {live.running:,} running, {live.done:,} done, "
        f"{live.failed:,} failed\n"
        f"{live.requests_per_s:.2f} req/s, {live.tokens_per_s:,.0f} tok/s, TTFT p50 {_ms(live.ttft_p50_s)} "
        f"p99 {_ms(live.ttft_p99_s)}, ITL p99 {_ms(live.itl_p99_s)}, goodput {live.goodput_per_s:.2f}/s, "
        f"send lag p99 {_ms(live.lag_p99_s)}"
    )


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1000:.1f} ms"


# The checks of `pdserve bench run` before its first request: a run of an hour must not fail at its end.


MOST_OF_MEMORY: Final = 0.5
"""The share of the machine's memory that the rows of a run may take. Writing them takes about as much again."""
ROW_BYTES: Final = 2_000
ARRIVAL_BYTES: Final = 96
"""The memory of one message with tokens: a pair, its time and its place in the row."""


def ask_router(address: str) -> tuple[int, int]:
    """Return the size of the vocabulary and the longest context of the model that is served.

    Raises `CallFailed`, and `Unavailable` when the router says that it cannot serve.
    """
    with InferenceClient(address) as client:
        model = client.model_info()
    if not _is_ready(address):
        raise Unavailable(
            f"the router at {address} is not ready: it has no worker for each step of a request. Start workers, or wait; "
            "`pdserve status` shows which ones it has"
        )
    return model.vocab_size, model.max_model_len


def _is_ready(address: str) -> bool:
    """Ask the router's health service. A router without one counts as ready."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return True
    return bool(answer.status != health_pb2.HealthCheckResponse.NOT_SERVING)


def check_text(flags: Mapping[str, Any]) -> None:
    """Refuse texts that no file of a run can hold. Raises `ConfigError` that names the flag."""
    for name, value in flags.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is not UTF-8 text")


def check_files(flags: Mapping[str, Any]) -> None:
    """Check that the files of the run can be written. Raises `ConfigError` that names the flag."""
    result, parquet = flags["result_file"], flags["parquet"]
    if parquet is not None and parquet.suffix != ".parquet":
        raise ConfigError(f"--parquet: the name {parquet.name} does not end with .parquet; choose one that does")
    if result is not None and parquet is not None and result.resolve() == parquet.resolve():
        raise ConfigError(f"--parquet: {parquet} is the file of --result-file; choose two files")
    for flag, path in (("--result-file", result), ("--parquet", parquet)):
        if path is not None:
            _check_file(flag, path)


def _check_file(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a folder; name a file in it")
    try:
        with tempfile.NamedTemporaryFile(prefix=".pdserve-", dir=path.parent) as file:
            file.write(bytes(4096))
    except OSError as exc:
        raise ConfigError(f"{flag}: the folder {path.parent} cannot be written: {exc.strerror or exc}") from exc


def check_memory(limits: RunLimits, mean_output_tokens: float) -> None:
    """Refuse a number of requests whose rows do not fit into the memory. Raises `ConfigError`.

    A run that also has a duration is not refused, since the duration most likely ends it.
    """
    if limits.num_requests is None or limits.duration_s is not None:
        return
    row_bytes = ROW_BYTES + ARRIVAL_BYTES * mean_output_tokens
    most_bytes = MOST_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limits.num_requests * row_bytes > most_bytes:
        raise ConfigError(
            f"--num-prompts: the rows of {limits.num_requests:,} requests take {limits.num_requests * row_bytes / 2**30:,.1f} "
            f"GiB, and at most {most_bytes / 2**30:,.1f} GiB are used; take at most {int(most_bytes / row_bytes):,}, or set "
            "--duration"
        )
