"""The state of a cluster as the planner sees it: plain numbers of one interval.

None stands for a value that is missing: nobody measured it. A value that is no finite number counts as missing too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemandObserved:
    """The load that clients brought in the interval, and what of it waits in the router at its end."""

    requests_per_s: float | None = None
    """Requests that were admitted or refused because of the load."""
    prompt_tokens_per_s: float | None = None
    """Prompt tokens of the requests that were admitted, those with cached KV included."""
    output_tokens_per_s: float | None = None
    """Tokens that were sent to clients."""
    queued_requests: float | None = None
    queued_prompt_tokens: float | None = None
    longest_wait_s: float | None = None
    refused_per_s: float | None = None
    """Requests that were refused because of the load."""
    prefill_share: float | None = None
    """The share of the prompt tokens that prefill workers got, [0, 1]. Decode workers compute the rest."""


@dataclass(frozen=True, slots=True)
class PoolObserved:
    """One pool in the interval. Rates and shares concern its ready workers."""

    ready: int = 0
    """Workers that take requests."""
    coming: int = 0
    """Workers that were asked for, load, or change into this role, and are not ready yet."""
    leaving: int = 0
    """Workers that drain in order to stop. A worker that changes its role counts in its new pool alone, as coming."""
    tokens_per_s: float | None = None
    """Tokens that the whole pool computed: prompt tokens of prefill workers, output tokens of decode workers."""
    busy_tokens_per_s: float | None = None
    """Tokens that one worker computes in a second in which its engine is busy."""
    utilisation: float | None = None
    """The share of the interval in which the engines were busy, [0, 1], as a mean over the workers."""
    step_s: float | None = None
    """The time of a step; of decode workers, of a step without a prompt."""
    step_sequences: float | None = None
    """The sequences of one step of decode workers, as a mean over the steps of the interval."""
    sequences: float | None = None
    """Running sequences of one worker, as a mean over the workers."""
    max_sequences: float | None = None
    """Sequences that one worker may run at once."""
    kv_used: float | None = None
    """The share of the blocks that are held, [0, 1], as a mean over the workers."""
    queued_tokens: float | None = None
    """Prompt tokens that wait on the pool's workers."""
    cached_share: float | None = None
    """The share of the prompt tokens whose KV the workers had, [0, 1]."""
    prompt_share: float | None = None
    """The share of the interval that prompts took, [0, 1], as a mean over the workers. Where a step also decodes, only what it
    takes longer than a step without a prompt counts."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Requests of a class that ended in the interval and missed a target, by what took most of the time."""

    queue: float = 0.0
    """TTFT: waiting for room on a decode worker."""
    prefill_queue: float = 0.0
    """TTFT: waiting on the prefill worker."""
    prefill: float = 0.0
    """TTFT: computing the prompt on the prefill worker."""
    colocated: float = 0.0
    """TTFT: the prompt on the decode worker, its wait there included."""
    transfer: float = 0.0
    """TPOT: the transfer of KV after the first token."""
    first_decode: float = 0.0
    """TPOT: the wait on the decode worker for the first decoded token."""
    steps: float = 0.0
    """TPOT: the steps."""
    failure: float = 0.0
    """TTFT or TPOT: attempts that failed. A request that missed both counts twice."""


@dataclass(frozen=True, slots=True)
class Observations:
    """The whole cluster in one interval."""

    now_s: float
    """The end of the interval, by a clock that only counts up."""
    interval_s: float
    demand: DemandObserved = DemandObserved()
    prefill: PoolObserved = PoolObserved()
    decode: PoolObserved = PoolObserved()
    ttft_met: float | None = None
    """The share of the requests of the class that met its target for the first token, [0, 1]. None: there were none."""
    tpot_met: float | None = None
    """The share of those that met its target for the time between tokens."""
    ended: float | None = None
    """The requests of the class that ended in the interval and had a target."""
    missed: Missed = Missed()
    refused: float | None = None
    """The requests of the class that were refused in the interval because of the load."""
    first_gap_s: float | None = None
    """The mean time of its requests between the first token and the first decoded one."""
