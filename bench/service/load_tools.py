"""Three load generators that measure one server by OpenAI's API: ours, vLLM's and AIPerf. Each runs in a session of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.engine.peers.install import environment

TURN_LIMIT_S: Final = 600.0
FIGURES: Final = ("TTFT", "TPOT", "E2E")
"""The times of a request that all tools report."""
VLLM_SERVE: Final = """
import argparse, sys
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
"""The script `vllm` itself fails in the CPU build."""


class TurnFailed(Exception):
    """A tool failed, or measured another load than it was given. The message has its last lines."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The task of every tool."""

    url: str
    model: str
    tokenizer: Path
    prompt_tokens: int
    output_tokens: int
    requests: int
    concurrency: int
    seed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one turn. Lists have one value for each request."""

    ttft_s: list[float]
    tpot_s: list[float]
    e2e_s: list[float]
    requests_per_s: float
    output_tokens_per_s: float

    @property
    def means_s(self) -> dict[str, float]:
        """The mean of each figure over the requests."""
        return dict(zip(FIGURES, map(fmean, (self.ttft_s, self.tpot_s, self.e2e_s)), strict=True))


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator. `command` gets a turn and an empty folder; `read` gets that folder. `own_session`: it runs in a
    separate session, as in another terminal."""

    name: str
    command: Callable[[Turn, Path], list[str]]
    read: Callable[[Path], Measured]
    own_session: bool = True

    def measure(self, turn: Turn, folder: Path) -> Measured:
        """Run the tool once. Raises `TurnFailed`."""
        try:
            done = _run(self.command(turn, folder), folder, own_session=self.own_session)
        except subprocess.TimeoutExpired as exc:
            raise TurnFailed(f"{self.name} took more than {TURN_LIMIT_S:g} s") from exc
        if done.returncode != 0:
            raise TurnFailed(f"{self.name} ended with status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
        try:
            measured = self.read(folder)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
            raise TurnFailed(f"{self.name} left no result that can be read: {exc!r}; {done.stdout[-1000:]}") from exc
        if len(measured.ttft_s) != turn.requests:
            raise TurnFailed(f"{self.name} measured {len(measured.ttft_s)} requests and not {turn.requests}")
        return measured


def _run(command: Sequence[str], folder: Path, *, own_session: bool) -> subprocess.CompletedProcess[str]:
    """Run a tool, and end whatever it leaves behind.

    Linux may share the cores between sessions first (sched(7), "The autogroup feature"). A tool of several processes takes more
    cores from the server in the server's session than in a separate session.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        start_new_session=own_session,
        process_group=None if own_session else 0,
    ) as child:
        try:
            output, errors = child.communicate(timeout=TURN_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def tools(say: Callable[[str], None]) -> list[Tool]:
    """Return the three tools, installed. Raises `NotInstalled`."""
    vllm, aiperf = environment("vllm", say), environment("aiperf", say)
    return [
        Tool("pdserve bench run", _ours, _read_ours),
        Tool("vllm bench serve", lambda turn, folder: _vllm(str(vllm), turn, folder), read_vllm),
        Tool("aiperf profile", lambda turn, folder: _aiperf(str(aiperf.with_name("aiperf")), turn, folder), read_aiperf),
    ]


def _ours(turn: Turn, folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pdserve.cli", "bench", "run", "--base-url", turn.url, "--model", turn.model, "--allow-late"),
        *("--tokenizer", str(turn.tokenizer), "--random-input-len", str(turn.prompt_tokens)),
        *("--random-output-len", str(turn.output_tokens), "--num-prompts", str(turn.requests)),
        *("--max-concurrency", str(turn.concurrency), "--seed", str(turn.seed), "--result-file", str(folder / "run.json")),
    ]


def _read_ours(folder: Path) -> Measured:
    from pdserve_bench.layout import Slo
    from pdserve_bench.report.files import read_run
    from pdserve_bench.report.summary import summarise

    rows = read_run(folder / "run.json").rows
    figures = summarise(rows, lambda name: Slo(None, None))
    good = [row for row in rows if row.ok]
    return Measured(
        [row.ttft_s for row in good if row.ttft_s is not None],
        [row.tpot_s for row in good if row.tpot_s is not None],
        [row.e2e_s for row in good],
        figures.requests_per_s or 0.0,
        figures.output_tokens_per_s or 0.0,
    )


def _vllm(python: str, turn: Turn, folder: Path) -> list[str]:
    return [
        *(python, "-c", VLLM_SERVE, "--backend", "openai", "--base-url", turn.url, "--model", turn.model),
        *("--tokenizer", str(turn.tokenizer), "--dataset-name", "random", "--random-input-len", str(turn.prompt_tokens)),
        *("--random-output-len", str(turn.output_tokens), "--num-prompts", str(turn.requests), "--ignore-eos"),
        *("--max-concurrency", str(turn.concurrency), "--seed", str(turn.seed), "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "run.json"),
    ]


def read_vllm(folder: Path) -> Measured:
    """Read the result file of vLLM's tool. Its gaps between chunks add up to the time from the first token to the last
    token."""
    told = json.loads((folder / "run.json").read_text())
    ttft_s = [float(one) for one in told["ttfts"]]
    decode_s = [sum(one) for one in told["itls"]]
    tpot_s = [total / (count - 1) for total, count in zip(decode_s, told["output_lens"], strict=True) if count > 1]
    e2e_s = [first + rest for first, rest in zip(ttft_s, decode_s, strict=True)]
    if told["failed"]:
        raise ValueError(f"{told['failed']} requests failed")
    return Measured(ttft_s, tpot_s, e2e_s, float(told["request_throughput"]), float(told["output_throughput"]))


def _aiperf(program: str, turn: Turn, folder: Path) -> list[str]:
    return [
        *(program, "profile", "--model", turn.model, "--url", turn.url, "--endpoint-type", "completions", "--streaming"),
        *("--tokenizer", str(turn.tokenizer), "--concurrency", str(turn.concurrency), "--request-count", str(turn.requests)),
        *("--synthetic-input-tokens-mean", str(turn.prompt_tokens), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(turn.output_tokens), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count"),
        *("--random-seed", str(turn.seed), "--ui", "none", "--artifact-dir", str(folder / "out")),
        *("--goodput", "time_to_first_token:100 inter_token_latency:50"),
    ]


def read_aiperf(folder: Path) -> Measured:
    """Read the records of AIPerf, one for each request, and its rates."""
    out = folder / "out"
    whole = json.loads((out / "profile_export_aiperf.json").read_text())
    records = [json.loads(line)["metrics"] for line in (out / "profile_export.jsonl").read_text().splitlines()]
    return Measured(
        [_ms(one["time_to_first_token"]) for one in records],
        [_ms(one["inter_token_latency"]) for one in records],
        [_ms(one["request_latency"]) for one in records],
        float(whole["request_throughput"]["avg"]),
        float(whole["output_token_throughput"]["avg"]),
    )


def _ms(metric: dict[str, Any]) -> float:
    """Return a metric of AIPerf in seconds. AIPerf names the unit of each value."""
    scale = {"ms": 1e-3, "s": 1.0, "us": 1e-6, "ns": 1e-9}[metric["unit"]]
    return float(metric["value"]) * scale
