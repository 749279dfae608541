"""The flags of `pdserve bench run`, checked, and what follows from them. The names are those of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve_bench.layout import Slo
from pdserve_bench.load.limits import RunLimits
from pdserve_bench.workload.arrivals import Arrivals

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
