"""The command `python -m pdserve.worker.vllm.follower`: a further node of a server of vLLM whose worker is on another machine.

It becomes vLLM's own process, `vllm serve --headless`, with the flags and the environment that the worker gives to the first
node. So signals and the exit status are vLLM's. It is no worker: it has no link, and serves no HTTP.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Final

from pdserve.checkpoint.resolve import resolve
from pdserve.config import ClusterConfig, load
from pdserve.core.errors import ConfigError
from pdserve.worker.vllm.server import check_settings, environment_of, follower_command

SIDE_PORT: Final = 5600
"""The default port of vLLM for the readers of KV. Nobody listens there on a further node: the first one speaks for all."""


def prepared(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of vLLM's process. Raises `ConfigError` that names the flag or the setting."""
    parser = argparse.ArgumentParser(
        prog="python -m pdserve.worker.vllm.follower", description="Run a further node of a server."
    )
    parser.add_argument("--config", required=True, help="the YAML that `pdserve up` takes, with engine.vllm.nodes")
    parser.add_argument("--role", required=True, choices=("prefill", "decode"), help="the role of the worker")
    parser.add_argument("--node-rank", required=True, type=int, help="1 to engine.vllm.nodes - 1; the worker's node has 0")
    parser.add_argument("--first", required=True, help="the address of the worker's node")
    parser.add_argument("--host", required=True, help="the address of this node, which the other nodes reach")
    args = parser.parse_args(arguments)
    config = load(ClusterConfig, args.config)
    pool = config.prefill if args.role == "prefill" else config.decode
    engine = config.engine_for(pool)
    if engine.backend != "vllm" or not 1 <= args.node_rank < engine.vllm.nodes:
        raise ConfigError(
            f"--node-rank {args.node_rank}: {args.role}.engine.vllm.nodes is {engine.vllm.nodes} and the backend is "
            f"{engine.backend}; with the backend vllm, ranks are 1 to engine.vllm.nodes - 1"
        )
    if pool.num_gpus:
        engine = dataclasses.replace(engine, device="cuda")  # as its worker's
    check_settings(engine)
    directory = resolve(engine.model, load_format=engine.load_format)
    command = follower_command(engine, args.role, directory, args.node_rank, args.first)
    return command, environment_of(engine, args.host, (args.host, SIDE_PORT), public=True)


def main() -> int:
    """Become the process of vLLM. Return 2 when the settings are wrong, or the program is not there."""
    try:
        command, environment = prepared(sys.argv[1:])
        os.execvpe(command[0], command, environment)
    except ConfigError as exc:
        print(exc.message, file=sys.stderr)
    except OSError as exc:
        print(f"engine.vllm.command: {command[0]} cannot be started: {exc.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
