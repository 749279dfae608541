"""A workload: the same requests for the same seed, at any rate."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer
from pdserve_bench.workload.generated import RandomRequests, SessionRequests, TextRequests
from pdserve_bench.workload.jsonl import JsonlRequests, TraceRequests
from pdserve_bench.workload.request import Alphabet, Arrivals, BenchRequest, TokenMaker
from pdserve_bench.workload.spec import (
    AzureSource,
    Classes,
    JsonlSource,
    MooncakeSource,
    RandomSource,
    RequestSource,
    SessionSource,
    TextSource,
    WorkloadSpec,
    read_spec,
)
from pdserve_bench.workload.traces import read_azure, read_mooncake

MOST_SEED: Final = (1 << 63) - 1


class Workload:
    """A checked workload whose files were read."""

    def __init__(self, spec: WorkloadSpec, tokenizer: Tokenizer | None) -> None:
        """Read the files of the workload. Raises `ConfigError` that names the field, or file, line and field."""
        self.spec = spec
        self._alphabet = Alphabet.of(tokenizer, spec.vocab_size)
        self._source = _source(spec, tokenizer, self._alphabet)
        self.notes = self._source.notes
        """Sentences for the report: what was scaled, cut or left out, and how many requests that concerns."""
        self.mean_prompt_tokens = self._source.means.prompt_tokens
        self.mean_output_tokens = self._source.means.output_tokens
        self._scale(spec.arrivals)

    @property
    def fingerprint(self) -> str:
        """A SHA-256 of the description without rate and file name, and of the file: equal for two runs of the same workload."""
        plain = self.spec.to_dict()
        plain.get("arrivals", {}).pop("rate_per_s", None)
        plain["source"].pop("file", None)
        canonical = msgspec.json.encode([plain, self._source.digest], order="deterministic")
        return hashlib.sha256(canonical).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return the description as results hold it, with its `fingerprint`."""
        return {**self.spec.to_dict(), "fingerprint": self.fingerprint}

    def requests(self, arrivals: Arrivals, seed: int, run: int = 0) -> Iterator[BenchRequest]:
        """Return the requests, lazily; they are endless unless they come from a file that is not repeated.

        Requests without `after` come in the order of their times; the others stand somewhere after those that they wait for.
        Lengths, classes and gaps depend on `seed` alone. `run` changes only the random tokens and the pieces of a text: a
        cluster that served another run has none of these prompts in its prefix cache. Raises `ConfigError`.
        """
        if not 0 <= seed <= MOST_SEED:
            raise ConfigError(f"seed must be from 0 to {MOST_SEED}, got {seed}")
        means, scale = self._source.means, self._scale(arrivals)
        times_s = None if arrivals.kind == "trace" else arrivals.times_s(seed, means.start_share)
        return _timed(self._source.requests(TokenMaker(self._alphabet, seed, run), seed), times_s, scale)

    def _scale(self, arrivals: Arrivals) -> float:
        """Return the factor of recorded times. Raises `ConfigError` if they are wanted and there are none."""
        recorded_rate_per_s = self._source.means.recorded_rate_per_s
        if arrivals.kind != "trace":
            return 1.0
        if recorded_rate_per_s is None:
            raise ConfigError("arrivals.kind trace needs a source with times that differ: a trace, or lines with timestamp_s")
        return recorded_rate_per_s / (arrivals.rate_per_s or recorded_rate_per_s)


def load_workload(
    text: str, tokenizer: Tokenizer | None, *, max_model_len: int | None = None, overrides: Sequence[str] = ()
) -> Workload:
    """Read `--workload`: a YAML file, or a short form such as `random:1024/128`. Raises `ConfigError`.

    `max_model_len` bounds a workload that names no bound of its own. `overrides` are `NAME=VALUE` with dotted names.
    """
    return Workload(read_spec(text, overrides, max_model_len), tokenizer)


def _timed(requests: Iterator[BenchRequest], times_s: Iterator[float | None] | None, scale: float) -> Iterator[BenchRequest]:
    """Give each request that waits for no other one its time: a drawn one, or else the recorded one."""
    for request in requests:
        if request.after:
            yield request
        elif times_s is None:
            yield replace(request, send_at_s=(request.send_at_s or 0.0) * scale)
        else:
            yield replace(request, send_at_s=next(times_s))


def _source(spec: WorkloadSpec, tokenizer: Tokenizer | None, alphabet: Alphabet) -> RequestSource:
    """Read and check the source."""
    source, classes = spec.source, Classes(spec.mixes)
    match source:
        case RandomSource():
            return RandomRequests(source, classes)
        case TextSource():
            return TextRequests(source, classes, tokenizer)
        case SessionSource():
            return SessionRequests(source, classes)
        case JsonlSource():
            return JsonlRequests(source, classes, tokenizer, spec.max_model_len)
        case MooncakeSource() | AzureSource():
            read = read_mooncake if isinstance(source, MooncakeSource) else read_azure
            return TraceRequests(source, read(Path(source.file)), classes, spec.max_model_len, alphabet.head_tokens)
