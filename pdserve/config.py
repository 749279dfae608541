"""Every setting of pdserve, as frozen dataclasses that are checked when they are made.

`load` of `pdserve.config_loader` reads them from a YAML file; `--set a.b=c` overrides the file. The type of a setting states
which values it takes. Each module gets the part that it needs passed in; nothing else reads the environment or a global.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

import dataclasses
import re
import typing
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal

from msgspec import Meta

from pdserve.config_loader import build
from pdserve.config_loader import dump as dump
from pdserve.config_loader import load as load
from pdserve.core.errors import ConfigError
from pdserve.core.settings.autoscaling import PLANNER, AutoscalingConfig
from pdserve.core.settings.metrics import MetricsConfig
from pdserve.core.settings.types import (
    Bytes,
    NonNegativeBytes,
    NonNegativeFloat,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    check_not_under,
    check_token,
    check_types,
    is_loopback,
)
from pdserve.pool_config import MOST_WORKERS, check_gpus
from pdserve.pool_config import PoolConfig as PoolConfig

MIB: Final = 1 << 20
CPU_BATCHED_TOKENS: Final = 512
CUDA_BATCHED_TOKENS: Final = 8192  # vLLM takes the same on GPUs of the Hopper class; a chunk of 512 leaves most of one idle
ADMIN_PORT: Final = 50053
CPU_KV_BYTES: Final = 256 * MIB  # this holds 11,648 tokens of SmolLM2-135M in bfloat16
START_TIMEOUT_S: Final = 1800.0  # 140 GB of weights (70 G values in bfloat16) take 19 minutes to download at 1 Gbit/s
DRAIN_TIMEOUT_S: Final = 300.0  # a worker without room elsewhere for its requests serves 15,000 tokens of each at 50 a second
BEATS_TO_LOSE: Final = 3  # a worker or a router counts as lost only after it has missed at least so many heartbeats

Dtype = Literal["auto", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["int8", "int4"]
KvCacheDtype = Literal["auto", "fp32", "bf16", "fp8", "fp8_e4m3", "int8", "int4"]

DTYPES: Final = typing.get_args(Dtype)
DEVICES: Final = typing.get_args(Device)
LOAD_FORMATS: Final = typing.get_args(LoadFormat)
QUANTIZATIONS: Final = typing.get_args(Quantization)
KV_CACHE_DTYPES: Final = typing.get_args(KvCacheDtype)
EXACT_KV_CACHE_DTYPES: Final = ("auto", "fp32", "bf16")  # the others are quantised


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model and its engine. Both pools use the same values unless a pool overrides them. The names are vLLM's."""

    # The model is "default", "tiny" (random weights, for tests), a directory, a GGUF file or a Hugging Face id.
    model: str = "default"
    # The model is read by this family, given as module:function of your own. None takes the one of its architecture.
    model_family: str | None = None
    # "dummy" makes random weights up, the same in each worker, and needs no file of weights. "auto" reads the model's own.
    load_format: LoadFormat = "auto"
    # Clients call the model by this name. None takes the model's own name.
    served_model_name: str | None = None
    # Weights and activations have this dtype. "auto" is bfloat16.
    dtype: Dtype = "auto"
    # int8 rounds weights, and the activations that they multiply, to 8 bits: weights take half the bytes of bfloat16, and
    # steps about half the time. int4 rounds weights to 4 bits: they take about a third of the bytes, and steps with few
    # sequences are the fastest. None quantises nothing.
    quantization: Quantization | None = None
    # "auto" takes a CUDA GPU where there is one, and the CPU elsewhere.
    device: Device = "auto"
    # A request may have at most so many tokens, prompt and output together. None takes the limit of the model.
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    # A worker runs at most so many sequences at a time.
    max_num_seqs: PositiveInt = 64
    # A step computes at most so many tokens, so longer prompts are cut into chunks. None is 512 on a CPU and 8192 on a GPU.
    max_num_batched_tokens: PositiveInt | None = None
    # A KV block holds so many tokens.
    block_size: PositiveInt = 16
    # KV is stored in this dtype. "auto" takes `dtype`. fp8_e4m3 and int8 hold twice as many tokens as bf16 in the
    # same memory, and int4 four times as many, at lower quality. "fp8" is fp8_e4m3.
    kv_cache_dtype: KvCacheDtype = "auto"
    # Each worker stores KV in so many bytes; sizes such as 256MiB are accepted. None is 256 MiB on a CPU. On a GPU, None lets
    # the worker measure how much is free and take its share, which `gpu_memory_utilization` sets.
    kv_cache_memory: Bytes | None = None
    # A worker uses this share of its GPU's memory. KV gets what weights and the largest step leave of the share.
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    # Prompts that begin alike share their KV, on prefill workers and on decode workers.
    enable_prefix_caching: bool = True
    # True makes the output of a request independent of the others in its batch, bit for bit. None does so where it costs
    # nothing, which is in compiled steps.
    batch_invariant: bool | None = None
    # A worker restarts when its engine finishes no step for so long while work waits. Raise it where steps are slow.
    step_timeout_s: PositiveFloat = 60.0
    # The device does so many operations, and reads so many bytes of memory, in a second at most. Utilisation (MFU, MBU) is told
    # against these. None takes the data sheet of a known GPU, and measures a CPU at the worker's start.
    peak_flops_per_s: PositiveFloat | None = None
    peak_bytes_per_s: PositiveFloat | None = None
    # torch uses so many threads in each worker. 0 takes the `num_cpus` of the pool, or, if that is less than 1, divides the
    # cores of the machine by the workers on it, and uses at least 1. More than 1024 are refused: torch ends its process when
    # the machine gives it no more threads.
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0

    def __post_init__(self) -> None:
        check_types(self)
        if self.batch_invariant and self.kv_cache_dtype not in EXACT_KV_CACHE_DTYPES:
            raise ConfigError(
                f"batch_invariant needs a kv_cache_dtype that is not quantised: how {self.kv_cache_dtype} rounds a block "
                "depends on how its tokens were cut into steps"
            )

    def batched_tokens(self, device: str) -> int:
        """Return how many tokens one step may have on a device of this type, "cpu" or "cuda"."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return CUDA_BATCHED_TOKENS if device == "cuda" else CPU_BATCHED_TOKENS

    @property
    def cpu_kv_bytes(self) -> int:
        """The KV pool of a worker on a CPU has so many bytes."""
        return CPU_KV_BYTES if self.kv_cache_memory is None else self.kv_cache_memory

    @property
    def known_kv_bytes(self) -> int | None:
        """The KV pool of a worker has so many bytes. None means that the worker may have a GPU and will measure."""
        return self.cpu_kv_bytes if self.device == "cpu" else self.kv_cache_memory


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """The lease by which a prefill worker lends KV to a decode worker. Each process measures time on its own clock."""

    # A lease that nobody renews ends after so long.
    ttl_s: PositiveFloat = 30.0
    # The reader renews its leases at least this often. The answers also show that the lender lives.
    heartbeat_s: PositiveFloat = 1.0
    # A lender that answers no renewal for so long counts as lost.
    lost_s: PositiveFloat = 5.0
    # A transfer may take this time, plus four times its bytes divided by `transfer_bandwidth_bytes_s`.
    transfer_deadline_floor_s: NonNegativeFloat = 5.0
    # This bandwidth is pessimistic: 1 Gbit Ethernet. A pair of workers that measures less gets a longer deadline.
    transfer_bandwidth_bytes_s: PositiveFloat = 1e8
    # The reader waits so long for the answer to a commit.
    commit_timeout_s: PositiveFloat = 2.0
    # The reader asks so many times for a commit before it gives the lease up.
    commit_tries: PositiveInt = 3
    # A transfer fails when prefill makes no progress for so long. Otherwise renewals could hold a lease for ever.
    stalled_s: PositiveFloat = 60.0
    # KV is used only if its checksum shows that it was read as it was written. Both pools must have the same value.
    kv_checksum: bool = True

    @property
    def renew_interval_s(self) -> float:
        """The reader renews a lease this often. Five renewals may be lost before the lease is."""
        return min(self.heartbeat_s, self.ttl_s / 6)

    def __post_init__(self) -> None:
        check_types(self, "lease.")
        for name in ("lost_s", "stalled_s"):  # one lost renewal must neither lose a lender nor end a transfer
            if not getattr(self, name) >= 2 * self.renew_interval_s:
                raise ConfigError(
                    f"lease.{name} must be at least {2 * self.renew_interval_s:g}, twice the pause between renewals, which is "
                    f"the smaller of lease.heartbeat_s ({self.heartbeat_s:g}) and lease.ttl_s / 6 ({self.ttl_s / 6:g}), "
                    f"got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The transport over which KV goes from prefill workers to decode workers."""

    # "nixl", "cma" (the processes of one machine, without NIXL), "fake" (the workers of one process, for tests), or
    # module:function of your own, which every worker imports. All workers must have the same value.
    transport: str = "nixl"

    def __post_init__(self) -> None:
        check_types(self, "transfer.")


@dataclass(frozen=True, slots=True)
class RouterConfig(MetricsConfig):
    """The router: where it listens, which limits it sets for clients, and how it deals with losses. Port 0 is any free one."""

    # Clients connect to this address, by HTTP and by gRPC.
    host: str = "127.0.0.1"
    http_port: Port = 8000
    grpc_port: Port = 50051
    # Operators' commands connect here. Where other machines reach the address, each call needs the cluster's token.
    admin_host: str = "127.0.0.1"
    # None is 50053, or any free port if `grpc_port` is 0.
    admin_port: Port | None = None
    # Workers connect to this address. None takes `host`.
    link_host: str | None = None
    link_port: Port = 0
    # Workers are told to connect to this address. None takes `link_host`.
    advertise_host: str | None = None
    # A prompt is computed on a prefill worker (disaggregated) or on its decode worker (colocated). A request may ask for one.
    placement: Literal["auto", "disaggregated", "colocated"] = "auto"
    # Among the workers that may take a request, these policies choose: "prefix_aware", "session_affinity", "goodput",
    # "least_loaded", "power_of_two", "round_robin", "random", or module:function of your own, which the router imports.
    prefill_policy: str = "prefix_aware"
    decode_policy: str = "prefix_aware"
    # "auto" computes a prompt on the decode worker if fewer of its tokens than this are not cached there.
    colocate_below_tokens: NonNegativeInt = 0
    # "auto" also computes a prompt on the decode worker where that is predicted to cost less time: its own and that of others.
    colocate_by_cost: bool = True
    # The router refuses further requests while so many requests, or so many of their tokens, wait. None follows the workers.
    max_queued_requests: PositiveInt | None = None
    max_queued_tokens: PositiveInt | None = None
    # The index of who holds which prefixes may take so many bytes, and then forgets the oldest. 0: no index. None: as above.
    prefix_index_bytes: NonNegativeBytes | None = None
    # A request that names no deadline gets the default. No request gets more than the maximum.
    default_deadline_s: PositiveFloat = 600.0
    max_deadline_s: PositiveFloat = 3600.0
    # One HTTP body may have so many bytes, and all large bodies that are on their way may have so many together.
    max_body_bytes: Bytes = 8 * MIB
    max_inflight_body_bytes: Bytes = 64 * MIB
    # All answers that are gathered whole may have so many bytes together, and so may all tokens that clients are slow to take.
    max_inflight_answer_bytes: Bytes = 256 * MIB
    # Each port for clients accepts so many connections, if RLIMIT_NOFILE allows. None follows the workers' sequences.
    max_connections: Annotated[int, Meta(ge=16)] | None = None
    # A request is cancelled when its client takes nothing for so long.
    stalled_client_s: PositiveFloat = 30.0
    # After SIGTERM the router refuses new requests, and streams may go on for so long.
    drain_s: NonNegativeFloat = 30.0
    # Each worker sends a heartbeat this often, and the router answers it. `pdserve up` tells workers the interval.
    heartbeat_interval_s: PositiveFloat = 1.0
    # A worker that the router does not hear for so long is lost. A worker counts its router as lost after the same time.
    heartbeat_lost_s: PositiveFloat = 5.0
    # A worker becomes ready only after KV has passed between it and a worker of the other pool once.
    probe_workers: bool = True
    # A request that fails is tried at most so many times, the first time included. Losses of workers do not count.
    max_attempts: PositiveInt = 4
    # All requests that fail may be retried `retry_burst` times together, plus this share of the admitted requests.
    retry_share: NonNegativeFloat = 0.1
    retry_burst: NonNegativeInt = 10
    # Workers that fail much more than their pool, or are much slower, get nothing for a while. At least half of a pool stays.
    eject_workers: bool = True
    # A retried request waits so long for a worker to come back before it is refused.
    recovery_wait_s: NonNegativeFloat = 30.0
    # A pair of workers whose transfer failed is not used for so long. Each further failure doubles the time, up to the maximum.
    pair_aside_s: PositiveFloat = 5.0
    pair_aside_max_s: PositiveFloat = 60.0
    # True lets the pools differ in the quantisation of weights. The tokens then depend on where a request runs.
    allow_mixed_quantization: bool = False
    # The router records requests in this file, for `pdserve replay`. A number follows its name if it exists. None: nowhere.
    record_file: str | None = None
    # Recording stops when the file has so many bytes.
    record_max_bytes: Bytes = 64 * MIB
    # True also records prompts, outputs and stop strings. Otherwise only their lengths are recorded.
    record_prompts: bool = False

    def __post_init__(self) -> None:
        check_types(self, "router.")
        self.check_clients()
        if self.max_inflight_body_bytes < self.max_body_bytes:
            raise ConfigError(
                f"router.max_inflight_body_bytes {self.max_inflight_body_bytes} must be at least router.max_body_bytes, "
                f"{self.max_body_bytes}: a body of that size would never be read"
            )
        check_not_under(self, "router.max_deadline_s", "router.default_deadline_s")
        check_not_under(self, "router.pair_aside_max_s", "router.pair_aside_s")
        check_not_under(self, "router.heartbeat_lost_s", "router.heartbeat_interval_s", times=BEATS_TO_LOSE)
        self._check_ports()

    @property
    def link_bind(self) -> tuple[str, str]:
        """The address where workers connect, and the setting that names it."""
        return (self.host, "router.host") if self.link_host is None else (self.link_host, "router.link_host")

    def _check_ports(self) -> None:
        """Refuse a port that two services share, even on different hosts, one of which may stand for all addresses."""
        taken: dict[int, str] = {}
        ports = {name: getattr(self, name) for name in ("http_port", "grpc_port", "link_port", "metrics_port")}
        for name, port in (ports | {"admin_port": self.admin_port_or_default}).items():
            other = taken.setdefault(port, name)
            if port and other != name:
                raise ConfigError(f"router.{other} and router.{name} are both {port}: each needs a port of its own")

    @property
    def admin_port_or_default(self) -> int:
        """The port for administration. 0 stands for any free port."""
        if self.admin_port is not None:
            return self.admin_port
        return ADMIN_PORT if self.grpc_port else 0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole cluster, as one YAML file describes it."""

    # "local" starts a private Ray. "auto" joins the Ray cluster of this node, and HOST:PORT joins the one at that address.
    address: str = "local"
    # Other processes reach a worker at this address. None is loopback for "local", and the address of the node elsewhere.
    advertise_host: str | None = None
    # The workers use at most so many GPUs. None takes all that are there; 0 computes on CPUs.
    gpus: NonNegativeInt | None = None
    # Logs are written to this folder. None makes a temporary folder, which is kept when the service fails; `stdout` is no
    # folder but the standard output of the container. A log has at most 64 MiB: a file of 16 MiB, and three older ones.
    log_dir: str | None = None
    # A worker may load its model for so long, download and compilation included. One that takes longer is started again.
    start_timeout_s: PositiveFloat = START_TIMEOUT_S
    # A worker that drains or changes its role moves its requests to others, and waits so long for those that find no room. What
    # is left then is computed again elsewhere.
    drain_timeout_s: PositiveFloat = DRAIN_TIMEOUT_S
    engine: EngineConfig = field(default_factory=EngineConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    prefill: PoolConfig = field(default_factory=PoolConfig)
    decode: PoolConfig = field(default_factory=PoolConfig)
    autoscaling: AutoscalingConfig = field(default_factory=AutoscalingConfig)

    def __post_init__(self) -> None:
        check_types(self)
        if self.decode.replicas < 1:
            raise ConfigError("decode.replicas must be at least 1: every request ends on a decode worker")
        if self.decode.least < 1:
            raise ConfigError("decode.min_replicas must be at least 1: every request ends on a decode worker")
        if self.address not in ("local", "auto") and not re.fullmatch(r".+:\d+", self.address):
            raise ConfigError(f"address must be local, auto or HOST:PORT of a Ray cluster, got {self.address!r}")
        if self.router.placement == "disaggregated" and not self.prefill.replicas:
            raise ConfigError("router.placement is disaggregated and prefill.replicas is 0: every request would be refused")
        prefill, decode = self.engine_for(self.prefill), self.engine_for(self.decode)
        for name in ("model", "load_format", "dtype", "block_size"):
            if getattr(prefill, name) != getattr(decode, name):
                raise ConfigError(f"prefill.engine.{name} and decode.engine.{name} differ: KV blocks could not be handed over")
        mixed = self.prefill.most and prefill.quantization != decode.quantization
        if mixed and not self.router.allow_mixed_quantization:
            raise ConfigError(
                f"prefill.engine.quantization ({prefill.quantization or 'none'}) and decode.engine.quantization "
                f"({decode.quantization or 'none'}) differ, so that tokens would depend on where a request runs; "
                "router.allow_mixed_quantization: true allows it"
            )
        for name, pool, engine in (("prefill", self.prefill, prefill), ("decode", self.decode, decode)):
            check_gpus(name, self.gpus, pool.num_gpus, engine)
        self._check_autoscaling()

    def _check_autoscaling(self) -> None:
        """Check what the planner may do against what the cluster is. Raises `ConfigError`."""
        self.autoscaling.check_affordable(self.prefill.cost, self.decode.cost)
        if self.router.placement == "disaggregated" and not self.prefill.least:
            raise ConfigError("router.placement is disaggregated, so prefill.min_replicas must be at least 1")
        if self.slo_class not in self.router.classes():
            known = ", ".join(self.router.classes())
            raise ConfigError(f"autoscaling.slo_class {self.slo_class!r} is none of {known}")
        own = [pool for pool in (self.prefill, self.decode) if pool.scaling_policy != PLANNER]
        if own and self.autoscaling.policy_timeout_s > self.autoscaling.interval_s:
            raise ConfigError(
                f"autoscaling.policy_timeout_s is {self.autoscaling.policy_timeout_s:g}, more than autoscaling.interval_s "
                f"({self.autoscaling.interval_s:g}): a policy answers before it is asked again"
            )
        if self.autoscaling.enabled and self.unlimited:
            raise ConfigError(f"autoscaling.enabled: {self.unlimited}")

    @property
    def slo_class(self) -> str:
        """The class of requests for whose targets the pools are sized."""
        return self.autoscaling.slo_class or self.router.default_class

    @property
    def unlimited(self) -> str:
        """The reason why the planner may not decide: nothing limits a pool. Empty: every pool has a limit."""
        for name in ("prefill", "decode"):
            pool = getattr(self, name)
            if pool.most >= MOST_WORKERS and not self.autoscaling.limits(pool.cost):
                return f"nothing limits the pool; set {name}.max_replicas or autoscaling.max_workers"
        return ""

    def engine_for(self, pool: PoolConfig) -> EngineConfig:
        """Return the common engine settings with the pool's overrides. Raises `ConfigError` that names the override."""
        merged = {f.name: getattr(self.engine, f.name) for f in dataclasses.fields(EngineConfig)} | pool.engine
        names = [f"{name}.engine" for name in ("prefill", "decode") if getattr(self, name) is pool]
        return build(EngineConfig, merged, names[0] if names else "engine")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings with which one worker process is started."""

    worker_id: str
    router_address: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    cluster_token: str = ""
    # Other workers connect to this address. The transport of KV uses the network interface that has it.
    host: str = "127.0.0.1"
    # Other workers connect to this port. 0 takes any free port.
    port: Port = 0
    # True lets `host` be an address that others reach. Whoever reaches the transport there can write into KV.
    allow_public_bind: bool = False
    # Other workers are told to connect to this address. None takes `host`.
    advertise_host: str | None = None
    # As `router.heartbeat_interval_s` and `router.heartbeat_lost_s`. A worker that has lost its router drops its work.
    heartbeat_interval_s: PositiveFloat = 1.0
    router_lost_s: PositiveFloat = 5.0
    # A drain that takes longer stops where it is. Other workers do again what is left.
    drain_timeout_s: PositiveFloat = DRAIN_TIMEOUT_S
    # The reason why this worker cannot take the other role, in words. Empty: nothing prevents it.
    flip_obstacle: str = ""
    # The worker may load its model for so long.
    start_timeout_s: PositiveFloat = START_TIMEOUT_S

    def __post_init__(self) -> None:
        check_types(self)
        check_not_under(self, "router_lost_s", "heartbeat_interval_s", times=BEATS_TO_LOSE)
        check_token(self.cluster_token, self.host, "host")


@dataclass(frozen=True, slots=True)
class RouterProcessConfig:
    """The settings with which one router process is started."""

    router: RouterConfig = field(default_factory=RouterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cluster_token: str = ""

    def __post_init__(self) -> None:
        check_types(self)
        if not self.cluster_token and not is_loopback(self.router.admin_host):
            raise ConfigError(
                f"router.admin_host {self.router.admin_host!r} is reached by others, so cluster_token must not be empty: "
                "anybody could drain the cluster"
            )
        check_token(self.cluster_token, *self.router.link_bind)
