"""A model whose layers all have sliding windows serves requests that are much longer than its pools, in one pool and in two.

Both workers are real, and so is the transport between them.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from decode_worker.main import start as start_decode
from pdserve.config import EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.sampling import SamplingParams
from prefill_worker.main import start as start_prefill
from testkit.random_models import reference_logits, write_random
from testkit.scripted_router import ScriptedRouter, Worker

POOL_BLOCKS, BLOCK = 8, 16
BLOCK_BYTES = 3 * 2 * 2 * 16 * BLOCK * 4  # layers, planes, heads, head_dim, tokens, float32
PROMPT_LEN, OUTPUT = 700, 30
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)


def config(router: ScriptedRouter, worker_id: str, model: Path) -> WorkerConfig:
    engine = EngineConfig(
        model=str(model),
        dtype="float32",
        batch_invariant=True,
        max_num_batched_tokens=48,
        kv_cache_memory=POOL_BLOCKS * BLOCK_BYTES,
        threads=1,
        max_num_seqs=2,
    )
    return WorkerConfig(worker_id, router.address, engine, LeaseConfig(), heartbeat_interval_s=0.05)


def handed_off(router: ScriptedRouter, prefill: Worker, decode: Worker, prompt: list[int]) -> list[int]:
    bound = router.bind(decode, prompt, GREEDY)
    decode.wait("Reserved", bound)
    started = prefill.wait("PrefillStarted", lent := router.prefill(prefill, prompt, GREEDY))
    router.attach(decode, bound, started)
    rest = [row.ids[0] for row in decode.wait_finished(bound)]
    return [prefill.tokens(lent)[0].ids[0], *rest]


def test_a_request_that_is_longer_than_the_pool_is_served_by_one_pool_and_by_two(tmp_path: Path) -> None:
    """(1) A prompt of 700 tokens is computed and decoded where 128 tokens fit. (2) Two such pools give the same tokens. (3)
    They are the best ones by the reference implementation. (4) Nothing is left on either worker."""
    pytest.importorskip("transformers")
    reference = write_random(tmp_path, "mistral")
    prompt = random.Random(5).choices(range(3, 512), k=PROMPT_LEN)
    with ScriptedRouter() as router:
        workers = [start_prefill(config(router, "p", tmp_path)), start_decode(config(router, "d", tmp_path))]
        try:
            prefill, decode = router.worker("p"), router.worker("d")
            assert decode.hello.num_blocks == POOL_BLOCKS
            assert decode.hello.max_model_len == 2048, "the model's own limit"
            assert decode.hello.held_tokens == 3 * BLOCK
            alone = [row.ids[0] for row in decode.wait_finished(router.bind(decode, prompt, GREEDY, local_prefill=True))]
            assert len(alone) == OUTPUT
            assert handed_off(router, prefill, decode, prompt) == alone
            prefill.wait_empty()
            decode.wait_empty()
        finally:
            for worker in workers:
                worker.stop()
                assert worker.wait(0) == 0
    logits = reference_logits(reference, [*prompt, *alone])[PROMPT_LEN - 1 : -1]
    best = logits.max(dim=1).values
    assert all(float(row[token]) > float(top) - 1e-3 for row, token, top in zip(logits, alone, best, strict=True))
