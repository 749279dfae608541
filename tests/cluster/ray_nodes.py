"""Nodes of a Ray cluster on this machine, started by `ray start` as an operator types it, and ended without `ray stop`."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from pdserve.cluster import processes, record

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
NODE = "TEST_RAY_NODE"
"""The variable by which workers of a node are found. They are nobody's children, and inherit the node's environment."""


class RayNode:
    """One `ray start`; what it prints is in `output`. Ports and folder of its own, so that several Rays share a machine."""

    def __init__(self, command: str, folder: Path, *, name: str, environment: dict[str, str], **flags: object) -> None:
        """command: as in a shell, variables first. flags: added to it, underscores for dashes."""
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in words[: words.index("ray")])
        arguments = words[words.index("ray") + 1 :]
        common = {"dashboard_agent_listen_port": 0, "node_ip_address": "127.0.0.1", "temp_dir": folder}
        common |= {"object_store_memory": 80 << 20, **flags}
        arguments += ["--block", *(f"--{flag.replace('_', '-')}={value}" for flag, value in common.items())]
        self.output = folder.parent / f"{name}.out"
        with self.output.open("wb") as file:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'cluster'}",
                    **environment,
                    **variables,
                    NODE: str(self.output),
                },
                start_new_session=True,
            )

    def wait_started(self) -> RayNode:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in self.output.read_text():
            assert self.child.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
        return self

    def processes(self) -> list[psutil.Process]:
        """Those of Ray, which may write over their environment, and workers."""
        found = processes.descendants(self.child.pid)
        for marked in record.carrying(NODE, str(self.output)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(marked.pid))
        return list(dict.fromkeys(found))

    def actors(self) -> list[str]:
        """Command lines of the actors that it runs."""
        return [line for line in map(processes.command, self.processes()) if line.startswith("ray::WorkerActor")]

    def close(self) -> None:
        """Only what it started itself: other Rays of this machine are not ours."""
        started = self.processes()
        self.child.terminate()
        try:
            self.child.wait(60.0)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()
        processes.kill(processes.wait_gone(started, 10.0))


def free_ports(count: int) -> list[int]:
    """Different ones: all are held while they are asked for."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]
