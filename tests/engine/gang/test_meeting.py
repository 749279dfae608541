"""The meetings of ranks by torch: what they gather and tell, at any size, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from pdserve.core.errors import ReplicaLost
from pdserve.core.shards import Degrees, RankShare
from pdserve.engine.gang.meeting import Meeting, MetRanks, lose, meeting_bytes, place_bytes
from pdserve.engine.gang.memory import SharedMemory
from tests.engine.native.feature_models import heads, model

SPEC = model(*[heads(4, 2, 16)] * 4)
WAIT_S = 60.0
Result = TypeVar("Result")


def ranks_of(degrees: Degrees, timeout_s: float = WAIT_S) -> tuple[list[MetRanks], SharedMemory]:
    memory = SharedMemory(meeting_bytes(RankShare(SPEC, degrees)))
    return [MetRanks(RankShare(SPEC, degrees, number), memory, timeout_s) for number in range(degrees.ranks)], memory


def by_all(ranks: list[MetRanks], work: Callable[[MetRanks], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks, timeout=WAIT_S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_rows_are_gathered_in_as_many_parts_as_the_place_needs(dtype: torch.dtype) -> None:
    """One of the ranks has no columns."""
    width, bounds = 1000, (0, 300, 300, 1000)
    rows = 2 * place_bytes(RankShare(SPEC)) // (width * dtype.itemsize) + 1
    whole = (torch.arange(rows * width) % 251).view(rows, width).to(dtype)
    ranks, _ = ranks_of(Degrees(3))

    def gather(rank: MetRanks) -> list[torch.Tensor]:
        columns = range(bounds[rank.share.rank], bounds[rank.share.rank + 1])
        own = whole[:, columns.start : columns.stop]
        return [rank.gather(own, columns, width) for _ in range(3)]

    assert all(torch.equal(one, whole) for results in by_all(ranks, gather) for one in results)


@pytest.mark.parametrize("size", [1, 1024, 3_000_001])
def test_a_message_of_any_size_is_told_to_all(size: int) -> None:
    """Also where the counters begin anew."""
    memory = torch.zeros(4 * 64 + 2 * (1 << 20), dtype=torch.uint8)
    lost = torch.zeros(1, dtype=torch.uint8)
    meetings = [Meeting(memory, lost, rank, 4) for rank in range(4)]
    for rank, meeting in enumerate(meetings):
        meeting._met = meeting._counters[rank] = 2**32 - 2
    data = bytes(i % 256 for i in range(size))
    with ThreadPoolExecutor(4) as pool:
        told = pool.map(lambda at: meetings[at].tell(data if at == 2 else None, WAIT_S), range(4), timeout=WAIT_S)
        assert all(one == data for one in told)


def test_stages_carry_rows_and_agree() -> None:
    ranks, _ = ranks_of(Degrees(2, 2))
    x = torch.randn(5, 7)

    def work(rank: MetRanks) -> tuple[torch.Tensor, frozenset[int]]:
        carried = rank.carry(x if rank.share.stage == 1 else torch.zeros(5, 7), 1)
        return carried, rank.agree(frozenset({1, 32, 64} - {1 if rank.share.number == 3 else 64}))

    for carried, agreed in by_all(ranks, work):
        assert torch.equal(carried, x)
        assert agreed == {32}


def test_a_rank_that_waits_leaves_a_gang_that_is_lost() -> None:
    ranks, memory = ranks_of(Degrees(2))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ranks[1].next_step)
        lose(memory)
        with pytest.raises(ReplicaLost):
            waits.result(WAIT_S)


def test_a_rank_that_nobody_meets_gives_the_gang_up() -> None:
    ranks, _ = ranks_of(Degrees(2), timeout_s=0.1)
    with pytest.raises(ReplicaLost):
        ranks[0].end_step()
    with pytest.raises(ReplicaLost):
        ranks[1].next_step()
