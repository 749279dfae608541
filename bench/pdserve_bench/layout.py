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

    @property
    def workers(self) -> int:
        """The workers of both pools."""
        return self.prefill + self.decode

    @property
    def disaggregated(self) -> bool:
        """Prompts are computed in a pool of their own."""
        return self.prefill > 0

    @property
    def name(self) -> str:
        """The name of the split, as people write it: `1P+3D`, or `4 colocated`."""
        return f"{self.prefill}P+{self.decode}D" if self.disaggregated else f"{self.decode} colocated"


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
