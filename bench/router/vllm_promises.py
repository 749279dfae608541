"""`make bench-vllm` runs real servers of vLLM under pdserve, and shows what is promised of them.

    python -m bench.router.vllm_promises

One prefill and two decode servers of vLLM's CPU build (`make setup-vllm`) share a core. (1) Requests one by one, disaggregated,
beside the same ones that one server computes alone: their tokens should be equal. (2) All at once: each should end; vLLM's
tokens depend on their batch, so some differ. (3) One of the two decode workers is killed under streams: each should end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Final

from bench.router.vllm_proxy import FIRST_ID, LAST_ID, engine_of
from pdserve.commands.console import make_console
from pdserve.commands.tables import table
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster

LENGTHS: Final = (5, 64, 127, 128, 129, 200, 256, 300)
"""Lengths of prompts. Two fill their blocks of 128 tokens, which needs care: docs/design/0086-what-a-vllm-pair-does.md."""
REQUESTS: Final = 64
TOKENS: Final = 16
STREAMS: Final = 24
STREAM_TOKENS: Final = 48
KILL_AFTER_S: Final = 5.0
APART: Final = common_pb2.PLACEMENT_DISAGGREGATED
TOGETHER: Final = common_pb2.PLACEMENT_COLOCATED


def messages(
    placement: common_pb2.Placement, count: int, max_tokens: int, seed: int = 0
) -> list[inference_pb2.GenerateRequest]:
    """Return greedy requests of random prompts. Equal seeds give equal prompts."""
    rng = random.Random(seed)
    prompts = [[rng.randint(FIRST_ID, LAST_ID) for _ in range(LENGTHS[n % len(LENGTHS)])] for n in range(count)]
    return [request(prompt, placement, max_tokens=max_tokens, temperature=0.0, ignore_eos=True) for prompt in prompts]


def equal(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    """Return how many answers have the same tokens."""
    return sum(one.ids == other.ids for one, other in zip(answers, others, strict=True))


def main() -> None:
    """Run the benchmark."""
    console = make_console()
    made = table("Real servers of vLLM under pdserve: one prefill and two decode workers", ("what",), ("result",))
    waits = "starting three servers of vLLM, which takes about two minutes"
    with console.status(waits) as status, ProcessCluster(engine_of(real=True), decode=2) as cluster:
        status.update(f"{REQUESTS} requests one by one")
        alone = generate_all(cluster.grpc, messages(APART, REQUESTS, TOKENS), 1)
        status.update("the same requests, each on one server")
        colocated = generate_all(cluster.grpc, messages(TOGETHER, REQUESTS, TOKENS), 1)
        made.add_row("one by one: tokens equal those of one server", f"{equal(alone, colocated)} of {REQUESTS}")
        status.update("the same requests at once")
        began_s = time.monotonic()
        at_once = generate_all(cluster.grpc, messages(APART, REQUESTS, TOKENS))
        whole = sum(len(answer.ids) == TOKENS for answer in at_once)
        made.add_row("at once: ended with all tokens", f"{whole} of {REQUESTS}, in {time.monotonic() - began_s:.0f} s")
        made.add_row("at once: tokens equal those of one by one", f"{equal(at_once, alone)} of {REQUESTS}")
        status.update(f"{STREAMS} streams, and a decode worker is killed")
        killer = threading.Timer(KILL_AFTER_S, cluster.processes["decode-0"].kill)
        killer.start()
        streams = generate_all(cluster.grpc, messages(APART, STREAMS, STREAM_TOKENS, seed=1))
        killer.join()
        whole = sum(len(answer.ids) == STREAM_TOKENS for answer in streams)
        replayed = sum(answer.report.attempts > 1 for answer in streams)
        made.add_row("SIGKILL of one decode worker: ended with all tokens", f"{whole} of {STREAMS}, {replayed} replayed")
    console.print(made)


if __name__ == "__main__":
    main()
