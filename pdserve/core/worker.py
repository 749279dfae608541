"""The state of a worker: the fixed part, with which it introduces itself, and the present part, which each heartbeat tells. The
router, metrics and operators use the same types.

A new field is named here and in `proto/`; then only its source and its user change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import InvalidRequest
from pdserve.core.ids import Incarnation, WorkerId


class Role(Enum):
    """The pool that a worker belongs to."""

    __hash__ = object.__hash__  # members are singletons; a hash of their names is computed in Python at each look-up

    PREFILL = "prefill"
    DECODE = "decode"


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

    @property
    def kv_tokens(self) -> int:
        """The number of tokens whose KV the worker's pool holds."""
        return self.block_size * self.num_blocks


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
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    engine_stalled_s: float = 0.0
    numerical_errors: int = 0
    last_handle: int = 0
    """The handle of the last command that these counts include. 0: they include none."""
    kv_corrupt_blocks: int = 0
    kv_rotted_blocks: int = 0
    prompt_tokens_per_s: float = 0.0
    """The prompt tokens that the engine computes in a second of steps that compute prompts, of late. 0: too few to tell."""
    decode_step_s: float = 0.0
    """The time of a step that computes no prompt, of late. 0: there was none."""
    max_num_batched_tokens: int = 0
    """A step has at most so many tokens. An operator may change it while the worker runs. 0: the worker does not say."""


def check_step_tokens(hello: WorkerHello, max_num_batched_tokens: int) -> None:
    """Raise `InvalidRequest` unless the worker's steps may have at most so many tokens.

    A step needs a block's tokens so that prompts go on, and a token for each other sequence that may run. It has no memory for
    more tokens than at the worker's start.
    """
    most = hello.max_num_batched_tokens
    least = min(hello.block_size + hello.max_num_seqs - 1, most)
    if not least <= max_num_batched_tokens <= most or not most:
        limits = f"from {least} to {most}" if most else "nothing, since it does not say how large its steps are"
        said = f"{max_num_batched_tokens} is out of range; worker {hello.worker_id!r} takes {limits}"
        raise InvalidRequest(said, field="max_num_batched_tokens")


def niced(worker_ids: Sequence[str], niceness: int) -> str:
    """Return the warning, which says what to do. Ray gives its workers a niceness of 15: the kernel then gives an ordinary
    process 28 times the share of a core (weights 1024 and 36 of Linux's scheduler)."""
    return (
        f"{', '.join(worker_ids)}: niceness {niceness}, so ordinary processes of the machine take the cores first. "
        "Start Ray's nodes with RAY_worker_niceness=0 in the environment of `ray start`"
    )
