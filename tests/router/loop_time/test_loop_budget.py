"""Requests share each turn of the loop, and what they leave of it belongs to others."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
from hypothesis import given

from router.service.loop_time import BUDGET_S, LoopBudget

BOUND_S = 30.0


@given(st.lists(st.floats(0.0, 3 * BUDGET_S), min_size=1, max_size=40))
def test_requests_come_in_their_order_and_no_turn_is_longer_than_its_budget_and_one_request(costs_s: list[float]) -> None:
    now_s, turn = 0.0, 0
    began_s: dict[int, list[float]] = {}
    order: list[int] = []

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(next_turn)

    async def request(number: int, cost_s: float, budget: LoopBudget) -> None:
        nonlocal now_s
        await budget.admit()
        began_s.setdefault(turn, []).append(now_s)
        order.append(number)
        now_s += cost_s

    async def story() -> None:
        asyncio.get_running_loop().call_soon(next_turn)
        budget = LoopBudget(lambda: now_s)
        await asyncio.gather(*(request(number, cost_s, budget) for number, cost_s in enumerate(costs_s)))

    asyncio.run(asyncio.wait_for(story(), BOUND_S))
    assert order == list(range(len(costs_s)))
    assert all(times[-1] - times[0] < BUDGET_S for times in began_s.values())
    turns = sorted(began_s)
    assert turns == list(range(turns[0], turns[-1] + 1))  # no turn went by without a request
