"""The figures of a run, and of two runs side by side, as tables for people to read. Nothing is printed here."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdserve_bench.load.target import MEANINGS
from pdserve_bench.report.compare import BETTER, WORSE, Compared, Comparison, Interval
from pdserve_bench.report.summary import STALL_S, Distribution, Summary

DASH = "-"
MAX_ERRORS = 20
"""The most reasons of failures that are shown: a hostile server may name one for each request."""
LOUD = (
    "workload",
    "workload_fingerprint",
    "configuration",
    "hardware",
    "commit",
    "pdserve",
    "cluster",
    "refused",
    "interrupted",
    "generator",
)
"""The beginnings of the meta's fields whose difference makes a comparison doubtful."""
_COLOURS = {BETTER: "green", WORSE: "red"}
_TIMES = {
    "TTFT": "ttft_s",
    "ITL": "itl_s",
    "TPOT": "tpot_s",
    "E2E": "e2e_s",
    "queue": "queue_s",
    "prefill": "prefill_s",
    "transfer": "transfer_s",
    "exposed transfer": "exposed_transfer_s",
    "send lag": "send_lag_s",
}


def summary_table(summary: Summary, targets: str = "", messages: Mapping[str, str] | None = None) -> RenderableType:
    """Draw the figures of a run: counts and rates, then times, then classes if there are several.

    targets: what goodput and attainment mean, in words. messages: one for each reason of failures, where there is one.
    """
    parts: list[RenderableType] = [_rates(summary, targets), _times(summary)]
    if len(summary.classes) > 1:
        parts.append(_classes(summary))
    if summary.errors:
        parts.append(_errors(summary.errors, messages or {}))
    return Group(*parts)


def comparison_table(comparison: Comparison) -> RenderableType:
    """Draw two runs side by side, after what differs between them."""
    made = _table("", ("figure", "unit"), ("A", "B", "B / A", "95 % interval"))
    made.add_column("B is")
    for one in comparison.figures:
        scale, unit = (1000.0, "ms") if one.unit == "s" else (1.0, one.unit)
        a, b = (_number(value, scale) for value in (one.a, one.b))
        made.add_row(one.name, unit, a, b, *_ratio(one), Text(one.verdict, _COLOURS.get(one.verdict, "")))
    return Group(*_warnings(comparison), made)


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    made = Table(title=title or None, title_justify="left", header_style="bold", pad_edge=False, box=box.SIMPLE_HEAD)
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", no_wrap=True)
    return made


def _rates(summary: Summary, targets: str) -> Table:
    made = _table("", ("figure",), ("value",))
    failed = summary.requests - summary.completed
    rows = {
        "requests": f"{summary.requests:,}, {failed:,} failed",
        "measured span": _unit(summary.span_s, "s"),
        "of it after the last sending": _unit(summary.drain_s, "s"),
        "request throughput": _unit(summary.requests_per_s, "1/s"),
        "prompt token throughput": _unit(summary.prompt_tokens_per_s, "1/s"),
        "output token throughput": _unit(summary.output_tokens_per_s, "1/s"),
        "goodput": _unit(summary.goodput_per_s, "1/s"),
        "goodput of a worker": _unit(summary.goodput_per_worker_s, "1/s"),
        "attainment": _share(summary.attainment),
        "targets of both": targets or DASH,
        f"gaps over {STALL_S * 1000:.0f} ms": _share(summary.stall_share),
        "disaggregated": _share(summary.disaggregated_share),
        "cached prompt tokens": _share(summary.cached_prompt_share),
        "KV moved": _unit(None if summary.kv_bytes is None else summary.kv_bytes / 2**20, "MiB"),
        "requests with more than one attempt": DASH if summary.replayed is None else f"{summary.replayed:,}",
        "cut off by the end of the run": f"{summary.cut:,}" if summary.cut else DASH,
    }
    for name, value in rows.items():
        if value != DASH:
            made.add_row(name, value)
    return made


def _times(summary: Summary) -> Table:
    made = _table("", ("ms",), ("mean", "p50", "p90", "p95", "p99", "max", "count"))
    for name, attribute in _TIMES.items():
        one: Distribution | None = getattr(summary, attribute)
        if one is not None:
            cells = (_number(value, 1000.0) for value in (one.mean, one.p50, one.p90, one.p95, one.p99, one.max))
            made.add_row(name, *cells, f"{one.count:,}")
    return made


def _classes(summary: Summary) -> Table:
    made = _table("", ("class",), ("requests", "failed", "attainment", "goodput 1/s", "TTFT p99 ms", "TPOT p99 ms"))
    for name, one in summary.classes.items():
        times = (_number(None if time is None else time.p99, 1000.0) for time in (one.ttft_s, one.tpot_s))
        counts = (f"{one.requests:,}", f"{one.requests - one.completed:,}")
        made.add_row(name or "(default)", *counts, _share(one.attainment), _number(one.goodput_per_s), *times)
    return made


def _errors(errors: Mapping[str, int], messages: Mapping[str, str]) -> Table:
    made = _table("", ("error",), ("requests",))
    made.add_column("first message", overflow="fold")
    shown = list(errors.items())[:MAX_ERRORS]
    for name, count in shown:
        made.add_row(Text(name), f"{count:,}", Text(messages.get(name) or MEANINGS.get(name, DASH)))
    if rest := sum(errors.values()) - sum(count for _, count in shown):
        made.add_row(f"{len(errors) - len(shown):,} other errors", f"{rest:,}", DASH)
    return made


def _ratio(one: Compared) -> tuple[str, str]:
    """Return the ratio and its interval; the difference where there is no ratio, such as against 0."""
    if one.ratio is None or one.difference is None:
        return DASH, DASH
    if not math.isnan(one.ratio.low):
        return f"{one.ratio.estimate:.3f}", _interval(one.ratio, 1.0, "")
    scale = 1000.0 if one.unit == "s" else 1.0
    return DASH, _interval(one.difference, scale, "+")


def _interval(interval: Interval, scale: float, sign: str) -> str:
    if math.isnan(interval.low):
        return "unknown"
    return f"{interval.low * scale:{sign}.3f} to {interval.high * scale:{sign}.3f}"


def _warnings(comparison: Comparison) -> list[Text]:
    """Say what differs between the runs; in yellow, if the comparison is doubtful for it."""
    said = []
    if not comparison.same_workload:
        said.append(Text("These runs had different workloads or do not say which: their ratios mean nothing.", "bold red"))
    for name, a, b in comparison.differences:
        loud = name.split(".")[0] in LOUD
        said.append(Text(f"{name}: A {_short(a)}, B {_short(b)}", "yellow" if loud else ""))
    return said


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: float | None, scale: float = 1.0) -> str:
    """Write a number with about four digits."""
    if value is None:
        return DASH
    value *= scale
    size = abs(value)
    return (
        f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"
    )


def _unit(value: float | None, unit: str) -> str:
    return DASH if value is None else f"{_number(value)} {unit}"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.2%}"
