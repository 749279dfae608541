"""Constants that no file sets: numbers of leases and of the router that nobody could choose better than the code does.

They have fields because simulations and tests run with others: with short times, or without retries. `GONE` names those that a
file could set once, and says why nothing need be done about them.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True)
class LeaseConstants:
    """The times of a lease, and of the transfer under it. Each process measures time on its own clock."""

    # A lease that nobody renews ends after so long: 30 renewals, so that no pause of a machine loses one.
    ttl_s: PositiveFloat = 30.0
    # The reader renews its leases at least this often. The answers also show that the lender lives.
    heartbeat_s: PositiveFloat = 1.0
    # A lender that answers no renewal for so long counts as lost. The router's default for workers is the same.
    lost_s: PositiveFloat = 5.0
    # A transfer may take this time, plus four times its bytes divided by `transfer_bandwidth_bytes_s`.
    transfer_deadline_floor_s: NonNegativeFloat = 5.0
    # This bandwidth is pessimistic: 1 Gbit Ethernet. A pair of workers that measures less gets a longer deadline.
    transfer_bandwidth_bytes_s: PositiveFloat = 1e8
    # The reader waits so long for the answer to a commit.
    commit_timeout_s: PositiveFloat = 2.0
    # A transfer fails when prefill makes no progress for so long. Otherwise renewals could hold a lease for ever.
    stalled_s: PositiveFloat = 60.0

    @property
    def renew_interval_s(self) -> float:
        """The reader renews a lease this often. Five renewals may be lost before the lease is."""
        return min(self.heartbeat_s, self.ttl_s / 6)

    def __post_init__(self) -> None:
        for name in ("lost_s", "stalled_s"):  # one lost renewal must neither lose a lender nor end a transfer
            if not getattr(self, name) >= 2 * self.renew_interval_s:
                raise ConfigError(
                    f"lease.{name} must be at least {2 * self.renew_interval_s:g}, twice the pause between renewals, which is "
                    f"the smaller of lease.heartbeat_s ({self.heartbeat_s:g}) and lease.ttl_s / 6 ({self.ttl_s / 6:g}), "
                    f"got {getattr(self, name)}"
                )


@dataclass(frozen=True, slots=True)
class RouterConstants:
    """The numbers by which the router finds losses, tries again, and bounds what it keeps."""

    # The router refuses further requests while so many of their tokens wait. None follows the workers.
    max_queued_tokens: PositiveInt | None = None
    # A request is cancelled when its client takes nothing for so long.
    stalled_client_s: PositiveFloat = 30.0
    # Each worker sends a heartbeat this often, and the router answers it.
    heartbeat_interval_s: PositiveFloat = 1.0
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


_LEASE: Final = "leases keep their times by themselves"
_RETRIES: Final = "the router bounds retries by what it admits"
_ASIDE: Final = "a pair of workers whose transfer failed rests for 5 s, and at most for 60 s"

GONE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lease.ttl_s": _LEASE,
        "lease.heartbeat_s": _LEASE,
        "lease.lost_s": _LEASE,
        "lease.transfer_deadline_floor_s": "the deadline of a transfer follows the rate that its pair of workers measures",
        "lease.transfer_bandwidth_bytes_s": "the deadline of a transfer follows the rate that its pair of workers measures",
        "lease.commit_timeout_s": "a commit is asked for three times, for 2 s each",
        "lease.commit_tries": "a commit is asked for three times, for 2 s each",
        "lease.stalled_s": "a transfer ends when prefill makes no progress for 60 s",
        "router.metrics_on_port": "the port of metrics is for this machine alone, unless router.metrics_host says more",
        "router.metrics_per_worker": "the page /metrics?workers=1 shows each worker",
        "router.max_queued_tokens": "the queue follows the room of the workers; router.max_queued_requests bounds it",
        "router.max_inflight_body_bytes": "large bodies have 64 MiB together, or router.max_body_bytes if that is more",
        "router.stalled_client_s": "a client that takes nothing for 30 s is dropped",
        "router.heartbeat_interval_s": "heartbeats come every second; router.heartbeat_lost_s says how many may be missed",
        "router.probe_workers": "a worker always gets requests only after KV has passed through it",
        "router.max_attempts": _RETRIES,
        "router.retry_share": _RETRIES,
        "router.retry_burst": _RETRIES,
        "router.eject_workers": "at least half of a pool always stays, and whoever was ejected comes back on trial",
        "router.recovery_wait_s": "a retried request waits for 30 s for a worker, and no longer than its deadline",
        "router.pair_aside_s": _ASIDE,
        "router.pair_aside_max_s": _ASIDE,
        "router.record_max_bytes": "a recording ends at 64 MiB, and replays up to there",
        "autoscaling.policy_timeout_s": "a policy has 1 s, or autoscaling.interval_s if that is less",
        "autoscaling.planner.horizon_s": "a backlog is served within two minutes",
        "autoscaling.planner.step_memory_s": "the times of steps are known for an hour",
        "autoscaling.planner.season_buckets": "a season has 288 means: of five minutes each if it is a day",
        "autoscaling.planner.prompt_variation": "waits are those of prompts of exponential lengths, and misses correct them",
        "autoscaling.planner.tpot_share": "misses of the target correct what it leaves out",
        "autoscaling.planner.kv_share": "misses of the targets correct what it leaves out",
        "autoscaling.planner.min_correction": "the correction moves between 0.75 and max_correction",
        "autoscaling.planner.correction_growth_s": "the correction grows as fast as requests miss their targets",
        "autoscaling.planner.budget_s": "misses are counted over a day",
    }
)
"""Each setting that a file for an earlier version may name, and why nothing need be done."""
