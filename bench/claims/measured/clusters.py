"""The two clusters that claims about disaggregation compare: the same workers, one of each role or both colocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from bench.claims.measured.steps import prompt_of
from bench.claims.setup import Setup
from pdserve.config import EngineConfig
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import Answer, request
from testkit.processes import ProcessCluster

KV_BYTES: Final = 256 * 2**20
PLACEMENT: Final = {"disaggregated": common_pb2.PLACEMENT_DISAGGREGATED, "colocated": common_pb2.PLACEMENT_COLOCATED}


@dataclass(frozen=True)
class Side:
    """One of the two clusters."""

    name: str
    cluster: ProcessCluster

    def message(self, tokens: int, output: int, seed: int) -> inference_pb2.GenerateRequest:
        """Return a greedy request that this side serves in its way."""
        sampling = {"temperature": 0.0, "max_tokens": output, "ignore_eos": True}
        return request(prompt_of(tokens, seed), PLACEMENT[self.name], **sampling)


@contextmanager
def both(setup: Setup, *, env: Mapping[str, str] | None = None, worker: dict[str, Any] | None = None) -> Iterator[list[Side]]:
    """Run 1 prefill + 1 decode worker, and beside them 2 colocated workers, of one thread each, until the block ends.

    `env` and `worker` are arguments of `ProcessCluster` for the first cluster.
    """
    engine = EngineConfig(model=setup.model, kv_cache_memory=KV_BYTES, threads=1, enable_prefix_caching=False)
    with ExitStack() as stack:
        apart = stack.enter_context(ProcessCluster(engine, prefill=1, decode=1, env=env, worker=worker))
        together = stack.enter_context(ProcessCluster(engine, prefill=0, decode=2))
        yield [Side("disaggregated", apart), Side("colocated", together)]


def gaps_s(answers: list[Answer]) -> list[float]:
    """Return the times between consecutive messages with tokens of all answers, in seconds, sorted."""
    return sorted(b - a for one in answers for a, b in pairwise(one.arrivals_s) if b > a)
