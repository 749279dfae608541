"""A decode worker whose transfer thread dies: its requests end elsewhere, and its process ends to be started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dying_transfer import PROMPT_BLOCKS
from real_service import APART, BOUND_S, GREEDY, QUICK_BEATS, TOGETHER, tiny

from testkit.client import generate_all, request
from testkit.processes import Place, ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DYING = "decode-0"
BUG = Path(__file__).with_name("dying_transfer.py")


def test_a_transfer_thread_that_dies_costs_clients_nothing_and_its_process_its_life() -> None:
    """(1) Requests until the worker with the bug has got one; (2) all end as undisturbed, though it failed some; (3) its
    process ends with 1; (4) what is left serves."""
    engine = tiny(block_size=16)
    prompt = [i % 250 for i in range(16 * (PROMPT_BLOCKS + 2))]
    place = Place(command=(sys.executable, str(BUG)))
    with ProcessCluster(engine, prefill=1, decode=2, worker=QUICK_BEATS, places={DYING: place}) as cluster:
        expected = generate_all(cluster.grpc, [request(prompt, TOGETHER, max_tokens=8, **GREEDY)])[0].ids
        answers = generate_all(cluster.grpc, [request(prompt, APART, max_tokens=8, **GREEDY) for _ in range(8)])
        assert [answer.ids for answer in answers] == [expected] * 8
        assert any(answer.report.attempts > 1 for answer in answers), "one of them met the bug"
        assert cluster.processes[DYING].popen.wait(BOUND_S) == 1
        assert "a planted bug" in cluster.processes[DYING].log()
        again = generate_all(cluster.grpc, [request(prompt, APART, max_tokens=8, **GREEDY)])[0]
        assert (again.ids, again.report.decode_worker) == (expected, "decode-1")
