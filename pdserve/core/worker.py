"""The state of a worker: the fixed part, with which it introduces itself, and the present part, which each heartbeat reports.
The router, metrics and operators use the same types.

A new field is named here and in `proto/`; then only its source and its user change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.shards import Degrees
from pdserve.core.speculation import DraftCounts


class Role(Enum):
    """The pool that a worker belongs to."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    PREFILL = "prefill"
    DECODE = "decode"


class VersionRange(NamedTuple):
    """The versions of a protocol that one side speaks: all from the oldest to the newest."""

    oldest: int
    newest: int

    def common(self, other: VersionRange) -> int | None:
        """Return the newest version that both sides speak. None: there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


LINK_VERSIONS: Final = VersionRange(0, 5)
"""The versions of the link's protocol that this release speaks. A side without versions speaks version 0. Version 1 has
`Refused` and `Flip`; in version 2 a budget may have `max_num_seqs`. `SPEC_LINK_VERSIONS` has the fields of requests that came
later. From version 5 on, a link has beats beside its stream, and a broken stream is taken up again."""
SEQS_LINK_VERSION: Final = 2
CONSTRAINT_LINK_VERSION: Final = 3
TEXT_LINK_VERSION: Final = 4
RESUME_LINK_VERSION: Final = 5
SPEC_LINK_VERSIONS: Final[tuple[tuple[str, int, Callable[[RequestSpec], bool]], ...]] = (
    ("structured_outputs", CONSTRAINT_LINK_VERSION, lambda spec: spec.constraint is not None),
    ("include_stop_str_in_output", TEXT_LINK_VERSION, lambda spec: spec.sampling.include_stop_str_in_output),
    ("skip_special_tokens", TEXT_LINK_VERSION, lambda spec: not spec.sampling.skip_special_tokens),
    ("prompt_logprobs", TEXT_LINK_VERSION, lambda spec: spec.sampling.prompt_logprobs is not None),
)
"""The fields of a request that a worker of an older link version would ignore. Each has its name, the first version that knows
it, and a function that tells whether a request uses it. Such a request is never sent to such a worker."""
FIELDS_LINK_VERSION: Final = max(version for _, version, _ in SPEC_LINK_VERSIONS)
"""A worker of this link version or a later one knows all of them."""
FEATURES: Final[Mapping[str, Callable[[RequestSpec], bool]]] = MappingProxyType(
    {
        **{name: uses for name, _, uses in SPEC_LINK_VERSIONS},
        "logprobs": lambda spec: spec.sampling.logprobs is not None,
        "logit_bias": lambda spec: bool(spec.sampling.logit_bias),
        "min_tokens": lambda spec: spec.sampling.min_tokens > 0,
        "presence_penalty": lambda spec: spec.sampling.presence_penalty != 0.0,
        "frequency_penalty": lambda spec: spec.sampling.frequency_penalty != 0.0,
        "sampling": lambda spec: not spec.sampling.greedy,
        "speculation": lambda spec: spec.draft_limit is not None,
    }
)
"""The features of requests that an engine may lack, or may have only where one worker computes the whole request. Each has its
name, mostly that of the field that asks for it, and a function that tells whether a request uses it."""
PEER_VERSIONS: Final = VersionRange(2, 2)
"""The versions of the protocol between workers that this release speaks. A worker without versions speaks version 0. In version
1 both sides name their versions at the handshake. In version 2 tickets and metadata of transports list ranks, and checksums of
parts of a block add up, so no earlier version can be read."""


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The state of a worker that does not change while it runs. The worker introduces itself with it."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    address: str
    model_fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    dtype: str
    kv_bytes_per_token: int
    pid: int = 0
    step_timeout_s: float = 0.0
    """The worker gives itself up after this time without an engine step while work waits. 0: the worker does not watch its
    engine."""
    niceness: int = 0  # of the worker process; above 0, ordinary processes of its machine run first
    quantization: str = ""
    """The format of the quantised weights. Empty: the weights are not quantised."""
    max_num_batched_tokens: int = 0
    """The largest number of tokens in a step for which the worker has memory. 0: the worker does not say."""
    draining: bool = False
    """The worker takes no new request."""
    flips: int = 0
    """The role flips since the start of the process."""
    flip_obstacle: str = ""
    """The reason why the worker cannot take the other role. Empty: nothing prevents it."""
    oldest_link_version: int = 0
    link_version: int = 0
    """The newest version of the link's protocol that the worker speaks. It speaks all versions from the oldest one on."""
    oldest_peer_version: int = 0
    peer_version: int = 0
    """The newest version of the protocol between workers that it speaks. It speaks all versions from the oldest one on."""
    peak_flops_per_s: float = 0.0
    peak_bytes_per_s: float = 0.0
    """The bytes that the worker's device can read from its memory in a second. 0: unknown, as for the operations above."""
    held_tokens: int = 0
    """The most tokens whose KV a decoding request of any length holds, because all layers have sliding windows. 0: a request
    holds the KV of all its tokens."""
    model_digest: str = ""
    """The name of the model with every byte of its weights. Empty: the worker's release does not compute the name."""
    numerics: str = ""
    """The name of the bits that the worker computes. Workers with one name give equal tokens. Empty: a token depends on the
    batch in which it is computed, or the worker's release does not compute the name."""
    isa: str = ""
    """The instruction set of the worker's compiled steps. Empty: torch computes the steps."""
    engine: str = ""
    """The name and release of the engine that computes. Empty: it is pdserve's own. Another engine is foreign: its tokens may
    depend on their batch, and KV goes between two such engines by their own means."""
    refuses: tuple[str, ...] = ()
    """The `FEATURES` of requests that the worker cannot serve."""
    undivided: tuple[str, ...] = ()
    """The `FEATURES` whose requests the worker serves only if it computes them from the prompt to the end."""
    unresumed: tuple[str, ...] = ()
    """The `FEATURES` whose requests the worker cannot take up behind output that exists already. Such a request is never moved
    or computed again once the client has a token of it."""
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    """The degrees of the worker, of which `degrees` makes one value. 0: the worker does not say, and has one rank."""
    enable_expert_parallel: bool = False
    cores: int = 0
    """The threads of all ranks of the worker. 0: it computes on GPUs, or does not say."""

    @property
    def degrees(self) -> Degrees:
        """The degrees of the worker. A worker with more than one rank is a gang."""
        return Degrees(max(1, self.tensor_parallel_size), max(1, self.pipeline_parallel_size), self.enable_expert_parallel)

    @property
    def kv_tokens(self) -> int:
        """The number of tokens whose KV the worker's pool holds."""
        return self.block_size * self.num_blocks

    @property
    def link_versions(self) -> VersionRange:
        """The versions of the link's protocol that the worker speaks."""
        return VersionRange(self.oldest_link_version, self.link_version)

    @property
    def peer_versions(self) -> VersionRange:
        """The versions of the protocol between workers that the worker speaks."""
        return VersionRange(self.oldest_peer_version, self.peer_version)

    def slots(self, load: WorkerLoad) -> int:
        """Return how many sequences may run on the worker now. An operator may have lowered the number since the worker's
        start."""
        return min(load.max_num_seqs or self.max_num_seqs, self.max_num_seqs)

    @property
    def foreign(self) -> bool:
        """True when the engine is not pdserve's own."""
        return bool(self.engine)

    def may_pair(self, other: WorkerHello) -> bool:
        """Tell whether KV may go between the two workers: they speak a common version of the protocol between workers, and
        their weights have one digest. Weights of unknown digest may be any weights, so such workers pair only with each
        other."""
        common = self.oldest_peer_version <= other.peer_version and other.oldest_peer_version <= self.peer_version
        return common and self.model_digest == other.model_digest

    @property
    def pairing(self) -> tuple[VersionRange, str]:
        """The facts by which `may_pair` decides: workers with equal facts have the same partners."""
        return self.peer_versions, self.model_digest


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The present state of a worker. Each heartbeat replaces the last one."""

    blocks: BlockCounts
    queued_requests: int = 0
    queued_tokens: int = 0
    running_sequences: int = 0
    leases_held: int = 0
    loop_lag_ms: float = 0.0
    draining: bool = False
    foreign_blocks: int = 0
    """Blocks that a foreign engine keeps for a reader that will not come. Only the engine frees them, after a time."""
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    engine_stalled_s: float = 0.0
    numerical_errors: int = 0
    last_handle: int = 0
    """The handle of the last command that these counts include. 0: they include none."""
    kv_corrupt_blocks: int = 0
    kv_rotted_blocks: int = 0
    prompt_tokens_per_s: float = 0.0
    """The prompt tokens that the engine computed in a second of its recent prompt steps. 0: there were too few steps."""
    decode_step_s: float = 0.0
    """The time of a recent step that computed no prompt. 0: there was no such step."""
    max_num_batched_tokens: int = 0
    """The most tokens of a step. An operator may change this number while the worker runs. 0: the worker does not report it."""
    max_num_seqs: int = 0
    """The most sequences that run. An operator may change it too; just after it was lowered, more may run. 0: not reported."""
    computed_prompt_tokens: int = 0
    """The prompt tokens that the engine has computed since the start of the incarnation. The counts below begin there too."""
    output_tokens: int = 0
    prompt_busy_s: float = 0.0
    """The time of all steps that computed prompts."""
    prompt_steps: int = 0
    """The number of steps that computed prompts. 0 although their time is above 0: the worker does not count them."""
    decode_busy_s: float = 0.0
    """The time of all other steps."""
    decode_steps: int = 0
    """The number of all other steps. 0 although their time is above 0: the worker does not count them."""
    prompt_flops: float = 0.0
    """The floating-point operations of the steps that computed prompts."""
    decode_read_bytes: float = 0.0
    """The bytes of weights and KV that all other steps have read."""
    uptime_s: float = 0.0
    """The time since the start of the incarnation, by the worker's own clock. The counts above hold at this time."""
    experts: ExpertLoad | None = None
    """The spread of tokens over the experts of the model. None: it has no experts, or no token has passed them."""
    speculation: DraftCounts | None = None
    """The drafts of the incarnation so far. None: the worker drafts nothing."""


def used_features(spec: RequestSpec, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the named features that the request uses. A name that this release does not know is used by no
    request."""
    return tuple(name for name in names if name in FEATURES and FEATURES[name](spec))


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """The differences between an engine and pdserve's own. `WorkerHello` explains the fields."""

    engine: str = ""
    refuses: tuple[str, ...] = ()
    undivided: tuple[str, ...] = ()
    unresumed: tuple[str, ...] = ()


OWN_ENGINE: Final = EngineTraits()
"""pdserve's own engine."""


def newest_field(spec: RequestSpec) -> tuple[str, int]:
    """Return the field of the request that needs the newest link version, and this version. Empty and 0: every worker knows all
    fields of the request."""
    used = [(name, version) for name, version, uses in SPEC_LINK_VERSIONS if uses(spec)]
    return max(used, key=lambda one: one[1], default=("", 0))


def check_budget(hello: WorkerHello, max_num_batched_tokens: int, max_num_seqs: int = 0) -> None:
    """Raise `InvalidRequest` unless the worker may have these limits. 0: the limit stays as it is; only one of them may be 0.

    The worker has no memory for more sequences than at its start. A link older than `SEQS_LINK_VERSION` would ignore the number
    of sequences.
    """
    if max_num_batched_tokens or not max_num_seqs:
        check_step_tokens(hello, max_num_batched_tokens)
    if not max_num_seqs:
        return
    if hello.link_version < SEQS_LINK_VERSION:
        said = f"worker {hello.worker_id!r} speaks link version {hello.link_version}, which lacks it: upgrade the worker"
        raise InvalidRequest(said, field="max_num_seqs")
    if max_num_seqs > hello.max_num_seqs:
        said = f"{max_num_seqs} is out of range; worker {hello.worker_id!r} takes from 1 to {hello.max_num_seqs}"
        raise InvalidRequest(said, field="max_num_seqs")


def check_step_tokens(hello: WorkerHello, max_num_batched_tokens: int) -> None:
    """Raise `InvalidRequest` unless the worker's steps may have this limit of tokens.

    A step needs a block's tokens so that prompts go on, and a token for each other sequence that may run. The worker has no
    memory for more tokens than at its start. A foreign engine that does not tell its limit keeps that of its start.
    """
    if hello.foreign and not hello.max_num_batched_tokens:
        raise InvalidRequest(
            f"worker {hello.worker_id!r} runs {hello.engine}, which takes this limit only at its start: set "
            "engine.max_num_batched_tokens and start the worker again, or limit its sequences (--max-num-seqs)",
            field="max_num_batched_tokens",
        )
    most = hello.max_num_batched_tokens
    least = min(hello.block_size + hello.max_num_seqs - 1, most)
    if not least <= max_num_batched_tokens <= most or not most:
        limits = f"from {least} to {most}" if most else "nothing, since it does not say how large its steps are"
        said = f"{max_num_batched_tokens} is out of range; worker {hello.worker_id!r} takes {limits}"
        raise InvalidRequest(said, field="max_num_batched_tokens")


def shown_digest(digest: str) -> str:
    """Return the beginning of a digest, by which people tell models apart. An empty digest is unknown."""
    return digest[:16] or "unknown"


def digests_differ(peer: str, theirs: str, here: str, ours: str) -> str:
    """Return the message that two workers have different weights under one fingerprint, and what to do."""
    return (
        f"{peer} has loaded weights of digest {shown_digest(theirs)} and {here} has {shown_digest(ours)}: load the same files "
        "on both, or upgrade the one whose digest is unknown"
    )


def niced(worker_ids: Sequence[str], niceness: int) -> str:
    """Return the warning, which says what to do. Ray gives its workers a niceness of 15: the kernel then gives an ordinary
    process 28 times the share of a core (weights 1024 and 36 of Linux's scheduler)."""
    return (
        f"{', '.join(worker_ids)}: niceness {niceness}, so ordinary processes of the machine take the cores first. "
        "Start Ray's nodes with RAY_worker_niceness=0 in the environment of `ray start`"
    )


# The load of experts --------------------------------------------------------------------------------------------------
#
# The spread of a model's tokens over the experts of its layers, as a worker reports it.

MOST_HOT: Final = 8
"""Layers of which a worker names the hottest expert. A heartbeat stays small, however many experts the model has."""

LayerCounts = tuple[int, Sequence[int]]
"""The number of a layer, and the tokens that chose each of its experts."""


@dataclass(frozen=True, slots=True)
class HotExpert:
    """The expert of a layer that most tokens chose. imbalance: its tokens, divided by the mean of the layer's experts."""

    layer: int
    expert: int
    imbalance: float


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The spread of tokens over experts, since the start of the worker's process."""

    choices: int
    """The tokens of all experts of all layers."""
    imbalance: float
    """The tokens of a layer's hottest expert, divided by the mean of the layer's experts, as a mean over layers. 1: even."""
    worst_imbalance: float
    """The same of the layer in which it is largest."""
    hottest: tuple[HotExpert, ...]
    """The hottest experts of the most uneven layers, at most `MOST_HOT`, the most uneven layer first."""


def expert_load(layers: Iterable[LayerCounts]) -> ExpertLoad | None:
    """Return the spread of these counts; None when no token is counted. Of equal experts and layers the lowest comes first."""
    hot, choices = [], 0
    for layer, counts in layers:
        total = sum(counts)
        if total:
            most = max(counts)
            hot.append(HotExpert(layer, counts.index(most), most * len(counts) / total))
            choices += total
    if not hot:
        return None
    hot.sort(key=lambda one: (-one.imbalance, one.layer))
    mean = sum([one.imbalance for one in hot]) / len(hot)
    return ExpertLoad(choices, mean, hot[0].imbalance, tuple(hot[:MOST_HOT]))
