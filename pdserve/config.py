"""Every setting of pdserve, as frozen dataclasses that are checked when they are made.

`load` of `pdserve.config_loader` reads them from a YAML file; `--set a.b=c` overrides the file. The type of a setting states
which values it takes. Each module gets the part that it needs passed in; nothing else reads the environment or a global.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple

from msgspec import Meta

from pdserve.config_loader import build
from pdserve.config_loader import dump as dump
from pdserve.config_loader import load as load
from pdserve.core.errors import ConfigError
from pdserve.core.settings.constants import GONE, LeaseConstants, RouterConstants
from pdserve.core.settings.labels import LabelSelector, check_key
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
from pdserve.core.shards import MOST_DEGREE, Degrees
from pdserve.core.slo import SloClass, classes_of
from pdserve.plugins import is_path

MIB: Final = 1 << 20
ADMIN_PORT: Final = 50053
METRICS_PORT: Final = 9464  # OpenTelemetry's default for exporters to Prometheus
MAX_INFLIGHT_BODY_BYTES: Final = 64 * MIB  # eight of the largest bodies at once; parsing takes a small multiple of them
MOST_WORKERS: Final = 4096  # of a pool without `max_replicas`: larger than any cluster that was ever measured
ROUNDING: Final = 1e-3  # of shares of a GPU: a third of one is 0.3333 to Ray
PLANNER: Final = "planner"
"""The value of `scaling_policy` of a pool whose size the planner decides."""


class RoleLimits(NamedTuple):
    """The most sequences that run at a time, and the most tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


ROLE_LIMITS: Final = {
    "cpu": {"prefill": RoleLimits(64, 512), "decode": RoleLimits(64, 128)},
    "cuda": {"prefill": RoleLimits(64, 8192), "decode": RoleLimits(256, 2048)},
}
"""The limits of each role where none are set, by the type of the device. docs/design/0091-defaults-of-roles.md has the
measurements. A prompt beside streams stops them for the time of a chunk, so the chunks of decode workers are small: on a CPU,
128 tokens use it as well as 512 do, and on an H100, 2,048 reach 60 % of its operations. On a GPU more sequences make a decode
step cheaper for each of them; on a CPU 64 give as many tokens as it can."""
CPU_KV_BYTES: Final = 256 * MIB  # this holds 11,648 tokens of SmolLM2-135M in bfloat16
START_TIMEOUT_S: Final = 1800.0  # 140 GB of weights (70 G values in bfloat16) take 19 minutes to download at 1 Gbit/s
DRAIN_TIMEOUT_S: Final = 300.0  # a worker without room elsewhere for its requests serves 15,000 tokens of each at 50 a second
BEATS_TO_LOSE: Final = 3  # a worker or a router counts as lost only after it has missed at least so many heartbeats

Dtype = Literal["auto", "bfloat16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
Backend = Literal["pdserve", "vllm"]
RankCollective = Literal["auto", "shared_memory", "gloo", "nccl"]
Degree = Annotated[int, Meta(ge=1, le=64)]  # eight machines of 8 GPUs; gangs of pdserve's own engine have fewer
Quantization = Literal["int8", "int4"]
Speculation = Literal["none", "ngram", "suffix", "self", "draft_model"]
KvCacheDtype = Literal["auto", "fp32", "bf16", "fp8", "fp8_e4m3", "int8", "int4"]

BACKENDS: Final = typing.get_args(Backend)
DTYPES: Final = typing.get_args(Dtype)
DEVICES: Final = typing.get_args(Device)
RANK_COLLECTIVES: Final = typing.get_args(RankCollective)
LOAD_FORMATS: Final = typing.get_args(LoadFormat)
QUANTIZATIONS: Final = typing.get_args(Quantization)
SPECULATIONS: Final = typing.get_args(Speculation)
KV_CACHE_DTYPES: Final = typing.get_args(KvCacheDtype)
EXACT_KV_CACHE_DTYPES: Final = ("auto", "fp32", "bf16")  # the others are quantised

_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/@]+")  # a scheme, a host and perhaps a port; no path
_NOT_FOREIGN: Final = "only workers with the backend pdserve serve OpenEngine; a server of vLLM has interfaces of its own"
_URL: Final = re.compile(r"http://[^\s/@]+:[0-9]{1,5}/?")
_HOST: Final = re.compile(r"\*|[a-z0-9_.-]+")
_HEADER: Final = re.compile(r"header:[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # a name that HTTP and gRPC both carry


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """The server of vLLM that a worker drives where `engine.backend` is vllm."""

    # A worker starts its server with this command, to which it adds flags. Empty takes the environment of `make setup-vllm`.
    command: tuple[str, ...] = ()
    # A worker adds these flags too, such as [--seed, "1"].
    args: tuple[str, ...] = ()
    # A worker starts no server, and uses the one that runs at this address, such as http://127.0.0.1:8100.
    url: str = ""
    # A server has so many nodes. The worker starts it on the first one; docs/multi-node.md says what runs on the others.
    nodes: Annotated[int, Meta(ge=1, le=64)] = 1

    def __post_init__(self) -> None:
        check_types(self)
        if self.url and (self.command or self.args or self.nodes > 1):
            raise ConfigError("url is that of a server which runs already: leave out command, args and nodes")
        if self.url and not _URL.fullmatch(self.url):
            raise ConfigError(f"url must be http://HOST:PORT, got {self.url!r:.100}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding: cheap drafts of the next tokens, of which a step verifies several at once. No output depends on it.
    The names are vLLM's, where it has them."""

    # "ngram" drafts what followed the last tokens earlier in the same request. "suffix" also looks at recent requests of the
    # same cache salt. "self" drafts with a copy of the model's own weights in fewer bits, and "draft_model" with a smaller
    # model; both look up as well.
    method: Speculation = "none"
    # A step verifies at most so many drafts of one sequence. It verifies fewer, or none, where more would not pay. None is 16,
    # and 8 of a model's drafts.
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    # A lookup compares at least so many last tokens of the request, and at most so many.
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 1
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 32
    # The smaller model of "draft_model", as for `engine.model`. It must have the vocabulary of the large one.
    model: str = ""
    # The weights of "self" and of "draft_model" have so many bits. None is int4 for "self", and the model's own dtype for
    # "draft_model".
    quantization: Quantization | None = None
    # "self" computes only so many first layers of the model, and then its head. None computes all: few layers of a model that
    # was not trained for it guess badly.
    draft_layers: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ConfigError(
                f"prompt_lookup_max must be at least prompt_lookup_min ({self.prompt_lookup_min}), got {self.prompt_lookup_max}"
            )
        own = {"model": ("draft_model",), "quantization": ("self", "draft_model"), "draft_layers": ("self",)}
        for name, methods in own.items():
            if getattr(self, name) and self.method not in methods:
                raise ConfigError(f"{name} is only for the method {' and '.join(methods)}, and method is {self.method}")
        if self.method == "draft_model" and not self.model:
            raise ConfigError("model must be set for the method draft_model")
        given = [one.name for one in fields(self) if one.name != "method" and getattr(self, one.name) != one.default]
        if given and not self.drafts:
            raise ConfigError(f"{given[0]} is ignored where method is none: set method too")

    @property
    def drafts(self) -> bool:
        """Anything is drafted."""
        return self.method != "none"

    @property
    def most_tokens(self) -> int:
        """A step verifies at most so many drafts of one sequence."""
        return self.num_speculative_tokens or 16

    @property
    def most_rows(self) -> int:
        """A step has memory for so many drafts of all sequences, beside a row of each."""
        return self.most_tokens if self.drafts else 0

    @property
    def most_places(self) -> int:
        """A model drafts at most so many tokens of one sequence."""
        return self.num_speculative_tokens or 8


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model and its engine. Both pools use the same values unless a pool overrides them. The names are vLLM's."""

    # The model is "default", "tiny" (random weights, for tests), a directory, a GGUF file or a Hugging Face id.
    model: str = "default"
    # The model is read by this family, given as module:function of your own. None takes the one of its architecture.
    model_family: str | None = None
    # "dummy" makes random weights up, the same in each worker, and needs no file of weights. "auto" reads the model's own.
    load_format: LoadFormat = "auto"
    # "pdserve" computes with the project's own engine. "vllm" lets each worker drive a server of vLLM; docs/engines.md says
    # what that changes. Both pools must have the same.
    backend: Backend = "pdserve"
    # The server of vLLM, such as {url: "http://127.0.0.1:8100"}. Only for the backend vllm.
    vllm: VllmConfig = field(default_factory=VllmConfig)
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
    # A worker runs at most so many sequences at a time. Lower it where tokens come too slowly, raise it where slots run out.
    # None is 64, and 256 on a GPU that decodes.
    max_num_seqs: PositiveInt | None = None
    # A step computes at most so many tokens, so longer prompts are cut into chunks. None is 512 on a CPU and 8192 on a GPU, and
    # 128 and 2048 where a worker decodes: its streams stand still while a chunk is computed.
    max_num_batched_tokens: PositiveInt | None = None
    # A KV block holds so many tokens. Larger ones are fewer to hand over, smaller ones share more of like prompts.
    block_size: PositiveInt = 16
    # KV is stored in this dtype. "auto" takes `dtype`. fp8_e4m3 and int8 hold twice as many tokens as bf16 in the
    # same memory, and int4 four times as many, at lower quality. "fp8" is fp8_e4m3.
    kv_cache_dtype: KvCacheDtype = "auto"
    # Each worker stores KV in so many bytes; sizes such as 256MiB are accepted. None is 256 MiB on a CPU. On a GPU, None lets
    # the worker measure how much is free and take its share, which `gpu_memory_utilization` sets.
    kv_cache_memory: Bytes | None = None
    # A worker uses this share of its GPU's memory. KV gets what weights and the largest step leave of the share.
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    # Prompts that begin alike share their KV, on prefill workers and on decode workers. False is for measurements.
    enable_prefix_caching: bool = True
    # True makes the output of a request independent of the others in its batch, bit for bit. None does so where it costs
    # nothing, which is in compiled steps.
    batch_invariant: bool | None = None
    # Cheap drafts of the next tokens are verified several at once, such as {method: ngram}. It changes no output, and steps
    # verify only what pays.
    speculative_config: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    # A worker restarts when its engine finishes no step for so long while work waits. Raise it where steps are slow.
    step_timeout_s: PositiveFloat = 60.0
    # So many ranks, which are processes of one machine, or of `vllm.nodes` machines, share each layer of a worker's model.
    tensor_parallel_size: Degree = 1
    # The layers of a worker's model are cut into so many stages, with `tensor_parallel_size` ranks each.
    pipeline_parallel_size: Degree = 1
    # Each rank has whole experts of a mixture instead of a part of every expert.
    enable_expert_parallel: bool = False
    # Ranks give each other the numbers between their products in this way. "auto" takes shared memory on CPUs and NCCL on
    # GPUs. gloo is for tests, and for several ranks on one GPU, which NCCL is known to refuse.
    rank_collective: RankCollective = "auto"
    # Ranks may share cores. It is slow, and for tests.
    oversubscribe: bool = False
    # The device does so many operations, and reads so many bytes of memory, in a second at most. Utilisation (MFU, MBU) is told
    # against these. None takes the data sheet of a known GPU, and measures a CPU at the worker's start.
    peak_flops_per_s: PositiveFloat | None = None
    peak_bytes_per_s: PositiveFloat | None = None
    # torch uses so many threads in each rank; most workers have one rank. 0 takes the `num_cpus` of the pool, or, if that is
    # less than 1, divides the cores of the machine by the ranks of the workers on it, and uses at least 1. More than 1024 are
    # refused: torch ends its process when the machine gives it no more threads.
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0

    def __post_init__(self) -> None:
        check_types(self)
        given = [f"vllm.{one.name}" for one in fields(VllmConfig) if getattr(self.vllm, one.name) != one.default]
        if self.backend != "vllm" and given:
            raise ConfigError(f"{' and '.join(given)}: only for the backend vllm, and backend is pdserve")
        if self.batch_invariant and self.kv_cache_dtype not in EXACT_KV_CACHE_DTYPES:
            raise ConfigError(
                f"batch_invariant needs a kv_cache_dtype that is not quantised: how {self.kv_cache_dtype} rounds a block "
                "depends on how its tokens were cut into steps"
            )
        if self.backend == "vllm" and self.speculative_config.drafts:
            raise ConfigError(
                "speculative_config is for the backend pdserve: give --speculative-config to vLLM itself, in vllm.args"
            )
        if self.speculative_config.drafts and self.max_num_batched_tokens == 1:
            raise ConfigError(
                f"max_num_batched_tokens must be at least 2 with speculative_config.method {self.speculative_config.method}, "
                "got 1: a step with a draft computes two tokens"
            )
        if self.ranks > 1 and self.speculative_config.method in ("self", "draft_model"):
            raise ConfigError(
                f"speculative_config.method {self.speculative_config.method} drafts with one rank, and {self.gang}: use suffix"
            )
        if self.device == "cuda":
            self.check_gang_on_gpus("device is cuda")
        if self.backend == "pdserve" and max(self.tensor_parallel_size, self.pipeline_parallel_size) > MOST_DEGREE:
            raise ConfigError(f"{self.gang}: gangs have at most {MOST_DEGREE} ranks in a stage, and {MOST_DEGREE} stages")
        if self.rank_collective != "auto" and (self.ranks == 1 or self.backend != "pdserve"):
            why = "backend is vllm, whose servers choose for themselves: leave it out"
            if self.backend == "pdserve":
                why = "a worker has one rank: leave it out, or set it for the pool with more, as decode.engine.rank_collective"
            raise ConfigError(f"rank_collective is {self.rank_collective}, and {why}")
        if self.degrees.ranks % self.vllm.nodes:
            works = [nodes for nodes in range(1, self.degrees.ranks + 1) if self.degrees.ranks % nodes == 0]
            raise ConfigError(
                f"vllm.nodes {self.vllm.nodes} does not divide them, {self.gang}: use {' or '.join(map(str, works))}"
            )
        if self.ranks > 1 and self.vllm.url:
            raise ConfigError(f"vllm.url is a server which runs already, and {self.gang}: give the degrees to its own command")

    def limits(self, device: str, role: str) -> RoleLimits:
        """Return the limits of a worker of a role, "prefill" or "decode", on a device of this type, "cpu" or "cuda"."""
        default = ROLE_LIMITS[device][role]
        seqs = self.max_num_seqs or default.max_num_seqs
        least = seqs + self.block_size - 1  # a block of a prompt beside a token of each other sequence
        tokens = self.max_num_batched_tokens or max(default.max_num_batched_tokens, least)
        return RoleLimits(min(seqs, tokens), tokens)

    def largest_limits(self, device: str) -> RoleLimits:
        """Return the limits for which a worker has memory: the larger ones of both roles, since it may change its role."""
        prefill, decode = (self.limits(device, role) for role in ("prefill", "decode"))
        return RoleLimits(*map(max, prefill, decode))

    @property
    def degrees(self) -> Degrees:
        """The model of a worker is shared among so many ranks."""
        return Degrees(self.tensor_parallel_size, self.pipeline_parallel_size, self.enable_expert_parallel)

    @property
    def ranks(self) -> int:
        """A worker computes with so many processes on its own machine."""
        return self.degrees.ranks // self.vllm.nodes

    @property
    def gang(self) -> str:
        """The degrees and the number of ranks, in words."""
        degrees = f"tensor_parallel_size {self.tensor_parallel_size} x pipeline_parallel_size {self.pipeline_parallel_size}"
        return f"{degrees} are {self.degrees.ranks} ranks"

    def collective(self, device: str) -> RankCollective:
        """Return the way in which ranks on a device of this type, "cpu" or "cuda", give each other rows. It is never auto."""
        if self.rank_collective != "auto":
            return self.rank_collective
        return "nccl" if device == "cuda" else "shared_memory"

    def check_gang_on_gpus(self, why: str) -> None:
        """Raise `ConfigError` for a gang of our own engine on GPUs whose KV pool has no configured size: it measures none.

        why: the setting, in words, by which it gets GPUs.
        """
        if self.ranks > 1 and self.backend == "pdserve" and self.kv_cache_memory is None:
            raise ConfigError(
                f"{why}, and {self.gang}, which do not measure how much memory is free: set kv_cache_memory to the bytes of "
                "the KV pool over all ranks (or device to cpu, or backend to vllm)"
            )

    def check_cores(self, cores: int, machine: str = "this machine") -> None:
        """Raise `ConfigError` for a gang with more threads than a machine has cores: in every layer the others would wait for a
        rank that has none. A worker of one rank may share cores.
        """
        least = self.ranks * max(1, self.threads)
        if self.ranks == 1 or self.device == "cuda" or self.oversubscribe or least <= cores:
            return
        threads = f" of {self.threads} threads" if self.threads > 1 else ""
        raise ConfigError(
            f"{self.gang}{threads}, and {machine} has {cores} core{'s' if cores != 1 else ''}: lower these numbers, take a "
            "machine with more cores, or set engine.oversubscribe: true, which is slow, and for tests"
        )

    @property
    def cpu_kv_bytes(self) -> int:
        """The KV pool of a worker on a CPU has so many bytes."""
        return CPU_KV_BYTES if self.kv_cache_memory is None else self.kv_cache_memory

    @property
    def known_kv_bytes(self) -> int | None:
        """The KV pool of a worker has so many bytes. None means that the worker may have a GPU and will measure."""
        return self.cpu_kv_bytes if self.device == "cpu" else self.kv_cache_memory


@dataclass(frozen=True, slots=True)
class LeaseConfig(LeaseConstants):
    """The lease by which a prefill worker lends KV to a decode worker."""

    # KV is used only if its checksum shows that it was read as it was written. Both pools must have the same value. Without
    # it, a transfer costs the decode worker less time, and nothing finds bytes that a network card or memory changed.
    kv_checksum: bool = True

    def __post_init__(self) -> None:
        check_types(self, "lease.")
        LeaseConstants.__post_init__(self)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The transport over which KV goes from prefill workers to decode workers."""

    # "nixl", "cma" (the processes of one machine, without NIXL), "fake" (the workers of one process, for tests), or
    # module:function of your own, which every worker imports. All workers must have the same value.
    transport: str = "nixl"

    def __post_init__(self) -> None:
        check_types(self, "transfer.")


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterConstants):
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
    # Prometheus scrapes `/metrics` here, over HTTP. None is port 9464, or any free port if that is taken or `grpc_port` is 0.
    metrics_host: str = "127.0.0.1"
    metrics_port: Port | None = None
    # True also answers `/metrics` on the port for clients, with the same page. False keeps the figures from clients.
    metrics_on_http: bool = True
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
    # This file holds the chat template, in Jinja. None takes the model's own.
    chat_template: str | None = None
    # Calls of tools are read from the output in this form: hermes, mistral, llama3_json, deepseek_v3, granite, pythonic, or
    # none. "auto" takes the form whose marks the chat template has.
    tool_call_parser: str = "auto"
    # Reasoning is split from the output in this form: qwen3, deepseek_r1, or none. "auto" takes the form that the chat template
    # asks for.
    reasoning_parser: str = "auto"
    # Web pages of these origins, such as https://chat.example, may use the HTTP ports from a browser. "*" allows all pages, and
    # "null" those without an origin, such as files. Clients other than browsers send no origin, and are not affected.
    allowed_origins: tuple[str, ...] = ()
    # Where HTTP listens on loopback, a request must name an IP address, localhost or one of these names as its host, without a
    # port. "*" allows all names. If set, this holds for other addresses as well.
    allowed_hosts: tuple[str, ...] = ()
    # Classes of requests by name, such as {chat: {ttft_s: 0.4, priority: 10}}. A class has `ttft_s`, `tpot_s`, `priority`,
    # `queue_share`, `urgent`, `client`, `max_deadline_s` and `num_speculative_tokens`. Built-in are default, voice, code, chat
    # and batch; fields that are not set here stay as they are.
    slo_classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    # A request that names no class belongs to this one.
    default_class: str = "default"
    # Turns are fair between clients. What one client is: an "address" (of IPv6 its /64), a "connection", the "api_key" that it
    # sends in Authorization, or the value of a header, such as "header:x-tenant". A client without such a key or header is
    # identified by its address.
    fairness_key: str = "address"
    # The waiting requests of one client may fill this share of the queue. When the queue is full, the client with the most
    # waiting requests gives way.
    client_queue_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # A request may ask for a priority of at most this (over HTTP: of at least its negative, since there a lower number goes
    # first, as in vLLM). Each level is a head start of 3 s before the requests of other clients.
    max_client_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    # The longest prompt, in tokens, with which a request may ask to be computed on its decode worker. None sets no limit.
    max_client_colocated_tokens: NonNegativeInt | None = 2048
    # The router refuses further requests while so many wait. None follows the workers; lower it to refuse rather than let wait.
    max_queued_requests: PositiveInt | None = None
    # The index of who holds which prefixes may take so many bytes, and then forgets the oldest. 0: no index. None follows the
    # workers; the log says when more would help.
    prefix_index_bytes: NonNegativeBytes | None = None
    # A request that names no deadline gets the default. No request gets more than the maximum. Raise both for longer answers.
    default_deadline_s: PositiveFloat = 600.0
    max_deadline_s: PositiveFloat = 3600.0
    # One HTTP body may have so many bytes. Raise it for prompts of more text.
    max_body_bytes: Bytes = 8 * MIB
    # All answers that are gathered whole may have so many bytes together, and so may all tokens that clients are slow to take.
    # Raise it where clients are refused for it and the router has the memory.
    max_inflight_answer_bytes: Bytes = 256 * MIB
    # Each port for clients accepts so many connections, if RLIMIT_NOFILE allows. None follows the workers' sequences; set it
    # where clients keep more connections than they use.
    max_connections: Annotated[int, Meta(ge=16)] | None = None
    # After SIGTERM the router refuses new requests, and streams may go on for so long: as long as your answers take, and less
    # than what stops the router waits for its end.
    drain_s: NonNegativeFloat = 30.0
    # A worker that the router does not hear for so long is lost. A worker counts its router as lost after the same time.
    # Raise it where machines or networks stand still for longer.
    heartbeat_lost_s: PositiveFloat = 5.0
    # True lets the pools differ in the quantisation of weights. The tokens then depend on where a request runs.
    allow_mixed_quantization: bool = False
    # True refuses a worker unless a token depends neither on the worker nor on the batch in which it is computed. Otherwise
    # `exact` in answers and in `pdserve status` tells whether that is so.
    require_exact: bool = False
    # The router records requests in this file, for `pdserve replay`. A number follows its name if it exists. None: nowhere.
    record_file: str | None = None
    # True also records prompts, outputs and stop strings. Otherwise only their lengths are recorded.
    record_prompts: bool = False

    def __post_init__(self) -> None:
        check_types(self, "router.")
        self._check_clients()
        check_not_under(self, "router.max_deadline_s", "router.default_deadline_s")
        check_not_under(self, "router.heartbeat_lost_s", "router.heartbeat_interval_s", times=BEATS_TO_LOSE)
        self._check_ports()

    def classes(self) -> dict[str, SloClass]:
        """Return the classes of requests by name."""
        return classes_of(self.slo_classes, "router.slo_classes")

    def _check_clients(self) -> None:
        """Check the settings that have more than a type. Raises `ConfigError`."""
        for name, form, example in (
            ("allowed_origins", _ORIGIN, "*, null, or a scheme and a host without a path, such as https://chat.example"),
            ("allowed_hosts", _HOST, "* or a name without a port, such as llm.example"),
        ):
            for value in getattr(self, name):
                if not form.fullmatch(value.lower()):
                    raise ConfigError(f"router.{name}: each entry must be {example}, got {value!r:.100}")
        if self.default_class not in self.classes():
            raise ConfigError(f"router.default_class {self.default_class!r} is none of {', '.join(self.classes())}")
        if self.fairness_key not in ("address", "connection", "api_key") and not _HEADER.fullmatch(self.fairness_key):
            raise ConfigError(
                f"router.fairness_key must be address, connection, api_key, or header:NAME, got {self.fairness_key!r:.100}"
            )

    @property
    def max_inflight_body_bytes(self) -> int:
        """All large bodies that are on their way have so many bytes together at most."""
        return max(MAX_INFLIGHT_BODY_BYTES, self.max_body_bytes)

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
class PoolCost:
    """One pool as `AutoscalingConfig` sees it: its sizes, and what one worker costs."""

    min_replicas: int
    replicas: int
    cpus: float
    gpus: float
    price_per_hour: float


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    """The planner: whether it decides the sizes of the pools, for which service, and what both pools may cost together."""

    # True lets the planner decide the sizes. Otherwise they stay as configured, until `pdserve scale` changes them.
    enabled: bool = False
    # The planner decides this often, from what happened in between. Less suits loads that change within seconds.
    interval_s: PositiveFloat = 10.0
    # The pools are sized for the targets of this class of requests. None takes `router.default_class`.
    slo_class: str | None = None
    # This share of the requests should meet the targets.
    attainment: Annotated[float, Meta(gt=0, lt=1)] = 0.99
    # The most workers of both pools together, starting and leaving workers included. None sets no such limit.
    max_workers: PositiveInt | None = None
    # The same for the CPUs that they reserve (`num_cpus` of the pools, for each rank of a worker).
    max_cpus: NonNegativeFloat | None = None
    # The same for the GPUs that they reserve (`num_gpus` of the pools).
    max_gpus: NonNegativeFloat | None = None
    # The most that all workers may cost in an hour (`price_per_hour` of the pools), in any currency.
    max_price_per_hour: NonNegativeFloat | None = None
    # Finer settings of the planner, such as {downscale_delay_s: 600}; docs/autoscaling.md lists them.
    planner: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)

    def check_affordable(self, prefill: PoolCost, decode: PoolCost) -> None:
        """Check that the smallest pools and the configured pools respect the limits of both together. Raises `ConfigError`."""
        for name in ("min_replicas", "replicas"):
            counts = [min(getattr(pool, name), 1 << 53) for pool in (prefill, decode)]  # a larger number has no float
            for limit, most, cost in self._costs(prefill, decode):
                amount = cost[0] * counts[0] + cost[1] * counts[1]
                if most is not None and amount > most:
                    raise ConfigError(
                        f"autoscaling.{limit} is {most:g}, but prefill.{name} ({counts[0]}) and decode.{name} ({counts[1]}) "
                        f"together take {amount:g}"
                    )

    def limits(self, pool: PoolCost) -> bool:
        """Tell whether a limit of both pools together limits this pool."""
        return any(most is not None and cost > 0 for _, most, (cost, _) in self._costs(pool, pool))

    def _costs(self, prefill: PoolCost, decode: PoolCost) -> tuple[tuple[str, float | None, tuple[float, float]], ...]:
        """Return the name of each limit, its value, and what one worker of each pool takes of it."""
        return (
            ("max_workers", self.max_workers, (1.0, 1.0)),
            ("max_cpus", self.max_cpus, (prefill.cpus, decode.cpus)),
            ("max_gpus", self.max_gpus, (prefill.gpus, decode.gpus)),
            ("max_price_per_hour", self.max_price_per_hour, (prefill.price_per_hour, decode.price_per_hour)),
        )


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One pool: how many workers it has, what each needs from Ray, and which engine settings differ from the common ones."""

    # The pool has so many workers at the start.
    replicas: NonNegativeInt = 1
    # It never gets fewer by `pdserve scale` or by the planner. None is 1, or 0 if `replicas` is 0.
    min_replicas: NonNegativeInt | None = None
    # It never gets more. None sets no limit, but 0 if `replicas` is 0.
    max_replicas: NonNegativeInt | None = None
    # One worker costs so much in an hour, in any currency. `autoscaling.max_price_per_hour` limits the sum.
    price_per_hour: NonNegativeFloat = 0.0
    # While the sizes are decided automatically, "planner" decides that of this pool, or a function of your own, as in
    # "my_policies:prefill_size". It runs in a process of its own; docs/autoscaling.md says what it gets.
    scaling_policy: str = PLANNER
    # Ray reserves so many CPUs for each rank of a worker, all of them on one node; most workers have one rank. 0 reserves none,
    # which lets all workers start on one small machine: workers of 1 CPU each would wait there for ever.
    num_cpus: NonNegativeFloat = 0.0
    # Ray reserves so many GPUs for each worker, or such a share of one, and shows it no other. Above 0, the worker computes on
    # CUDA or does not start. While it is 0 in both pools, the GPUs that are there are divided among the workers (`gpus`).
    num_gpus: NonNegativeFloat = 0.0
    # A node must offer these custom resources of Ray for each worker, such as {big: 1.0}. Empty accepts any node.
    resources: dict[str, PositiveFloat] = field(default_factory=dict)
    # A node must have matching labels. Each name of a label is followed by a value, !value, in(one, other) or !in(one, other),
    # where ! means not: {zone: a} accepts nodes of zone a, and {zone: "!a"} accepts all others. Empty accepts any node.
    labels: dict[str, str] = field(default_factory=dict)
    # A worker is restarted so many times within an hour. After one more death it rests for a minute, then for two, and at last
    # for an hour. Deaths that follow the first one of a poison request do not count.
    max_restarts_per_hour: NonNegativeInt = 6
    # Workers of the pool serve OpenEngine, for control planes other than our router: worker 0 at this port, worker 1 at the
    # next one, and so on. 0 takes any free ports, which the workers' logs tell. None serves it nowhere.
    openengine_port: Port | None = None
    # These settings replace those of the section `engine` for this pool, such as {kv_cache_dtype: int8}.
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        if self.least > self.replicas:
            raise ConfigError(f"min_replicas is {self.least}, more than replicas ({self.replicas})")
        if self.most < self.replicas:
            raise ConfigError(f"max_replicas is {self.most}, fewer than replicas ({self.replicas})")
        if self.scaling_policy != PLANNER and not is_path(self.scaling_policy):
            raise ConfigError(f"scaling_policy must be {PLANNER}, or module:function of your own, got {self.scaling_policy!r}")
        for name, selector in self.labels.items():
            try:
                check_key(name)
                LabelSelector.parse(selector)
            except ValueError as exc:
                raise ConfigError(f"labels.{name}: {exc}") from exc

    @property
    def least(self) -> int:
        """The pool never gets fewer workers than this while the cluster runs."""
        return min(self.replicas, 1) if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """The pool never gets more workers than this while the cluster runs."""
        if self.max_replicas is not None:
            return self.max_replicas
        return max(MOST_WORKERS, self.replicas) if self.replicas else 0

    @property
    def offered(self) -> int:
        """A private Ray has room for so many workers of the pool."""
        return self.replicas if self.max_replicas is None else self.max_replicas


def _check_gpus(name: str, gpus: int | None, num_gpus: float, engine: EngineConfig) -> None:
    """Check that the GPUs, the device and the memory of the pool called `name` agree. Raises `ConfigError`.

    gpus: the limit of the GPUs of all workers, None without one.
    """
    sharing = int(1 / num_gpus + ROUNDING) if 0 < num_gpus < 1 else 1
    if sharing * engine.gpu_memory_utilization > 1 + ROUNDING and engine.kv_cache_memory is None:
        raise ConfigError(
            f"{name}.num_gpus is {num_gpus:g}, so {sharing} workers share a GPU and each takes "
            f"{engine.gpu_memory_utilization:g} of its memory: set engine.gpu_memory_utilization to {1 / sharing:.2g} or less"
        )
    if num_gpus:
        engine.check_gang_on_gpus(f"{name}.num_gpus is {num_gpus:g}")
    if engine.ranks > 1 and 0 < num_gpus < engine.ranks:
        raise ConfigError(
            f"{name}.num_gpus is {num_gpus:g}, and in {name}.engine {engine.gang}: set num_gpus to {engine.ranks}, one for each"
        )
    if num_gpus and engine.device == "cpu":
        raise ConfigError(f"{name}.num_gpus is {num_gpus:g} and its engine.device is cpu: set num_gpus to 0 or device to auto")
    if gpus == 0 and (num_gpus or engine.device == "cuda"):
        asks = f"num_gpus is {num_gpus:g}" if num_gpus else "engine.device is cuda"
        raise ConfigError(f"gpus is 0 and {name}.{asks}: leave one of the two out")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The whole cluster, as one YAML file describes it. The file names none of `GONE`."""

    GONE: ClassVar[Mapping[str, str]] = GONE

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
        for name in ("backend", "model", "load_format", "dtype", "block_size"):
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
            _check_gpus(name, self.gpus, pool.num_gpus, engine)
            if pool.openengine_port is not None and engine.backend != "pdserve":
                raise ConfigError(f"{name}.openengine_port: {_NOT_FOREIGN}")
            if engine.vllm.url and pool.most > 1:
                raise ConfigError(
                    f"{name}.engine.vllm.url is one server, which serves one worker: set {name}.max_replicas to 1, or leave "
                    "the url out and let each worker start a server of its own"
                )
        url = prefill.vllm.url.rstrip("/")
        if url and self.prefill.most and url == decode.vllm.url.rstrip("/"):
            raise ConfigError(
                f"engine.vllm.url is {url} in both pools, and vLLM cannot hand KV over to itself: name another server in "
                "decode.engine.vllm.url, or set prefill.replicas to 0"
            )
        self._check_autoscaling()

    def _check_autoscaling(self) -> None:
        """Check what the planner may do against what the cluster is. Raises `ConfigError`."""
        self.autoscaling.check_affordable(self.cost_of(self.prefill), self.cost_of(self.decode))
        if self.router.placement == "disaggregated" and not self.prefill.least:
            raise ConfigError("router.placement is disaggregated, so prefill.min_replicas must be at least 1")
        if self.slo_class not in self.router.classes():
            known = ", ".join(self.router.classes())
            raise ConfigError(f"autoscaling.slo_class {self.slo_class!r} is none of {known}")
        if self.autoscaling.enabled and self.unlimited:
            raise ConfigError(f"autoscaling.enabled: {self.unlimited}")

    def cost_of(self, pool: PoolConfig) -> PoolCost:
        """Return the sizes of a pool that are configured, and what one of its workers costs with all its ranks."""
        cpus = pool.num_cpus * self.engine_for(pool).ranks
        return PoolCost(pool.least, pool.replicas, cpus, pool.num_gpus, pool.price_per_hour)

    @property
    def slo_class(self) -> str:
        """The class of requests for whose targets the pools are sized."""
        return self.autoscaling.slo_class or self.router.default_class

    @property
    def unlimited(self) -> str:
        """The reason why the planner may not decide: nothing limits a pool. Empty: every pool has a limit."""
        for name in ("prefill", "decode"):
            pool = getattr(self, name)
            if pool.most >= MOST_WORKERS and not self.autoscaling.limits(self.cost_of(pool)):
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
    # The worker connects to the link port of this router. Empty: it has none, and gets its requests by OpenEngine alone.
    router_address: str
    engine: EngineConfig = field(default_factory=EngineConfig)
    lease: LeaseConfig = field(default_factory=LeaseConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    cluster_token: str = ""
    # Other workers connect to this address. The transport of KV uses the network interface that has it.
    host: str = "127.0.0.1"
    # Other workers connect to this port. 0 takes any free port.
    port: Port = 0
    # The worker serves OpenEngine at this port of `host`, for control planes other than our router. 0 takes any free port.
    # None serves it nowhere.
    openengine_port: Port | None = None
    # True lets `host` be an address that others reach. Whoever reaches the transport there can write into KV.
    allow_public_bind: bool = False
    # Other workers are told to connect to this address. None takes `host`.
    advertise_host: str | None = None
    # As those of the router. A worker that has lost its router drops its work.
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
        if not self.router_address and self.openengine_port is None:
            raise ConfigError("router_address is empty and openengine_port is not set: nobody could give the worker a request")
        if self.openengine_port is not None and self.engine.backend != "pdserve":
            raise ConfigError(f"openengine_port: {_NOT_FOREIGN}")


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
