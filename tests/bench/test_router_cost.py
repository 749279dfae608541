"""The benchmark of the router's CPU runs: its clients are served by a real router, and every answer is whole."""

from __future__ import annotations

import asyncio

import pytest

from bench.router import cost

pytestmark = pytest.mark.slow


def test_the_router_and_its_floors_serve_the_benchmark() -> None:
    results = asyncio.run(cost.measure(streams=2, rounds=1))
    assert results.keys() == {"gRPC", "HTTP"}
    for target in (each for pair in results.values() for each in pair):
        assert len(target.per_request) == len(target.per_token_paced) == len(target.per_token_flooded) == 1
        assert target.per_request[0] > 0
