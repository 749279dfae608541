"""The load of a server of vLLM, read from its page `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class EngineLoad(NamedTuple):
    """The load of a server. `kv_usage` is the share of its blocks that are in use, from 0 to 1. The counts are since its
    start."""

    waiting: int
    kv_usage: float
    prefix_queried: int
    prefix_hit: int
    tokens: int
    """A number that grows with each step: the tokens of its steps, and its prompt tokens and output tokens."""


def read_load(page: str) -> EngineLoad:
    """Read a page. Raises ValueError for one that lacks a number, or has one that cannot be."""
    totals: dict[str, float] = {}
    for name, _, value in _SAMPLE.findall(page):
        totals[name] = totals.get(name, 0.0) + float(value)
    usage = _number(totals, "vllm:kv_cache_usage_perc", 1.0)
    return EngineLoad(
        waiting=int(_number(totals, "vllm:num_requests_waiting")),
        kv_usage=usage,
        prefix_queried=int(_number(totals, "vllm:prefix_cache_queries_total", default=0.0)),
        prefix_hit=int(_number(totals, "vllm:prefix_cache_hits_total", default=0.0)),
        tokens=int(
            _number(totals, "vllm:iteration_tokens_total_sum", default=0.0)
            + _number(totals, "vllm:prompt_tokens_total", default=0.0)
            + _number(totals, "vllm:generation_tokens_total", default=0.0)
        ),
    )


def read_labels(page: str, name: str) -> dict[str, str]:
    """Return the labels of the first sample of this name. Raises KeyError when there is none."""
    for found, labels, _ in _SAMPLE.findall(page):
        if found == name:
            return dict(_LABEL.findall(labels))
    raise KeyError(name)


def _number(totals: Mapping[str, float], name: str, most: float = 1e18, default: float | None = None) -> float:
    value = totals.get(name, default)
    if value is None:
        raise ValueError(f"/metrics lacks {name}")
    if not 0.0 <= value <= most:
        raise ValueError(f"/metrics says {name} {value!r:.40}, which must be from 0 to {most:g}")
    return value
