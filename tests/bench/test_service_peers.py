"""The comparison of our service with other servers: whole answers, the best layout, the goals, and processes that stop."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from bench.engine.floors import Machine
from bench.engine.peers.peer import PeerFailed
from bench.service.cells import CELLS, Cell, Turn, TurnFailed, agreement, check_whole
from bench.service.comparison import Comparison, order_of
from bench.service.floor import Floor
from bench.service.servers import Server
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from pdserve_bench.report.summary import Distribution
from pdserve_bench.row import BenchRow

CELL = Cell(256, 64, 2, 2, 2.0)
WIDE = Cell(256, 64, 32, 64, 2.0, itl_goal=1 / 15)


def turn(rate: float, itl_p99_s: float = 0.1, texts: tuple[str, ...] = ("abcd", "xy")) -> Turn:
    same = Distribution(1, itl_p99_s, itl_p99_s, itl_p99_s, itl_p99_s, itl_p99_s, itl_p99_s)
    return Turn(rate, same, same, 0.0, texts)


def row(number: int, tokens: int = 64, error: str = "") -> BenchRow:
    return BenchRow(number, 0.0, 0.0, 1.0, 256, tokens, ((0.5, tokens),), error=error)


def comparison(rates: dict[str, float], cell: Cell = CELL) -> Comparison:
    found = Comparison(("one", "apart", "niced"), "apart", "vLLM", ("niced",))
    for _ in range(3):
        for name, rate in rates.items():
            found.add(cell, name, turn(rate, 0.03 if name == "apart" else 0.6))
    return found


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row(0), row(1, 63)], "request 1: it had 63 output tokens, not 64"),
        ([row(0), row(1, error="timeout")], "request 1: timeout"),
        ([row(0)], "1 of 2 requests"),
    ],
)
def test_a_turn_counts_only_when_every_answer_is_whole(rows, why):
    check_whole("vLLM", CELL, [row(0), row(1)])
    with pytest.raises(TurnFailed, match=why):
        check_whole("vLLM", CELL, rows)


def test_the_best_layout_of_ours_is_compared_and_a_niced_one_does_not_count():
    found = comparison({"vLLM": 100.0, "one": 190.0, "apart": 150.0, "niced": 900.0})
    assert found.best(CELL) == "one"
    assert found.goals()[0].startswith("MISSED ")
    assert comparison({"vLLM": 100.0, "one": 200.0, "apart": 150.0}).goals()[0].startswith("reached")


def test_the_goal_for_gaps_belongs_to_its_cell_alone():
    rates = {"vLLM": 100.0, "one": 300.0, "apart": 150.0}
    found = comparison(rates, WIDE)
    assert found.goals()[-1].startswith("reached")
    found.turns[WIDE, "apart"] = [turn(150.0, 0.05)] * 3
    assert found.goals()[-1].startswith("MISSED ")
    assert "0.083" in found.goals()[-1]
    assert len(found.goals()) == 2
    assert len(comparison(rates).goals()) == 1


def test_answers_of_ours_that_differ_are_counted():
    found = comparison({"vLLM": 100.0, "one": 200.0, "apart": 150.0})
    assert found.differing() == 0
    found.turns[CELL, "apart"][1] = turn(150.0, texts=("abcd", "xz"))
    assert found.differing() == 1


def test_quantised_answers_may_differ():
    found = comparison({"vLLM": 100.0, "one": 200.0, "niced": 150.0})
    found.turns[CELL, "niced"][1] = turn(150.0, texts=("abcd", "xz"))
    assert found.differing() == 1
    found.inexact = ("niced",)
    assert found.differing() == 0


def test_the_floor_is_the_work_at_the_peaks():
    """One layer of 8 numbers: 2 query heads of 2, one KV head, MLP of 8, 16 tokens of vocabulary."""
    attention = AttentionSpec(2, 1, 2, 2, RopeSpec(1e4))
    spec = ModelSpec(16, 4, (LayerSpec(attention, DenseSpec(8), NormSpec(1e-5)),), NormSpec(1e-5), 64, tied_head=True)
    layer, head = 4 * (4 + 4 + 4) + 3 * 4 * 8, 16 * 4
    pair = 2 * 2 * (2 + 2)  # scores and weighted values of both heads
    prompt_flops = 8 * 2 * layer + 2 * head + pair * 8 * 9 // 2
    step_flops = 2 * (2 * (layer + head) + pair * 11)
    cell = Cell(8, 4, 2, 2, 2.0)
    slow_products = Machine(1, read_bytes_s=1e18, bf16_flops_s=1e6, copy_bytes_s=1.0)
    assert Floor.of(spec).tokens_per_s(cell, slow_products) == pytest.approx(4e6 / (prompt_flops + 3 * step_flops / 2))
    read_bytes = 2 * (layer + head) + 2 * 2 * (2 + 2) * 11
    slow_memory = Machine(1, read_bytes_s=1e6, bf16_flops_s=1e18, copy_bytes_s=1.0)
    assert Floor.of(spec).tokens_per_s(cell, slow_memory) == pytest.approx(4e6 / (3 * read_bytes / 2), rel=1e-6)


def test_a_line_says_how_far_any_server_could_be_above_theirs():
    found = comparison({"vLLM": 100.0, "one": 150.0})
    found.floors[CELL] = [200.0, 200.0, 200.0]
    assert found.floor_lines() == [
        "256/64 x 2: at most 200 tokens/s in bfloat16, 2.00 (2.00 to 2.00) times theirs; one gives 75% of it"
    ]


def test_agreement_is_what_stands_before_the_first_difference():
    assert agreement(["abcd", ""], ["abcd", ""]) == 1.0
    assert agreement(["abcd", "abcd"], ["abxd", "abcdefgh"]) == 0.5
    assert comparison({"vLLM": 100.0, "one": 200.0}).agreement() == 1.0


def test_each_server_begins_a_round_in_turn():
    orders = [order_of(("a", "b", "c"), number) for number in range(3)]
    assert [order[0] for order in orders] == ["a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_turns_end_with_all_streams_at_work():
    assert all(cell.requests % cell.streams == 0 for cell in CELLS)


TREE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


def stands_still(process: psutil.Process) -> bool:
    """Wait until a process is stopped. False: it still runs after a minute."""
    end_s = time.monotonic() + 60.0
    while process.status() != psutil.STATUS_STOPPED:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.001)
    return True


def test_a_stopped_server_stands_still_with_its_children_and_one_that_ended_is_told():
    with subprocess.Popen((sys.executable, "-c", TREE), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        child = psutil.Process(int(process.stdout.readline()))
        server = Server("vLLM", "127.0.0.1:9", False, (psutil.Process(process.pid),))
        server.stop()
        still = [stands_still(one) for one in (psutil.Process(process.pid), child)]
        process.kill()
    child.kill()
    assert still == [True, True]
    with pytest.raises(PeerFailed, match="vLLM ended"):
        server.resume()
