"""The settings of a search for goodput: how exact it is, and the layouts that it tries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.trial import TrialSettings


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """The layouts that a search may try, and how exact it is. A search goes on only with equal settings."""

    slo: Slo
    ranks: int
    """The ranks that every layout has. Where no worker is a gang, they are its workers."""
    prefills: tuple[int, ...]
    """The numbers of ranks in the prefill pool, the most promising first. 0: all workers are colocated."""
    chunks: tuple[int, ...]
    """The sizes of chunks (`max_num_batched_tokens`)."""
    chunk_tokens: int
    """The size with which the splits are compared first: one of `chunks`."""
    max_num_seqs: int
    """The most sequences of a step that the workers were started with."""
    first_rate_per_s: float
    """The rate at which the search begins: a guess."""
    mean_output_tokens: float
    attainment: float = 0.9
    """The share of the requests that should meet both targets."""
    tolerance: float = 0.05
    """An interval of the goodput is narrow enough when its ends differ by this share."""
    max_point_s: float = 120.0
    """The longest run of one rate."""
    min_rate_per_s: float = 0.0
    """No lower rate is tried. 0: a 256th of the first rate."""
    max_points: int = 18
    """The most points of one layout."""
    degrees: tuple[tuple[int, int], ...] = ((1, 1),)
    """The ranks of one prefill and of one decode worker, each pair once, those of the baseline first."""

    def __post_init__(self) -> None:
        """Raise `ConfigError`, which names the field and its limit."""
        limits = (
            ("attainment", 0.0 < self.attainment < 1.0, f"{self.attainment:g} is not between 0 and 1, both excluded"),
            ("tolerance", 0.01 <= self.tolerance <= 1.0, f"{self.tolerance:g} is not between 0.01 and 1"),
            ("splits", bool(self.prefills), "names no split, but at least one is needed"),
            (
                "splits",
                all(0 <= prefill < self.ranks for prefill in self.prefills),
                f"names {self.prefills} prefill workers of {self.ranks} workers, but at least one worker must decode",
            ),
            (
                "degrees",
                all(any(self.splits(*pair)) for pair in self.degrees),
                f"{self.degrees}: no split of {self.ranks} ranks into workers of one of these pairs uses all of them",
            ),
            ("chunks", self.chunk_tokens in self.chunks, f"{self.chunks} lacks the first size, {self.chunk_tokens}"),
            ("chunks", min(self.chunks, default=0) >= 1, f"{self.chunks} must all be at least 1 token"),
            ("max_num_seqs", self.max_num_seqs >= 1, f"{self.max_num_seqs} is below 1"),
            ("first_rate", self.first_rate_per_s > 0.0, f"{self.first_rate_per_s:g} requests a second is not above 0"),
            ("ttft", (self.slo.ttft_s or self.slo.tpot_s) is not None, "ttft and tpot are both missing: give at least one"),
            (
                "max_point_s",
                self.max_point_s > self.warm_s,
                f"{self.max_point_s:g} s is not longer than {self.warm_s:g} s, for which a request within its targets may stay:"
                " give a larger --budget-minutes or --max-point-s",
            ),
        )
        for field, holds, message in limits:
            if not holds:
                raise ConfigError(f"{field}: {message}")

    @property
    def floor_per_s(self) -> float:
        """The lowest rate that is tried."""
        return self.min_rate_per_s or self.first_rate_per_s / 256

    @property
    def decidable_per_s(self) -> float:
        """The lowest rate at which the longest run has enough requests for a yes: 80, if all of them are good."""
        return 80.0 / (self.max_point_s - self.warm_s)

    @property
    def warm_s(self) -> float:
        """The longest stay of a mean request within its targets: by then, the cluster is as full as it gets."""
        return (self.slo.ttft_s or 0.0) + (self.slo.tpot_s or 0.0) * self.mean_output_tokens

    def min_yes_s(self, resolution: float) -> float:
        """Return the least time of a run that may say yes, after it is warm.

        A rate above what the cluster can serve, by `resolution`, makes the wait pass the target of TTFT in a third of it.
        """
        return 3.0 * (self.slo.ttft_s or 1.0) / resolution

    @property
    def reachable_tolerance(self) -> float:
        """The tolerance that the longest run allows: it is too short to tell rates apart that differ by less."""
        measured_s = self.max_point_s - min(self.warm_s, self.max_point_s / 2)
        return max(self.tolerance, self.min_yes_s(1.0) / measured_s)

    def splits(self, prefill_ranks: int, decode_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of prefill workers of these degrees, as `split_ranks` does."""
        return split_ranks(self.prefills, self.ranks, prefill_ranks, decode_ranks)

    def base(self, prefill: int, degrees: tuple[int, int] = (1, 1)) -> Layout:
        """Return a split with the settings with which splits are compared first. prefill: the workers of that pool."""
        decode = (self.ranks - prefill * degrees[0]) // degrees[1]
        return Layout(prefill, decode, self.chunk_tokens, self.max_num_seqs, *degrees)

    def trial(self, rate_per_s: float, min_yes_s: float, max_s: float) -> TrialSettings:
        """Return the limits of a test of one rate."""
        warm_s = min(self.warm_s, max_s / 2)
        return TrialSettings(self.attainment, rate_per_s, warm_s, min(min_yes_s, 0.9 * (max_s - warm_s)), max_s)


def split_ranks(
    prefills: Iterable[int], ranks: int, prefill_ranks: int, decode_ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of prefill workers without a prefill pool, which is 0 or nothing, and those of two pools.

    prefills: the ranks that the prefill pool may have, of all `ranks`. Workers have `prefill_ranks` and `decode_ranks` each.
    Every split uses all ranks, so all layouts cost the same. Workers are colocated only where all are alike.
    """
    fits = [
        pool // prefill_ranks
        for pool in prefills
        if pool % prefill_ranks == 0 and (ranks - pool) % decode_ranks == 0 and (pool or prefill_ranks == decode_ranks)
    ]
    return tuple(one for one in fits if not one), tuple(one for one in fits if one)


# The layouts that a search tries, from what the operator wrote and what the workers say. Pure.


CHUNKS: Final = (128, 256, 512, 1024)
AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """The limits that the workers of a cluster were started with, the smallest one of each."""

    workers: int
    chunk_tokens: int
    """The largest step in tokens. 0: a worker did not say."""
    max_num_seqs: int
    degrees: tuple[int, int] = (1, 1)
    """The ranks of one prefill and of one decode worker."""
    prefill: int = 0
    """The prefill workers."""

    @property
    def ranks(self) -> int:
        """The ranks of all workers."""
        return self.prefill * self.degrees[0] + (self.workers - self.prefill) * self.degrees[1]


def limits_of(state: inference_pb2.GetClusterStateResponse) -> SpaceLimits:
    """Return the limits of the linked workers. Raises `ConfigError` for none, and for gangs of several sizes in a pool."""
    hellos = [one.hello for one in state.workers]
    if not hellos:
        raise ConfigError("no worker is linked to this router: wait until `pdserve status` shows the workers")
    chunk_tokens = min(one.max_num_batched_tokens for one in hellos)
    pools: list[list[int]] = [[], []]
    for hello in hellos:
        ranks = max(1, hello.tensor_parallel_size) * max(1, hello.pipeline_parallel_size)
        pools[hello.role != common_pb2.ROLE_PREFILL].append(ranks)
    for name, pool in zip(("prefill", "decode"), pools, strict=True):
        if len(set(pool)) > 1:
            raise ConfigError(
                f"{name} workers have {' and '.join(map(str, sorted(set(pool))))} ranks: a search needs pools of equal "
                "workers. Give --tensor-parallel-size, and it starts clusters of each degree itself"
            )
    prefill, decode = (pool[:1] for pool in pools)
    degrees = (*(prefill or decode), *(decode or prefill))
    seqs = min(one.max_num_seqs for one in hellos)
    return SpaceLimits(len(hellos), chunk_tokens, seqs, (degrees[0], degrees[1]), len(pools[0]))


def chunks_of(text: str, limits: SpaceLimits) -> tuple[int, ...]:
    """Read `--chunks`, numbers with commas between. Raises `ConfigError` for one above what the workers have memory for.

    "auto" means those of `CHUNKS` that fit, or else the largest step of the workers. Workers that do not say how large their
    steps are keep them, so that there is nothing to try.
    """
    most = limits.chunk_tokens
    if text == AUTO and not most:
        return CHUNKS[:1]
    if text == AUTO:
        return tuple(one for one in CHUNKS if not most or one <= most) or (most,)
    try:
        chunks = tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--chunks: {text!r} is not a list of whole numbers with commas between, nor {AUTO}") from None
    if chunks[0] < 1 or (most and chunks[-1] > most):
        raise ConfigError(f"--chunks: {text} must be from 1 to {most}, the largest max_num_batched_tokens of all workers")
    return chunks


def splits_of(text: str, workers: int, prompt_share: float | None, what: str = "workers") -> tuple[int, ...]:
    """Read `--splits`, such as 1:3,2:2,0:4, and return the numbers of prefill workers, the most promising first.

    what: the noun of what is split, since a search over degrees splits cores or GPUs.
    "auto" means every split, with the one first whose prefill workers have the `prompt_share` of all computing, and then its
    neighbours. None: it is unknown, and the split in halves comes first. Raises `ConfigError`.
    """
    if text == AUTO:
        middle = workers * (0.5 if prompt_share is None else prompt_share)
        return (0, *sorted(range(1, workers), key=lambda prefill: (abs(prefill - middle), prefill)))
    found: list[int] = []
    for part in text.split(","):
        prefill, colon, decode = part.strip().partition(":")
        if not colon or not prefill.isascii() or not prefill.isdigit() or not decode.isascii() or not decode.isdigit():
            raise ConfigError(f"--splits: {part!r} is not of the form PREFILL:DECODE, such as 1:3, nor {AUTO}")
        if int(prefill) + int(decode) != workers or int(decode) < 1:
            raise ConfigError(
                f"--splits: {part!r} must have all {workers} {what} of the cluster, and at least one that decodes"
            )
        if int(prefill) not in found:
            found.append(int(prefill))
    return tuple(found)


def prefill_ranks_of(text: str, limits: SpaceLimits, prompt_share: float | None) -> tuple[int, ...]:
    """Read `--splits` for the workers of a running cluster, and return the ranks of the prefill pool of each split.

    Workers of different degrees cannot change their pools, so the present split is the only one. Raises `ConfigError`.
    """
    each = limits.degrees[0]
    if each == limits.degrees[1]:
        return tuple(each * prefill for prefill in splits_of(text, limits.workers, prompt_share))
    here = f"{limits.prefill}:{limits.workers - limits.prefill}"
    if text not in (AUTO, here):
        raise ConfigError(
            f"--splits: {text!r} needs workers that change their roles, and prefill workers have {each} ranks, decode workers "
            f"{limits.degrees[1]}: give {here}, or let the search start clusters itself (--tensor-parallel-size)"
        )
    return (limits.prefill * each,)


def first_chunk(chunks: Sequence[int], limits: SpaceLimits) -> int:
    """Return the size with which splits are compared: 512 as vLLM's older default, or the one nearest to it."""
    wanted = min(512, limits.chunk_tokens or 512)
    return min(chunks, key=lambda one: abs(one - wanted))
