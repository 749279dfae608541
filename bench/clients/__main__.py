"""`python -m bench.clients`: run public clients against a live cluster, and read whether a request failed.

    python -m bench.clients [NAME ...] [--model default]

One prefill and one decode worker serve. Each client is installed into its own environment in the cache folder and runs, and
its own report is read. Frameworks for agents run their quick starts and loops against a model that calls tools reliably. The
exit status is 1 when a request failed, an answer was wrong, or a client could not be installed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.clients import checks, load
from bench.clients.client import Client, ClientFailed, Found, Server
from bench.clients.speaker import speaking_server
from bench.engine.peers.install import RECIPES, NotInstalled
from pdserve.checkpoint.resolve import resolve
from pdserve.commands.console import make_console
from pdserve.config import MIB, EngineConfig
from testkit.processes import ProcessCluster

CLIENTS: Final = (
    Client("openai", "openai", checks.openai),
    Client("lm-eval", "lm-eval", checks.lm_eval),
    Client("grpcurl", "grpcurl", checks.grpcurl),
    Client("smg", "smg", checks.smg, "smg"),
    Client("aiperf", "aiperf", load.aiperf),
    Client("vllm bench serve", "vllm", load.vllm),
    Client("guidellm", "guidellm", load.guidellm),
    Client("locust", "locust", load.locust),
    *(
        Client(name, "agents", partial(checks.agents, name.removesuffix(" agents")), package, speaks=True)
        for name, package in (
            ("openai agents", "openai"),
            ("langchain", "langchain"),
            ("litellm", "litellm"),
            ("instructor", "instructor"),
            ("pydantic-ai", "pydantic-ai-slim"),
            ("openai-agents", "openai-agents"),
            ("llama-index", "llama-index-llms-openai-like"),
            ("haystack", "haystack-ai"),
            ("smolagents", "smolagents"),
            ("llm", "llm"),
        )
    ),
)
DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
PAGE: Final = """# Public clients that were run

`make bench-clients` writes this page: the last run of each client, with its packages. None was changed but for the address of
the server. Frameworks for agents run against a stand-in for a model that calls tools reliably; the router, its parsers and its
grammars are real. [The API](api.md) says what the other clients check.

| client | packages | date | no request failed | checked, or why it failed |
|---|---|---|---|---|
"""


def run(client: Client, server: Server, console: Console) -> tuple[Found | None, str]:
    """Run one client. Return its findings, or None and the reason."""
    try:
        python = client.python(console.print)
        with tempfile.TemporaryDirectory() as folder:
            return client.run(python, server, Path(folder)), ""
    except (NotInstalled, ClientFailed, OSError, ValueError, KeyError, TypeError) as exc:
        return None, f"{type(exc).__name__}: {exc}"


def packages(client: Client) -> str:
    """Return the packages of a client with their versions."""
    recipe = RECIPES[client.environment]
    if client.package:
        return next(one for one in recipe.packages if re.split(r"[\[=]", one)[0] == client.package)
    return ", ".join(one for one in (*recipe.packages, recipe.alone or "") if one and not one.startswith("torch"))


def write(results: Sequence[dict[str, Any]], docs: Path = DOCS) -> None:
    """Write the results in place of earlier results of the same clients."""
    path = docs / "results" / "clients.json"
    earlier = json.loads(path.read_text()) if path.exists() else []
    known = {one["client"]: one for one in (*earlier, *results)}
    path.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    rows = [
        f"| {one['client']} | {one['packages']} | {one['date']} | {'yes' if one['clean'] else 'no'} | {one['checked']} |\n"
        for one in known.values()
    ]
    (docs / "clients.md").write_text(PAGE + "".join(rows))


@contextmanager
def _served(model: str) -> Iterator[Server]:
    """A cluster that serves a real model. It leaves no process behind."""
    engine = EngineConfig(model=model, served_model_name="model", kv_cache_memory=512 * MIB, threads=1)
    with ProcessCluster(engine, prefill=1, decode=1) as cluster:
        yield Server(f"http://{cluster.http}", cluster.grpc, "model", resolve(model))
        cluster.assert_empty()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the clients, print the table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.clients", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(one.name for one in CLIENTS)}; all if none")
    parser.add_argument("--model", default="default")
    args = parser.parse_args(arguments)
    if unknown := {*args.names} - {one.name for one in CLIENTS}:
        parser.error(f"{', '.join(sorted(unknown))}: no such client")
    console = make_console()
    chosen = [one for one in CLIENTS if not args.names or one.name in args.names]
    table = Table("client", "packages", "requests", "failed", "seconds", "checked, or why it failed")
    results = []
    for speaks in (False, True):
        if not (taken := [one for one in chosen if one.speaks == speaks]):
            continue
        with speaking_server() if speaks else _served(args.model) as server:
            for client in taken:
                console.print(client.name)
                began_s = time.monotonic()
                found, why = run(client, server, console)
                seconds = time.monotonic() - began_s
                counts = ("-", "-") if found is None else (str(found.requests), str(found.failed))
                said = why if found is None else found.checked
                table.add_row(client.name, packages(client), *counts, f"{seconds:.0f}", said)
                clean = found is not None and not found.failed and found.requests > 0
                requests, failed = (0, 0) if found is None else (found.requests, found.failed)
                result = {
                    "client": client.name,
                    "packages": packages(client),
                    "clean": clean,
                    "requests": requests,
                    "failed": failed,
                    "date": date.today().isoformat(),
                }
                results.append({**result, "checked": said})
    console.print(table)
    write(results)
    return 0 if all(one["clean"] for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
