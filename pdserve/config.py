"""Every setting of pdserve: frozen dataclasses, validated when made, read from YAML and overridden by `a.b=c`.

Modules get the part they need passed in; nothing else reads the environment or a global.
"""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

from pdserve.core.errors import ConfigError
from pdserve.core.hosts import is_loopback
from pdserve.core.labels import LabelSelector, check_key
from pdserve.core.sampling import Placement

MIB: Final = 1 << 20
CPU_BATCHED_TOKENS: Final = 512
CUDA_BATCHED_TOKENS: Final = 8192  # as vLLM's on GPUs of the Hopper class: a chunk of 512 leaves most of such a GPU idle
ADMIN_PORT: Final = 50053
CPU_KV_BYTES: Final = 256 * MIB  # unless kv_cache_memory says otherwise: 11,648 tokens of SmolLM2-135M in bfloat16
DTYPES: Final = ("auto", "bfloat16", "float32")
DEVICES: Final = ("auto", "cpu", "cuda")
QUANTIZATIONS: Final = ("int8", "int4")
KV_CACHE_DTYPES: Final = ("auto", "fp32", "bf16", "fp8_e4m3", "int8", "int4")
EXACT_KV_CACHE_DTYPES: Final = ("auto", "fp32", "bf16")  # the others are quantised
BEATS_TO_LOSE: Final = 3  # heartbeats that must be missing before a worker or a router counts as lost
_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SUCCESSORS: Final = {"max_restarts": "max_restarts_per_hour (it was a total over the worker's life)"}  # of settings removed
_BYTES: Final = {"unit": "bytes"}  # metadata of fields that also take a text such as 256MiB


def parse_bytes(text: str) -> int:
    """Bytes in `256MiB`, `1.5 GB` or `1048576`. Raises ValueError saying what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model and its engine; the same for both pools unless a pool overrides it. Names are vLLM's."""

    model: str = "default"  # "default", "tiny", a directory, a GGUF file, or a Hugging Face id
    served_model_name: str | None = None  # what clients call it; None: the model's own name
    dtype: str = "auto"  # auto: bfloat16
    quantization: str | None = (
        None  # int8: weights and what meets them, half the bytes and twice the rate; int4: weights, a third
    )
    device: str = "auto"  # auto: cuda where there is one, else cpu
    max_model_len: int | None = None  # prompt + output tokens of one request; None: the model's context
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None  # a step's token budget, in which longer prompts are cut; None: `batched_tokens`
    block_size: int = 16
    kv_cache_dtype: str = "auto"  # auto: as dtype; fp8_e4m3, int8, int4: 2, 2, 4 times the tokens of bf16, less quality
    kv_cache_memory: int | None = field(default=None, metadata=_BYTES)  # bytes a worker, as 256MiB; None: `cpu_kv_bytes` or
    gpu_memory_utilization: float = 0.9  # on a GPU: the worker's share of it; KV gets what weights and the largest step leave
    enable_prefix_caching: bool = True  # prompts that begin alike share KV, on prefill and on decode workers
    batch_invariant: bool | None = None  # a row's bits do not depend on its batch; None: where it is free, as in compiled steps
    step_timeout_s: float = 60.0  # an engine that makes no step for so long, while work waits, is stuck; more if steps are slow
    threads: int = 0  # of torch; 0: the machine's cores over the workers on it, at least 1

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.device not in DEVICES:
            raise ConfigError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(f"quantization must be one of {', '.join(QUANTIZATIONS)} or unset, got {self.quantization!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}")
        if self.batch_invariant and self.kv_cache_dtype not in EXACT_KV_CACHE_DTYPES:
            raise ConfigError(
                f"batch_invariant needs a kv_cache_dtype that is not quantised: how {self.kv_cache_dtype} rounds a block "
                "depends on how its tokens were cut into steps"
            )
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_batched_tokens is not None:
            _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("block_size", self.block_size, 1)
        if self.kv_cache_memory is not None:
            _at_least("kv_cache_memory", self.kv_cache_memory, 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be over 0 and at most 1, got {self.gpu_memory_utilization}")
        _at_least("threads", self.threads, 0)
        _positive("step_timeout_s", self.step_timeout_s)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)

    def batched_tokens(self, device: str) -> int:
        """A step's token budget on a device of this type, "cpu" or "cuda"."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return CUDA_BATCHED_TOKENS if device == "cuda" else CPU_BATCHED_TOKENS

    @property
    def cpu_kv_bytes(self) -> int:
        """The KV pool of a worker on a CPU."""
        return CPU_KV_BYTES if self.kv_cache_memory is None else self.kv_cache_memory

    @property
    def known_kv_bytes(self) -> int | None:
        """None: only the worker will know, which may have a GPU and measure."""
        return self.cpu_kv_bytes if self.device == "cpu" else self.kv_cache_memory


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Durations only, each on the local monotonic clock."""

    ttl_s: float = 30.0
    heartbeat_s: float = 1.0  # between renewals, which are also how a reader knows that the lender lives
    lost_s: float = 5.0  # a lender that answers none for so long is lost to its readers; as workers are to the router
    transfer_deadline_floor_s: float = 5.0  # plus 4 x bytes under way / bandwidth
    transfer_bandwidth_bytes_s: float = 1e8  # pessimistic: 1 GbE; a pair that is measured to be slower gets longer
    commit_timeout_s: float = 2.0
    commit_tries: int = 3
    stalled_s: float = 60.0  # a watermark that stands still for so long: renewing must not hold a lease for ever
    kv_checksum: bool = True  # KV is used only if it was read as it was written; the same on prefill and decode workers

    @property
    def renew_interval_s(self) -> float:
        return min(self.heartbeat_s, self.ttl_s / 6)  # five renewals may be lost before the lease is

    def __post_init__(self) -> None:
        for name in ("ttl_s", "heartbeat_s", "transfer_bandwidth_bytes_s", "commit_timeout_s", "stalled_s"):
            _positive(f"lease.{name}", getattr(self, name))
        _at_least("lease.transfer_deadline_floor_s", self.transfer_deadline_floor_s, 0)
        _at_least("lease.commit_tries", self.commit_tries, 1)
        for name in ("lost_s", "stalled_s"):  # one lost renewal must not be a lost lender, nor a prompt that stands still
            if not getattr(self, name) >= 2 * self.renew_interval_s:
                raise ConfigError(
                    f"lease.{name} must be at least {2 * self.renew_interval_s:g}, twice the pause between renewals, which is "
                    f"the smaller of lease.heartbeat_s ({self.heartbeat_s:g}) and lease.ttl_s / 6 ({self.ttl_s / 6:g}), "
                    f"got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"
    http_port: int = 8000  # 0: any free port
    grpc_port: int = 50051
    admin_host: str = "127.0.0.1"  # drains and the cluster's state; off loopback each call needs the cluster's token
    admin_port: int | None = None  # None: 50053, or any free one if grpc_port is 0
    link_host: str | None = None  # where workers dial in; None: `host`
    link_port: int = 0
    advertise_host: str | None = None  # what workers are told to dial; None: `link_host`
    placement: str = "auto"
    colocate_below_tokens: int = 0  # auto: prompts shorter than this are not disaggregated
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    default_deadline_s: float = 600.0
    max_deadline_s: float = 3600.0
    max_body_bytes: int = field(default=8 * MIB, metadata=_BYTES)
    max_inflight_body_bytes: int = field(default=64 * MIB, metadata=_BYTES)  # of all large HTTP bodies on their way
    max_connections: int = 1024  # of clients, on each of their ports; fewer where RLIMIT_NOFILE leaves fewer
    stalled_client_s: float = 30.0  # a client that takes nothing for so long is cancelled
    heartbeat_interval_s: float = 1.0  # of workers; `pdserve up` tells them
    heartbeat_lost_s: float = 5.0  # a worker that says nothing for so long is lost, and to a worker such a router
    probe_workers: bool = True  # a worker is ready only after KV went through it once, from or to a peer
    max_attempts: int = 4  # of one request, the first included
    retry_share: float = 0.1  # retries of all requests together: this share of those admitted,
    retry_burst: int = 10  # and so many more
    recovery_wait_s: float = 30.0  # how long a replay waits for a worker to come back before it is refused
    pair_aside_s: float = 5.0  # a pair that failed is not used for so long, doubled by each further failure
    pair_aside_max_s: float = 60.0
    allow_mixed_quantization: bool = False  # of weights among workers: then tokens depend on where a request runs

    def __post_init__(self) -> None:
        if self.placement not in [p.value for p in Placement]:
            raise ConfigError(f"router.placement must be auto, disaggregated or colocated, got {self.placement!r}")
        for name in ("http_port", "grpc_port", "link_port", "admin_port"):
            if not 0 <= (getattr(self, name) or 0) <= 65535:
                raise ConfigError(f"router.{name} must be from 0 to 65535, got {getattr(self, name)}")
        _at_least("router.colocate_below_tokens", self.colocate_below_tokens, 0)
        for name in ("max_queued_requests", "max_queued_tokens", "max_body_bytes"):
            _at_least(f"router.{name}", getattr(self, name), 1)
        for name in ("default_deadline_s", "stalled_client_s", "heartbeat_interval_s", "heartbeat_lost_s", "pair_aside_s"):
            _positive(f"router.{name}", getattr(self, name))
        for name, low in (("max_attempts", 1), ("retry_share", 0), ("retry_burst", 0), ("recovery_wait_s", 0)):
            _at_least(f"router.{name}", getattr(self, name), low)
        _at_least("router.max_connections", self.max_connections, 16)
        if self.max_inflight_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"router.max_inflight_body_bytes {self.max_inflight_body_bytes} must be at least router.max_body_bytes, "
                f"{self.max_body_bytes}: a body of that size would never be read"
            )
        _not_under(self, "router.max_deadline_s", "router.default_deadline_s")
        _not_under(self, "router.pair_aside_max_s", "router.pair_aside_s")
        _not_under(self, "router.heartbeat_lost_s", "router.heartbeat_interval_s", times=BEATS_TO_LOSE)
        self._check_ports()

    @property
    def link_bind(self) -> tuple[str, str]:
        """Where workers dial in, and which setting says so."""
        return (self.host, "router.host") if self.link_host is None else (self.link_host, "router.link_host")

    def _check_ports(self) -> None:
        """Also where their hosts differ: one of them may stand for all addresses, and a client would meet the wrong service."""
        taken: dict[int, str] = {}
        ports = {name: getattr(self, name) for name in ("http_port", "grpc_port", "link_port")}
        for name, port in (ports | {"admin_port": self.admin_port_or_default}).items():
            other = taken.setdefault(port, name)
            if port and other != name:
                raise ConfigError(f"router.{other} and router.{name} are both {port}: each needs a port of its own")

    @property
    def admin_port_or_default(self) -> int:
        if self.admin_port is not None:
            return self.admin_port
        return ADMIN_PORT if self.grpc_port else 0


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One pool: its size, what each worker needs of Ray, and what differs from the common engine settings."""

    replicas: int = 1
    num_cpus: float = 0.0  # of Ray, a worker: 0 on one small machine, where 1-CPU actors would wait for ever
    num_gpus: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)  # custom ones that a node must offer for each worker; empty: none
    labels: dict[str, str] = field(default_factory=dict)  # that a node must have, as x, !x or in(x, y); empty: any node
    max_restarts_per_hour: int = 6  # of one worker: one more death within the hour is for good
    engine: dict[str, Any] = field(default_factory=dict)  # overrides of `engine`, by name

    def __post_init__(self) -> None:
        for name in ("replicas", "num_cpus", "num_gpus", "max_restarts_per_hour"):
            _at_least(name, getattr(self, name), 0)
        for name, amount in self.resources.items():
            _positive(f"resources.{name}", amount)
        for name, selector in self.labels.items():
            try:
                check_key(name)
                LabelSelector.parse(selector)
            except ValueError as exc:
                raise ConfigError(f"labels.{name}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole of one YAML file."""

    address: str = "local"  # of Ray: local (its own, private), auto, or host:port
    advertise_host: str | None = None  # of workers; None: loopback when local, else the node's address
    log_dir: str | None = None  # None: a temporary folder, kept when the service fails
    engine: EngineConfig = field(default_factory=EngineConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    prefill: PoolConfig = field(default_factory=PoolConfig)
    decode: PoolConfig = field(default_factory=PoolConfig)

    def __post_init__(self) -> None:
        if self.decode.replicas < 1:
            raise ConfigError("decode.replicas must be at least 1: every request ends on a decode worker")
        if self.address not in ("local", "auto") and not re.fullmatch(r".+:\d+", self.address):
            raise ConfigError(f"address must be local, auto or HOST:PORT of a Ray cluster, got {self.address!r}")
        if self.router.placement == "disaggregated" and not self.prefill.replicas:
            raise ConfigError("router.placement is disaggregated and prefill.replicas is 0: every request would be refused")
        prefill, decode = self.engine_for(self.prefill), self.engine_for(self.decode)
        for name in ("model", "dtype", "block_size"):
            if getattr(prefill, name) != getattr(decode, name):
                raise ConfigError(f"prefill.engine.{name} and decode.engine.{name} differ: KV blocks could not be handed over")
        mixed = self.prefill.replicas and prefill.quantization != decode.quantization
        if mixed and not self.router.allow_mixed_quantization:
            raise ConfigError(
                f"prefill.engine.quantization ({prefill.quantization or 'none'}) and decode.engine.quantization "
                f"({decode.quantization or 'none'}) differ, so that tokens would depend on where a request runs; "
                "router.allow_mixed_quantization: true allows it"
            )

    def engine_for(self, pool: PoolConfig) -> EngineConfig:
        """The common engine settings with the pool's overrides."""
        merged = {f.name: getattr(self.engine, f.name) for f in dataclasses.fields(EngineConfig)} | pool.engine
        return _build(EngineConfig, merged, "engine")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one worker process is started with."""

    worker_id: str
    router_address: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    cluster_token: str = ""
    host: str = "127.0.0.1"  # the peer services bind here, on any free port unless `port` is set; KV by its network interface
    port: int = 0
    allow_public_bind: bool = False  # `host` may be other than loopback: whoever reaches the transport can write into KV
    advertise_host: str | None = None  # None: `host`
    heartbeat_interval_s: float = 1.0  # as router.heartbeat_interval_s; router_lost_s as router.heartbeat_lost_s
    router_lost_s: float = 5.0  # a router that says nothing for so long has gone: its work here is dropped
    drain_timeout_s: float = 300.0  # a drain that takes longer stops where it is; what is left is done again elsewhere

    def __post_init__(self) -> None:
        for name in ("heartbeat_interval_s", "router_lost_s", "drain_timeout_s"):
            _positive(name, getattr(self, name))
        _not_under(self, "router_lost_s", "heartbeat_interval_s", times=BEATS_TO_LOSE)
        _check_token(self.cluster_token, self.host, "host")


@dataclass(frozen=True, slots=True)
class RouterProcessConfig:
    """What one router process is started with."""

    router: RouterConfig = field(default_factory=RouterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cluster_token: str = ""

    def __post_init__(self) -> None:
        if not self.cluster_token and not is_loopback(self.router.admin_host):
            raise ConfigError(
                f"router.admin_host {self.router.admin_host!r} is reached by others, so cluster_token must not be empty: "
                "anybody could drain the cluster"
            )
        _check_token(self.cluster_token, *self.router.link_bind)


Config = TypeVar("Config")


def load(
    cls: type[Config],
    path: str | os.PathLike[str] | None,
    overrides: typing.Sequence[str] = (),
    settings: typing.Mapping[str, Any] = types.MappingProxyType({}),
) -> Config:
    """Read YAML (None: no file), then apply `settings` by dotted name (flags), then overrides `a.b=c`.

    Raises `ConfigError` naming the file and the setting.
    """
    data = {} if path is None else _read(path)
    for name, value in settings.items():
        _assign(data, name, value)
    for item in overrides:
        name, sep, text = item.partition("=")
        if not sep or not name:
            raise ConfigError(f"--set takes NAME=VALUE, got {item!r}")
        _assign(data, name, _parse_override(name, text))
    try:
        return _build(cls, data, "")
    except ConfigError as exc:
        raise exc if path is None else ConfigError(f"{path}: {exc.message}") from exc


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(exc)}") from exc
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping")
    return data


def _parse_override(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"--set {name}: {text!r} is not valid YAML: {_one_line(exc)}") from exc


def _assign(data: dict[str, Any], name: str, value: Any) -> None:
    """Set the dotted `name`; an empty section of the file (None) becomes one."""
    *parents, leaf = name.split(".")
    for parent in parents:
        if data.get(parent) is None:
            data[parent] = {}
        data = data[parent]
        if not isinstance(data, dict):
            raise ConfigError(f"{name}: {parent} is not a section")
    data[leaf] = value


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())


def dump(config: Any) -> str:
    """YAML that `load` reads back to an equal configuration."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _build(cls: type[Config], data: dict[str, Any], prefix: str) -> Config:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    in_bytes = {f.name for f in dataclasses.fields(cls) if f.metadata == _BYTES}  # type: ignore[arg-type]
    for name, value in data.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if name not in known and name in _SUCCESSORS:
            raise ConfigError(f"{path} is gone; its successor is {_SUCCESSORS[name]}")
        if name not in known:
            raise ConfigError(f"unknown setting {path}; known here: {', '.join(sorted(known))}")
        if name in in_bytes and isinstance(value, str):
            value = _bytes(value, path)
        values[name] = _convert(hints[name], value, path)
    try:
        return cls(**values)
    except TypeError as exc:
        raise ConfigError(f"{prefix or cls.__name__}: {exc}") from exc
    except ConfigError as exc:  # sections that stand in several places name their settings without the path to them
        raise ConfigError(exc.message if exc.message.startswith(prefix) else f"{prefix}.{exc.message}") from exc


def _bytes(text: str, path: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


def _convert(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            return value
        if value is None:  # a section left empty
            value = {}
        if not isinstance(value, dict):
            raise ConfigError(f"{path} must be a section, got {value!r}")
        return _build(hint, value, path)  # type: ignore[arg-type]
    origin = typing.get_origin(hint)
    if origin is types.UnionType or origin is typing.Union:
        options = [o for o in typing.get_args(hint) if o is not type(None)]
        return None if value is None else _convert(options[0], value, path)
    expected = origin or hint
    if expected is Any:
        return value
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise ConfigError(f"{path} must be {expected.__name__}, got {value!r}")
    if expected is dict:
        of_value = typing.get_args(hint)[1]
        return {str(name): _convert(of_value, item, f"{path}.{name}") for name, item in value.items()}
    return value


def _at_least(name: str, value: float, low: float) -> None:
    if not value >= low:  # so that NaN is refused too
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be positive, got {value}")


def _not_under(config: object, name: str, than: str, *, times: int = 1) -> None:
    """Both are names of settings of `config`, with the section before them."""
    value, least = (getattr(config, each.rpartition(".")[2]) for each in (name, than))
    if not value >= times * least:
        factor = f"{times} times " if times > 1 else ""
        raise ConfigError(f"{name} must be at least {times * least:g}, {factor}{than} ({least:g}), got {value}")


def _check_token(token: str, host: str, setting: str) -> None:
    if not token and not is_loopback(host):
        raise ConfigError(
            f"cluster_token is empty and {setting} is {host!r}: whoever reaches that address could join as a worker. "
            f"Set cluster_token to a secret that router and workers share, or {setting} to 127.0.0.1"
        )
