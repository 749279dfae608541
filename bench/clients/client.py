"""One public client: the way to run it, and the way to read its own report."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.engine.peers.install import environment

RUN_LIMIT_S: Final = 600.0
LAST_CHARS: Final = 600  # of the output of a client that failed


class ClientFailed(Exception):
    """A client ended with an error, or left no report that can be read. The message has its last lines."""


@dataclass(frozen=True, slots=True)
class Server:
    """The addresses of the cluster, the name of its model, and the folder of its tokenizer."""

    url: str
    grpc: str
    model: str
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class Found:
    """The counts that a client reports. `checked` says in words what was compared beside the count of failures."""

    requests: int
    failed: int
    checked: str


@dataclass(frozen=True, slots=True)
class Client:
    """A client. `run` gets the Python of its environment, the server and an empty folder, and may raise `ClientFailed`.
    `environment`: the name of its recipe. `package`: the name of the client among the packages there. `speaks`: it needs a
    model that calls tools reliably."""

    name: str
    environment: str
    run: Callable[[Path, Server, Path], Found]
    package: str = ""
    speaks: bool = False

    def python(self, say: Callable[[str], None]) -> Path:
        """Return the Python of its environment, installed now if it is not there. Raises `NotInstalled`."""
        return environment(self.environment, say)


def output_of(command: list[str], folder: Path, *, status: int = 0, env: dict[str, str] | None = None) -> str:
    """Run a command of a client and return its standard output. Raises `ClientFailed` for another status or no end."""
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, errors="replace", timeout=RUN_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ClientFailed(f"it took more than {RUN_LIMIT_S:g} s") from exc
    if done.returncode != status:
        raise ClientFailed(f"it ended with status {done.returncode}: {(done.stderr or done.stdout)[-LAST_CHARS:].strip()}")
    return done.stdout
