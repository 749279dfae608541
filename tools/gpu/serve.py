"""The whole service on one GPU: a router, a prefill worker and a decode worker as processes, with KV between them over NIXL.

Prompts are first answered one at a time, colocated and then disaggregated: the tokens must be equal. Then all are asked at
once, disaggregated. In batch-invariant mode these answers must be the same, too.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from pdserve.checkpoint.tiny import write_tiny
from pdserve.config import MIB, EngineConfig
from pdserve.rpc.v1 import common_pb2, inference_pb2
from testkit.client import Answer, generate_all, request
from testkit.processes import ProcessCluster
from tools.gpu.row import Row, Setup

# The shape of Llama-3.2-1B, with the tiny model's tokenizer.
SHAPE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip


def run(setup: Setup) -> None:
    """Serve and compare. Raises `SystemExit` when a disaggregated answer has other tokens than the colocated one, or, in
    batch-invariant mode, an answer in company has other tokens than alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny(directory)
        if not setup.rehearsed:
            make_larger(directory)
        wrong = [invariant for invariant in (False, True) if not serve(setup, directory, invariant=invariant)]
    if wrong:
        raise SystemExit("answers have other tokens than they should")


def serve(setup: Setup, directory: Path, *, invariant: bool) -> bool:
    """Run a cluster, and show how it answers. Tell whether all tokens are what they should be."""
    began_s = time.monotonic()
    with ProcessCluster(engine(setup, directory, invariant=invariant)) as cluster:
        ready_s = time.monotonic() - began_s
        computes = next(line for line in cluster.processes["decode-0"].log().splitlines() if " ready at " in line)
        Row("serve", "three processes ready", f"{ready_s:.1f} s", note=computes.partition(" s; ")[2][:110]).emit()
        return compare(setup, cluster, invariant=invariant)


def make_larger(directory: Path) -> None:
    """Give the model in `directory` the shape `SHAPE`, with weights that are made up."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SHAPE))


def engine(setup: Setup, directory: Path, *, invariant: bool) -> EngineConfig:
    """Return the settings of both workers. Two workers share one GPU, so neither may measure what is free."""
    size, length = (16 * MIB, 256) if setup.rehearsed else (4096 * MIB, 4096)
    return EngineConfig(
        model=str(directory), load_format="auto" if setup.rehearsed else "dummy", device=setup.device.type,
        kv_cache_memory=size, max_model_len=length, enable_prefix_caching=False,
        batch_invariant=invariant,
    )  # fmt: skip


def requests(setup: Setup, placement: int, output: int) -> list[inference_pb2.GenerateRequest]:
    """Return prompts of many lengths. Every second one draws at random, from a seed."""
    lengths = (5, 40, 17) if setup.rehearsed else (700, 33, 512, 1500, 2000, 5, 64, 1023)
    made = []
    for i, length in enumerate(lengths):
        ids = [10 + (7 + 31 * i + 13 * j) % 200 for j in range(length)]
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 2 else {"temperature": 0.0}
        made.append(request(ids, placement, max_tokens=output, ignore_eos=True, **drawn))
    return made


def compare(setup: Setup, cluster: ProcessCluster, *, invariant: bool) -> bool:
    """Show how many tokens are equal, and how fast answers come. Tell whether the tokens are what they should be."""
    # Batch-invariant steps are slow on a GPU.
    output, many = (8, 1) if setup.rehearsed or invariant else (64, 8)
    mode = ", batch-invariant" if invariant else ""
    together, apart = (
        answered(cluster, requests(setup, placement, output)[: 4 if invariant else None], 1)
        for placement in (common_pb2.PLACEMENT_COLOCATED, common_pb2.PLACEMENT_DISAGGREGATED)
    )
    equal, total = same(together, apart)
    Row("serve", f"{len(apart)} one at a time, split{mode}", f"{equal} of {total} tokens", "colocated").emit()
    messages = requests(setup, common_pb2.PLACEMENT_DISAGGREGATED, output)[: 4 if invariant else None] * many
    began_s = time.monotonic()
    company = answered(cluster, messages, len(messages))
    took_s = time.monotonic() - began_s
    equal_in_company, of = same(together * many, company)
    rate = sum(len(answer.ids) for answer in company) / took_s
    note = f"{equal_in_company} of {of} tokens as alone"
    Row("serve", f"{len(messages)} at once, split{mode}", f"{rate:,.0f} tokens/s", note=note).emit()
    return equal == total and (equal_in_company == of or not invariant)


def answered(cluster: ProcessCluster, messages: list[inference_pb2.GenerateRequest], concurrency: int) -> list[Answer]:
    """Return the answers, with `concurrency` requests at a time."""
    return generate_all(cluster.grpc, messages, concurrency)


def same(expected: list[Answer], found: list[Answer]) -> tuple[int, int]:
    """Return how many tokens are equal, and of how many."""
    pairs = [(a, b) for e, f in zip(expected, found, strict=True) for a, b in zip(e.ids, f.ids, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)
