"""Clients that put load on a server: AIPerf, vLLM's, guidellm and locust."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any, Final

from bench.clients.checks import SCRIPTS
from bench.clients.client import ClientFailed, Found, Server, output_of
from bench.service.load_tools import VLLM_SERVE

REQUESTS: Final = 24
_SYNTHETIC: Final = ("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--random-seed", "1")
_GOODPUT: Final = "time_to_first_token:1000 inter_token_latency:200"


def aiperf(python: Path, server: Server, folder: Path) -> Found:
    """Run a load with targets, and conversations of several turns."""
    same = [
        *(str(python.with_name("aiperf")), "profile", "--model", server.model, "--url", server.url, "--streaming"),
        *("--tokenizer", str(server.tokenizer), "--concurrency", "4", "--ui", "none", *_SYNTHETIC),
    ]
    single = [*same, "--endpoint-type", "completions", "--request-count", str(REQUESTS), "--goodput", _GOODPUT]
    turns = ["--conversation-num", "6", "--conversation-turn-mean", "3", "--conversation-turn-stddev", "0"]
    talks = [*same, "--endpoint-type", "chat", *turns]
    output_of([*single, "--artifact-dir", str(folder / "single")], folder)
    output_of([*talks, "--artifact-dir", str(folder / "talks")], folder)
    counts = [read_aiperf(folder / name) for name in ("single", "talks")]
    return Found(sum(done for done, _ in counts), sum(failed for _, failed in counts), "goodput; conversations of 3 turns")


def read_aiperf(folder: Path) -> tuple[int, int]:
    """Return the number of requests that AIPerf made, and how many failed."""
    told = json.loads((folder / "profile_export_aiperf.json").read_text())
    failed = int((told.get("error_request_count") or {}).get("avg", 0))
    return int(told["request_count"]["avg"]) + failed, failed


def vllm(python: Path, server: Server, folder: Path) -> Found:
    """Run `vllm bench serve`."""
    command = [
        *(str(python), "-c", VLLM_SERVE, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", server.url, "--model", server.model, "--tokenizer", str(server.tokenizer), "--dataset-name", "random"),
        *("--random-input-len", "64", "--random-output-len", "16", "--num-prompts", str(REQUESTS), "--max-concurrency", "4"),
        *("--disable-tqdm", "--save-result", "--result-dir", str(folder), "--result-filename", "run.json"),
    ]
    output_of(command, folder)
    told = json.loads((folder / "run.json").read_text())
    return Found(told["completed"] + told["failed"], told["failed"], "chats, closed loop")


def guidellm(python: Path, server: Server, folder: Path) -> Found:
    """Run four streams of guidellm."""
    command = [
        *(str(python.with_name("guidellm")), "run", "--backend", f"kind=openai_http,target={server.url},model={server.model}"),
        *("--tokenizer", f"kind=hf_auto,model={server.tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16", "--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={folder / 'run.json'}"),
        "--disable-console",
    ]
    output_of(command, folder, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"})
    return read_guidellm(json.loads((folder / "run.json").read_text()))


def read_guidellm(told: dict[str, Any]) -> Found:
    """Read the totals of guidellm's report, over its benchmarks."""
    totals = [one["metrics"]["request_totals"] for one in told["benchmarks"]]
    failed = sum(int(one["errored"]) for one in totals)
    return Found(sum(int(one["successful"]) for one in totals) + failed, failed, "4 streams")


def locust(python: Path, server: Server, folder: Path) -> Found:
    """Let eight users of locust stream chats for ten seconds."""
    command = [
        *(str(python.with_name("locust")), "--headless", "--locustfile", str(SCRIPTS / "locustfile.py"), "--host", server.url),
        *("--users", "8", "--spawn-rate", "8", "--run-time", "10s", "--csv", str(folder / "run"), "--only-summary"),
    ]
    output_of(command, folder, env={**os.environ, "MODEL": server.model})
    with (folder / "run_stats.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["Name"] == "Aggregated"]
    if len(rows) != 1:
        raise ClientFailed("its file of figures has no line of totals")
    return Found(int(rows[0]["Request Count"]), int(rows[0]["Failure Count"]), "8 users, streamed chats")
