"""The keys of prompts are those under which workers publish their blocks, however many prompts came before."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.scheduler import Scheduler, SequenceKind
from router.service.admission import AWAY_RUNS, MAX_BLOCKS, RUN_BLOCKS, PromptKeys

FINGERPRINT = "model"
IDS = st.lists(st.integers(0, 1), max_size=70).map(tuple)  # few ids, so that prompts begin alike


def keys_of(keys: PromptKeys, ids: tuple[int, ...], salt: str = "", block_size: int = 2) -> tuple[int, ...]:
    return asyncio.run(keys.of(ids, salt, block_size))


def held_after(ids: tuple[int, ...], salt: str) -> frozenset[int]:
    """The keys that a worker holds after it has computed this prompt."""
    pools = BlockPools(64)
    scheduler = Scheduler(
        pools,
        2,
        max_num_seqs=1,
        max_num_batched_tokens=80,
        max_model_len=128,
        eos_token_ids=(),
        prefix_salt=FINGERPRINT.encode(),
    )
    scheduler.add(SeqId(1), RequestSpec(ids, SamplingParams(max_tokens=2), cache_salt=salt), kind=SequenceKind.LENT)
    plan = scheduler.plan()
    scheduler.collect([(1, None)] * sum(len(piece.samples) for piece in plan.slices))
    return pools.published.held()


@given(st.lists(st.tuples(IDS.filter(len), st.sampled_from(("", "one", "\udc80"))), min_size=1, max_size=6))
def test_keys_are_those_of_the_blocks_that_a_worker_publishes(prompts: list[tuple[tuple[int, ...], str]]) -> None:
    keys = PromptKeys(lambda: FINGERPRINT, max_runs=3)
    for ids, salt in prompts:
        found = keys_of(keys, ids, salt)
        assert len(found) == len(ids) // 2
        assert frozenset(found) == held_after(ids, salt)


def test_a_long_prompt_is_named_in_pieces_and_up_to_a_limit() -> None:
    blocks = MAX_BLOCKS + 5
    ids = tuple(range(2 * blocks))
    cold, warm = PromptKeys(lambda: FINGERPRINT), PromptKeys(lambda: FINGERPRINT)
    found = keys_of(cold, ids)
    assert len(found) == MAX_BLOCKS
    for part in (1, RUN_BLOCKS, RUN_BLOCKS * AWAY_RUNS + 1, MAX_BLOCKS):
        assert keys_of(warm, ids[: 2 * part]) == found[:part]


def test_other_tasks_run_while_a_long_prompt_is_named() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def both() -> None:
        counting = asyncio.create_task(count())
        await PromptKeys(lambda: FINGERPRINT).of(tuple(range(4 * MAX_BLOCKS)), "", 2)
        counting.cancel()

    asyncio.run(both())
    assert turns >= MAX_BLOCKS // (RUN_BLOCKS * AWAY_RUNS) - 1


def test_keys_follow_the_digest_of_the_workers_weights() -> None:
    """The workers' blocks are named by it, and it becomes known when the first of them joins."""
    name = "fingerprint"
    keys = PromptKeys(lambda: name)
    ids = (1, 2, 3, 4)
    before = keys_of(keys, ids)
    name = FINGERPRINT
    assert frozenset(keys_of(keys, ids)) == held_after(ids, "")
    assert not set(before) & set(keys_of(keys, ids))
