"""The meetings of ranks by torch, in shared memory and over gloo: what they gather and tell, at any size, and how they end."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch

from pdserve.core.errors import ReplicaLost
from pdserve.core.shards import Degrees, RankShare
from pdserve.engine.gang import collective
from pdserve.engine.gang.collective import CollectiveRanks
from pdserve.engine.gang.meeting import Meeting, MetRanks, lose, meeting_bytes, place_bytes
from pdserve.engine.gang.memory import SharedMemory
from tests.engine.native.feature_models import heads, model

SPEC = model(*[heads(4, 2, 16)] * 4)
WAIT_S = 60.0
Result = TypeVar("Result")


def ranks_of(degrees: Degrees, timeout_s: float = WAIT_S) -> tuple[list[MetRanks], SharedMemory]:
    memory = SharedMemory(meeting_bytes(RankShare(SPEC, degrees)))
    return [MetRanks(RankShare(SPEC, degrees, number), memory, timeout_s) for number in range(degrees.ranks)], memory


def ranks_by(how: str, degrees: Degrees, folder: Path) -> list[MetRanks]:
    return ranks_of(degrees)[0] if how == "shared_memory" else ranks_by_gloo(degrees, folder)[0]


def ranks_by_gloo(degrees: Degrees, folder: Path, timeout_s: float = WAIT_S) -> tuple[list[MetRanks], SharedMemory]:
    ranks, memory = ranks_of(degrees)
    cpu = torch.device("cpu")
    made = by_all(ranks, lambda one: CollectiveRanks(one.share, memory, WAIT_S, library="gloo", folder=folder, device=cpu))
    for one in made:
        one.timeout_s = timeout_s
    return made, memory


def by_all(ranks: list[MetRanks], work: Callable[[MetRanks], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks, timeout=WAIT_S))


@pytest.mark.parametrize("how", ["shared_memory", "gloo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_rows_are_gathered_in_as_many_parts_as_the_place_needs(dtype: torch.dtype, how: str, tmp_path: Path) -> None:
    """One of the ranks has no columns."""
    width, columns = 1000, (range(300), range(300, 300), range(300, 1000))
    rows = 2 * place_bytes(RankShare(SPEC)) // (width * dtype.itemsize) + 1
    whole = (torch.arange(rows * width) % 251).view(rows, width).to(dtype)
    ranks = ranks_by(how, Degrees(3), tmp_path)

    def gather(rank: MetRanks) -> list[torch.Tensor]:
        own = whole[:, columns[rank.share.rank].start : columns[rank.share.rank].stop]
        return [rank.gather(own, columns) for _ in range(3)]

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


@pytest.mark.parametrize("how", ["shared_memory", "gloo"])
def test_one_rank_gives_all_columns(how: str, tmp_path: Path) -> None:
    ranks = ranks_by(how, Degrees(3), tmp_path)
    whole = torch.arange(10).view(2, 5)

    def gather(rank: MetRanks) -> list[torch.Tensor]:
        results = []
        for giver in (2, 0, 1):
            columns = [range(5 if number == giver else 0) for number in range(3)]
            results.append(rank.gather(whole[:, : len(columns[rank.share.rank])], columns))
        return results

    assert all(torch.equal(one, whole) for results in by_all(ranks, gather) for one in results)


@pytest.mark.parametrize("how", ["shared_memory", "gloo"])
def test_stages_carry_rows_and_agree(how: str, tmp_path: Path) -> None:
    ranks = ranks_by(how, Degrees(2, 2), tmp_path)
    x = torch.randn(5, 7)

    def work(rank: MetRanks) -> tuple[torch.Tensor, frozenset[int]]:
        carried = rank.carry(x if rank.share.stage == 1 else torch.zeros(5, 7), 1)
        return carried, rank.agree(frozenset({1, 32, 64} - {1 if rank.share.number == 3 else 64}))

    for carried, agreed in by_all(ranks, work):
        assert torch.equal(carried, x)
        assert agreed == {32}


def test_ranks_listen_on_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default gloo listens on the address of the machine's name, which others may reach. A second address of loopback shows
    that it does not here, also where the name is that of loopback.
    """
    assert ipaddress.ip_address(collective.LOOPBACK).is_loopback
    monkeypatch.setattr(collective, "LOOPBACK", "127.0.0.2")

    def listening() -> set[tuple[str, int]]:
        sockets = psutil.Process().net_connections("tcp")
        return {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}

    before = listening()
    ranks = ranks_by("gloo", Degrees(2, 2), tmp_path)
    assert {address for address, _ in listening() - before} == {"127.0.0.2"}
    del ranks
    assert listening() == before


@pytest.mark.parametrize("end", ["lost", "ended", "silent"])
def test_a_rank_that_waits_in_gloo_leaves_a_gang(end: str, tmp_path: Path) -> None:
    """Somebody else ends the gang, or the other rank ends and closes its connections, or it says nothing for too long."""
    ranks, memory = ranks_by_gloo(Degrees(2), tmp_path, timeout_s=0.3 if end == "silent" else WAIT_S)
    own, columns = torch.ones(1, 1), [range(1), range(1, 2)]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ranks[0].gather, own, columns)
        if end == "lost":
            lose(memory)
        elif end == "ended":
            del ranks[1]
        with pytest.raises(ReplicaLost, match="by peer" if end == "ended" else "step_timeout_s"):
            waits.result(WAIT_S / 2)
    assert ranks[0].lost
    with pytest.raises(ReplicaLost):
        ranks[0].end_step()
    del ranks[1:]  # a group waits for what it has begun, until a connection closes


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
