"""A cluster of `pdserve up` whose parts can be killed, by its public commands and ports alone. `close` leaves no process of it.

Workers reach the router through a relay of this process, on another address of the same machine (`router.advertise_host`), so
that links can be cut without privileges.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from pdserve.client import AdminClient, CallFailed

START_S: Final = 120.0
STOP_S: Final = 30.0
POLL_S: Final = 0.1
LOOK_S: Final = 2.0
RELAY_HOST: Final = "127.0.0.2"
ROOT: Final = Path(__file__).resolve().parents[2]
MARK: Final = "PDSERVE_BENCH_DEATHS"
"""A variable that all processes of the cluster inherit. It identifies the processes that `pdserve up` has left."""


class Relay:
    """A relay of TCP connections from `RELAY_HOST` to the same port of the loopback address."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._serve, RELAY_HOST, self._port)

    def cut(self) -> int:
        """Break all connections at once, without a goodbye. Return how many there were."""
        for writer in list(self._writers):
            writer.transport.abort()
        return len(self._writers) // 2

    async def close(self) -> None:
        """Stop listening, and break what is left."""
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, onward}
        try:
            _, rest = await asyncio.wait(
                [asyncio.create_task(_copy(reader, onward)), asyncio.create_task(_copy(there, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in rest:
                task.cancel()
        finally:
            for each in (writer, onward):
                each.transport.abort()
            self._writers -= {writer, onward}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


class DyingCluster:
    """One cluster with its own ports. `up` starts it, also once more after its death, and `close` ends all remaining
    processes."""

    def __init__(
        self,
        prefill: int,
        decode: int,
        *,
        module: str = "pdserve.cli",
        settings: Sequence[str] = ("--model", "tiny", "--set", f"router.advertise_host={RELAY_HOST}"),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`module` has the command `up`; `settings` are flags beside sizes and ports, and `env` adds variables."""
        self.http, self.admin, self.grpc, self.link = [free_port() for _ in range(4)]
        self._module, self._settings, self._env = module, settings, env
        self._sizes = ("--prefill", str(prefill), "--decode", str(decode))
        self._workers = prefill + decode
        self._folder = tempfile.TemporaryDirectory(prefix="d", dir="/tmp")
        self._mark = f"{os.getpid()}-{self.http}"
        self._child: subprocess.Popen[bytes] | None = None
        self.relay = Relay(self.link)

    @property
    def address(self) -> str:
        """The address of HTTP."""
        return f"127.0.0.1:{self.http}"

    def start(self) -> None:
        """Run `pdserve up` on fixed ports, without waiting for it."""
        ports = zip(("http", "grpc", "admin", "link"), (self.http, self.grpc, self.admin, self.link), strict=True)
        flags = [part for name, port in ports for part in (f"--{name}-port", str(port))]
        with (Path(self._folder.name) / "up.out").open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, "-m", self._module, "up", *self._sizes, *flags, *self._settings],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._folder.name,
                env={**os.environ, **self._env, MARK: self._mark, "TMPDIR": self._folder.name, "PYTHONPATH": str(ROOT)},
            )

    async def ready(self, within_s: float = START_S) -> bool:
        """Wait until all workers serve. False: they did not in time, or `pdserve up` has ended."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            if len(await asyncio.to_thread(self._ready_workers)) >= self._workers:
                return True
            if self._child is None or self._child.poll() is not None:
                return False
            await asyncio.sleep(POLL_S)
        return False

    def said(self) -> str:
        """Return the end of what `pdserve up` has printed."""
        return " ".join((Path(self._folder.name) / "up.out").read_text(errors="replace").split())[-300:]

    def pids(self) -> dict[str, int]:
        """Return the process ids of the router and of the workers that are linked to it."""
        found = {name: pid for name, (pid, _) in self._workers_now().items()}
        router = self.router_pid()
        return found | ({"router": router} if router else {})

    def router_pid(self) -> int | None:
        """Return the process that is the router. None: there is none."""
        return next((one.pid for one in self._own() if _is_router(one)), None)

    def lives(self, pid: int) -> bool:
        """Tell whether a process of this cluster still runs. A router that does not answer cannot tell of its workers."""
        return any(one.pid == pid for one in self._own())

    def up_pid(self) -> int:
        """Return the process of `pdserve up`."""
        assert self._child is not None
        return self._child.pid

    def ray_head(self) -> int | None:
        """Return the process of Ray's control service. None: there is none."""
        return next((one.pid for one in self._own() if "gcs_server" in _name(one)), None)

    async def close(self) -> None:
        """End the cluster: by the signal, then by `pdserve down` if there is such a command, then by force."""
        await self.relay.close()
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, STOP_S)
        for one in self._own():
            with contextlib.suppress(psutil.Error):
                one.kill()
        if child is not None:
            await asyncio.to_thread(child.wait, STOP_S)
        self._folder.cleanup()

    def _own(self) -> Iterator[psutil.Process]:
        """Yield the living processes of this cluster, whatever their parent is now."""
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.status() != psutil.STATUS_ZOMBIE and one.environ().get(MARK) == self._mark:
                    yield one

    def _ready_workers(self) -> set[str]:
        return {name for name, (_, ready) in self._workers_now().items() if ready}

    def _workers_now(self) -> dict[str, tuple[int, bool]]:
        with AdminClient(f"127.0.0.1:{self.admin}") as client:
            try:
                state = client.cluster_state(LOOK_S)
            except CallFailed:
                return {}
            return {one.hello.worker_id: (one.hello.pid, one.ready) for one in state.workers}


def _is_router(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "pdserve: router" in " ".join(words[:1]) or bool(re.search(r"-m router\b|router[/.]main", " ".join(words)))
    return False


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()[:1])
    return ""


def free_port() -> int:
    """Return a port that is free on both addresses, below the ports that the kernel gives to outgoing connections."""
    for port in range(20_000 + os.getpid() % 8_000, 32_000):
        with contextlib.suppress(OSError):
            if port not in _TAKEN:
                for host in ("127.0.0.1", RELAY_HOST):
                    with socket.create_server((host, port)):
                        pass
                _TAKEN.add(port)
                return port
    raise RuntimeError("no port is free between 20,000 and 32,000")


_TAKEN: set[int] = set()
