"""The server of vLLM that a worker drives: the command that starts it, its process, and what it says of itself."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2

from kvtransfer.backends.exposure import NET_DEVICES, exposure_of
from kvtransfer.backends.nixl import prepare_environment
from pdserve.checkpoint.cache import default_cache_dir
from pdserve.checkpoint.progress import Progress
from pdserve.config import EngineConfig, WorkerConfig
from pdserve.core.errors import ConfigError, ReplicaLost
from pdserve.worker.vllm import guard
from pdserve.worker.vllm.kv_events import TOPIC
from pdserve.worker.vllm.metrics import read_labels

LOOPBACK: Final = "127.0.0.1"
GIB: Final = 1 << 30
LOWEST_PORT: Final = 15_000
_GIVEN_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The ports that the system gives to programs that name none."""
LOOK_S: Final = 0.2
ANSWER_S: Final = 5.0
"""The longest time for an answer to a question that needs no computation."""
NVIDIA: Final = Path("/dev/nvidiactl")
STOP_S: Final = 5.0
KV_LEASE_S: Final = 30
"""vLLM keeps the KV of a prompt so long for a reader that does not come. It is vLLM's default; our lease ends before."""
OLDEST: Final = (0, 32)
"""The release of which the answers are known (docs/design/0086-what-a-vllm-pair-does.md)."""
OUR_FLAGS: Final = (
    "--headless", "--host", "--kv-events-config", "--kv-transfer-config", "--master-addr", "--master-port", "--model",
    "--nnodes", "--node-rank", "--port", "--served-model-name", "--uds",
)  # fmt: skip
"""The flags by which a worker finds its server, by which a server finds its pair, and its nodes each other."""
MODULE: Final = "vllm.entrypoints.openai.api_server"
CLI: Final = "vllm.entrypoints.cli.main"
"""The module of `vllm serve`, which alone has --headless."""
NODES_PORT: Final = 29501
"""The nodes of a server meet at this port of the first one. It is vLLM's default; each node's machine or pod has one server."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts that a server tells of itself. `root` is the model as its command named it. `num_blocks` counts the blocks of
    its KV pool, of `block_size` tokens each."""

    release: str
    root: str
    max_model_len: int
    block_size: int
    num_blocks: int
    cache_dtype: str
    prefix_caching: bool


class VllmServer:
    """One server, from its start to its end. `url` is its address. Where the settings name a server that runs already, this one
    is used, and never ended."""

    def __init__(self, config: WorkerConfig, role: str, directory: Path) -> None:
        """Start the server, or find it. `role` is "prefill" or "decode". Raises `ConfigError`."""
        self._popen: subprocess.Popen[bytes] | None = None
        self.url = config.engine.vllm.url
        self.events = ""
        """The address at which the server tells of its shared blocks. Empty: it does not."""
        self._held: list[socket.socket] = []
        if not self.url:
            command = _command(config.engine)
            self._held = _hold_ports(3)
            port, side_port, events_port = (each.getsockname()[1] for each in self._held)
            self.url = f"http://{LOOPBACK}:{port}"
            if config.engine.enable_prefix_caching:
                self.events = f"tcp://{LOOPBACK}:{events_port}"
            command += _flags(config.engine, role, directory, port) + _events_flags(self.events)
            command += _node_flags(config.engine, 0, config.advertise_host or config.host)
            self._side = config.advertise_host or config.host, side_port
            try:
                public = config.allow_public_bind
                environment = environment_of(config.engine, config.host, self._side, public=public)
                self._popen = _start(command, environment)
            except ConfigError:
                self._free_ports()
                raise

    @property
    def ours(self) -> bool:
        """True when this worker has started the server."""
        return self._popen is not None

    def check_running(self) -> None:
        """Raise `ReplicaLost` when the server has ended."""
        status = None if self._popen is None else self._popen.poll()
        if status is not None:
            raise ReplicaLost(f"the server of vLLM has ended with status {status}; the log of this worker has its last words")

    def wait_ready(self, timeout_s: float, progress: Progress) -> ServerFacts:
        """Wait until the server answers, and return what it says of itself. Raises `ConfigError` when it does not start or is
        not ready within `timeout_s`, and when it is no server that this release can drive."""
        began_s = time.monotonic()
        with httpx2.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False) as client:
            while not _is_healthy(client):
                waited_s = time.monotonic() - began_s
                try:
                    self.check_running()
                except ReplicaLost as exc:
                    raise ConfigError(f"engine.vllm: {exc.message}") from exc
                if waited_s > timeout_s:
                    raise ConfigError(
                        f"the server of vLLM at {self.url} was not ready within {timeout_s:.0f} s (start_timeout_s)"
                    )
                progress("starting vLLM", int(waited_s), 1)
                time.sleep(LOOK_S)
            self._check_lends()
            try:
                return _facts(client)
            except (httpx2.HTTPError, KeyError, ValueError, TypeError, IndexError) as exc:
                raise ConfigError(f"{self.url} does not answer as vLLM {OLDEST[0]}.{OLDEST[1]} does: {exc!r}") from exc

    def _check_lends(self) -> None:
        """Raise `ConfigError` unless our server listens for the readers of its KV. vLLM serves on where its port was taken."""
        if not self.ours:
            return
        host, port = self._side
        try:
            socket.create_connection((host, port), ANSWER_S).close()
        except OSError as exc:
            raise ConfigError(
                f"the server of vLLM at {self.url} does not listen for the readers of its KV at {host}:{port} ({exc}): the log "
                "of this worker says why; it is started again"
            ) from exc

    def stop(self) -> None:
        """End the server if it is ours. Idempotent."""
        if self._popen is None:
            return
        assert self._popen.stdin is not None
        self._popen.stdin.close()  # the guard ends the server, and then itself
        try:
            self._popen.wait(guard.TERM_S + STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._free_ports()

    def _free_ports(self) -> None:
        for each in self._held:
            each.close()


def _is_healthy(client: httpx2.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx2.HTTPError:
        return False


def _facts(client: httpx2.Client) -> ServerFacts:
    release = str(client.get("/version").raise_for_status().json()["version"])
    parts = tuple(int(part) for part in release.split("+")[0].split(".")[:2])
    if parts < OLDEST:
        raise ConfigError(f"vLLM {release} is older than {OLDEST[0]}.{OLDEST[1]}, the first release that pdserve drives")
    model = client.get("/v1/models").raise_for_status().json()["data"][0]
    cache = read_labels(client.get("/metrics").raise_for_status().text, "vllm:cache_config_info")
    return ServerFacts(
        release=release,
        root=str(model["root"]),
        max_model_len=int(model["max_model_len"]),
        block_size=int(cache["block_size"]),
        num_blocks=int(cache["num_gpu_blocks"]),
        cache_dtype=cache["cache_dtype"],
        prefix_caching=cache["enable_prefix_caching"] == "True",
    )


def _command(engine: EngineConfig) -> list[str]:
    """Return the command of the settings, or that of the environment which `make setup-vllm` made. Raises `ConfigError`."""
    if engine.vllm.command:
        return list(engine.vllm.command)
    python = default_cache_dir() / "vllm" / "bin" / "python"
    if not python.exists():
        raise ConfigError(
            f"there is no vLLM at {python.parent.parent}: run `make setup-vllm`, or name the command of your own in "
            f"engine.vllm.command, such as [/opt/vllm/bin/python, -m, {MODULE}]"
        )
    return [str(python), "-m", MODULE]


def _flags(engine: EngineConfig, role: str, directory: Path, port: int) -> list[str]:
    """Return the flags of a server for one worker of this role."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_S},
    }
    on_cpu = computes_on_cpu(engine)
    if on_cpu:
        transfer["kv_buffer_device"] = "cpu"
    flags: dict[str, str | int | float | None] = {
        "--model": str(directory),
        "--served-model-name": "served",
        "--host": LOOPBACK,
        "--port": port,
        "--dtype": "bfloat16" if engine.dtype == "auto" else engine.dtype,
        "--max-num-seqs": slots_of(engine),
        "--max-model-len": engine.max_model_len,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--block-size": engine.block_size if engine.block_size != EngineConfig().block_size else None,
        "--kv-cache-dtype": None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
        "--load-format": None if engine.load_format == "auto" else engine.load_format,
        "--gpu-memory-utilization": None if on_cpu else engine.gpu_memory_utilization,
        "--kv-cache-memory-bytes": None if on_cpu else engine.kv_cache_memory,
        "--tensor-parallel-size": engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None,
        "--pipeline-parallel-size": engine.pipeline_parallel_size if engine.pipeline_parallel_size > 1 else None,
        "--kv-transfer-config": json.dumps(transfer),
    }
    caching = "--enable-prefix-caching" if engine.enable_prefix_caching else "--no-enable-prefix-caching"
    experts = ["--enable-expert-parallel"] if engine.enable_expert_parallel else []
    eager = ["--enforce-eager"] if on_cpu else []  # compilation takes minutes there, and gains little (docs/engines.md)
    named = [text for name, value in flags.items() if value is not None for text in (name, str(value))]
    return [
        *named,
        caching,
        *experts,
        *eager,
        "--generation-config",
        "vllm",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
        *engine.vllm.args,
    ]


def _node_flags(engine: EngineConfig, rank: int, first: str) -> list[str]:
    """Return the flags by which the nodes of a server find each other. `first` is the address of the one with rank 0."""
    if engine.vllm.nodes == 1:
        return []
    return [
        *("--nnodes", str(engine.vllm.nodes)),
        *("--node-rank", str(rank)),
        *("--master-addr", first),
        *("--master-port", str(NODES_PORT)),
    ]


def follower_command(engine: EngineConfig, role: str, directory: Path, rank: int, first: str) -> list[str]:
    """Return the command that runs on each further node of a server whose worker is on another one.

    It has the flags of the first node, but serves no HTTP. rank: 1 to `vllm.nodes` - 1. first: the address of the worker's
    node.
    """
    command = _command(engine)
    if command[-1] == MODULE:
        command = [*command[:-1], CLI, "serve"]
    return [*command, "--headless", *_flags(engine, role, directory, 0), *_node_flags(engine, rank, first)]


def _events_flags(endpoint: str) -> list[str]:
    """Return the flags with which a server tells of its shared blocks. It connects to an address without a wildcard, and the
    worker listens there."""
    if not endpoint:
        return []
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": TOPIC.decode()}
    return ["--kv-events-config", json.dumps(events)]


def slots_of(engine: EngineConfig) -> int:
    """Return how many sequences a server may run at a time, in either role: it takes this limit only at its start.

    A server that runs already has a limit of its own, which may be small.
    """
    device = "cpu" if engine.vllm.url or computes_on_cpu(engine) else "cuda"
    return engine.largest_limits(device).max_num_seqs


def computes_on_cpu(engine: EngineConfig) -> bool:
    """Tell whether a server computes on the CPU: the settings say so, or there is no NVIDIA driver here."""
    return engine.device == "cpu" or (engine.device == "auto" and not NVIDIA.exists())


def environment_of(engine: EngineConfig, host: str, side: tuple[str, int], *, public: bool) -> dict[str, str]:
    """Return the environment of a server. It opens no port beyond loopback unless the settings of the worker do.

    host: the address of its machine. side: where it listens for the readers of its KV. public: `host` may be one that others
    reach.
    """
    exposure = exposure_of(host, allow_public=public)
    ours = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": side[0],
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side[1]),
        "VLLM_HOST_IP": host,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if exposure.devices is not None:
        ours[NET_DEVICES] = exposure.devices
    if computes_on_cpu(engine):
        threads = str(engine.threads or 1)
        ours |= {
            "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(engine.cpu_kv_bytes / GIB)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all servers of a machine take the same cores
            "OMP_NUM_THREADS": threads,
        }
    environment = {**os.environ, **ours}
    prepare_environment(environment, gpu=not computes_on_cpu(engine))
    return environment


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    guarded = [sys.executable, "-I", guard.__file__, *command]
    try:
        return subprocess.Popen(guarded, stdin=subprocess.PIPE, stdout=2, env=dict(environment))
    except OSError as exc:
        raise ConfigError(f"engine.vllm.command {command[0]!r} cannot be started: {exc.strerror}") from exc


def _hold_ports(count: int) -> list[socket.socket]:
    """Take ports that are free at every address: readers come to one that is not loopback. The sockets that are returned do not
    listen. While they are open, only a program that asks for these ports by number gets them: vLLM, which binds some of them
    a minute after its start, but no other worker. They lie below the ports that the system gives to programs that name none,
    because some programs share such ports."""
    try:
        first_given = int(_GIVEN_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_given = 32768  # the usual one
    candidates = range(LOWEST_PORT, max(first_given, LOWEST_PORT + 1000))
    held: list[socket.socket] = []
    for port in random.SystemRandom().sample(candidates, len(candidates)):
        each = socket.socket()
        try:
            each.bind(("", port))
        except OSError:
            each.close()
            continue
        # Only now: with it at the bind, two workers could hold the same port. vLLM and ZeroMQ set it when they bind.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.append(each)
        if len(held) == count:
            return held
    for each in held:
        each.close()
    raise ConfigError(f"no {count} ports from {candidates.start} to {candidates.stop - 1} are free")


def check_settings(engine: EngineConfig) -> None:
    """Raise `ConfigError` for a setting of pdserve's own engine that vLLM does not have in this form."""
    unknown: dict[str, Any] = {
        "quantization": engine.quantization,
        "model_family": engine.model_family,
        "batch_invariant": engine.batch_invariant,
        "peak_flops_per_s": engine.peak_flops_per_s,
        "peak_bytes_per_s": engine.peak_bytes_per_s,
        "kv_cache_dtype": engine.kv_cache_dtype if engine.kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3") else None,
    }
    for name, value in unknown.items():
        if value is not None:
            raise ConfigError(
                f"engine.{name} is a setting of pdserve's own engine: leave it out, or name vLLM's flag in engine.vllm.args"
            )
    for argument in engine.vllm.args:
        flag = argument.partition("=")[0].replace("_", "-")  # as vLLM reads it, which also takes the beginning of a name
        if flag.startswith("--data-parallel"):
            raise ConfigError(f"engine.vllm.args: {argument}: a worker drives one engine; start more workers instead")
        if engine.degrees.ranks > 1 and flag.startswith(("--tensor", "--pipeline", "-tp", "-pp")):
            raise ConfigError(f"engine.vllm.args: {argument}: {engine.gang}, as engine says already; leave one of the two out")
        if len(flag) > 2 and any(ours.startswith(flag) for ours in OUR_FLAGS):
            raise ConfigError(
                f"engine.vllm.args: {argument}: the worker chooses this itself; docs/engines.md names the settings"
            )
