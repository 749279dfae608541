"""The layout of a cluster's workers for one point of a search, and the targets of requests. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """Two pools, and the limits of their steps."""

    prefill: int
    """Prefill workers. 0: all workers are colocated, and decode workers compute the prompts themselves."""
    decode: int
    chunk_tokens: int
    """The most tokens of a step (`max_num_batched_tokens`), in every worker that computes prompts."""
    max_num_seqs: int
    """The most sequences of a step, in every decode worker."""
    prefill_ranks: int = 1
    decode_ranks: int = 1
    """The ranks of one worker of each pool; more than one are a gang. Without prefill workers both numbers are equal."""

    @property
    def workers(self) -> int:
        """The workers of both pools."""
        return self.prefill + self.decode

    @property
    def ranks(self) -> int:
        """The ranks of all workers. Each has a core or a GPU of its own, so layouts of as many ranks cost the same."""
        return self.prefill * self.prefill_ranks + self.decode * self.decode_ranks

    @property
    def degrees(self) -> tuple[int, int]:
        """The ranks of one prefill and of one decode worker."""
        return self.prefill_ranks, self.decode_ranks

    @property
    def disaggregated(self) -> bool:
        """Prompts are computed in a pool of their own."""
        return self.prefill > 0

    @property
    def name(self) -> str:
        """The name of the split, as people write it: `1P+3D`, or `4 colocated`. Gangs have their size: `1P(2 ranks)+2D`."""
        prefill, decode = (f"({ranks} ranks)" if ranks > 1 else "" for ranks in self.degrees)
        if self.disaggregated:
            return f"{self.prefill}P{prefill}+{self.decode}D{decode}"
        return f"{self.decode} colocated{f' {decode}' if decode else ''}"


@dataclass(frozen=True, slots=True)
class Slo:
    """The targets that a request must meet, both of them, to count for goodput. None: no such target."""

    ttft_s: float | None = 1.0
    tpot_s: float | None = 0.05

    def met(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Tell whether an answered request with these times meets the targets. A request of one token has no TPOT."""
        in_time = self.ttft_s is None or (ttft_s is not None and ttft_s <= self.ttft_s)
        return in_time and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)

    @property
    def words(self) -> str:
        """The targets as people read them: `TTFT at most 1,000 ms and TPOT at most 50 ms`."""
        told = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        said = [f"{name} at most {target_s * 1000:,g} ms" for name, target_s in told if target_s is not None]
        return " and ".join(said) or "none: each answered request counts"
