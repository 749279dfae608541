"""The experts of a mixture on sorted pairs, against loops in float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, NAN
from torch import Tensor

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.kernels import experts as experts_module
from pdserve.engine.kernels import routing as routing_module
from pdserve.engine.kernels.experts import GroupedExperts, most_tiles, product_tile, sort_pairs
from pdserve.engine.kernels.routing import MOST_PAIRS, route
from pdserve.engine.layers import moe
from pdserve.engine.layers.elementwise import gelu_and_mul, silu_and_mul


@pytest.fixture(autouse=True)
def _poison_new_tensors(monkeypatch):
    """Whatever a kernel does not write is NaN."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: empty(shape, **kind).fill_(-9 if "int" in str(kind) else NAN))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, NAN))


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def choice(rows: int, experts: int, top: int, seed: int) -> Tensor:
    rng = random.Random(seed)
    return torch.tensor([sorted(rng.sample(range(experts), top)) for _ in range(rows)], device=DEVICE).view(rows, top)


def loop(spec: MoeSpec, gate_up: Tensor, down: Tensor, x: Tensor, experts: Tensor, weights: Tensor, total: Tensor) -> Tensor:
    gate_up, down, x, weights, result = (one.double() for one in (gate_up, down, x, weights, total.clone()))
    activate = silu_and_mul if spec.activation == "silu" else gelu_and_mul
    for row in range(len(x)):
        for expert, weight in zip(experts[row].tolist(), weights[row], strict=True):
            result[row] += down[expert] @ activate((gate_up[expert] @ x[row]).unsqueeze(0))[0] * weight
    return result


def check(rows: int, experts: int, top: int, hidden: int, width: int, *, dtype=torch.float32, seed=0, gelu=False) -> None:
    spec = MoeSpec(experts, top, width, activation="gelu_tanh" if gelu else "silu")
    gate_up = (draw(experts, 2 * width, hidden, seed=seed) / hidden**0.5).to(dtype)
    down = (draw(experts, hidden, width, seed=seed + 1) / width**0.5).to(dtype)
    x, total = draw(rows, hidden, seed=seed + 2, dtype=dtype), draw(rows, hidden, seed=seed + 3)
    chosen, weights = choice(rows, experts, top, seed), draw(rows, top, seed=seed + 4)
    layer = GroupedExperts(spec, gate_up, down)
    found = layer(x, chosen, weights, total)
    expected = loop(spec, gate_up, down, x, chosen, weights, total)
    assert found.dtype == dtype
    error = (found.double() - expected).abs() / (1 + expected.abs())
    assert error.max() < {torch.float32: 2e-5, torch.bfloat16: 8e-2}[dtype]  # a wrong expert is off by 1
    assert layer.counts.tolist() == torch.bincount(chosen.flatten(), minlength=experts).tolist()


@pytest.mark.parametrize("gelu", [False, True])
def test_rows_pass_their_experts(gelu):
    check(5, 4, 2, 40, 24, gelu=gelu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_of_an_expert_than_a_tile_has(dtype):
    check(36, 2, 1, 72, 40, dtype=dtype)


def test_experts_that_nobody_chose_are_not_read():
    spec = MoeSpec(4, 1, 16)
    gate_up, down = torch.full((4, 32, 24), NAN, device=DEVICE), torch.full((4, 24, 16), NAN, device=DEVICE)
    gate_up[2], down[2] = 0.1, 0.1
    layer = GroupedExperts(spec, gate_up, down)
    chosen, ones = torch.full((3, 1), 2, device=DEVICE), torch.ones(3, 1, device=DEVICE)
    assert layer(draw(3, 24, seed=1), chosen, ones, torch.zeros(3, 24, device=DEVICE)).isfinite().all()


def test_rows_of_nobody_go_to_no_expert_and_change_nothing():
    """A recorded step has more rows than sequences; those hold anything."""
    spec = MoeSpec(3, 2, 16)
    gate_up, down, x = draw(3, 32, 24, seed=1), draw(3, 24, 16, seed=2), draw(6, 24, seed=3)
    chosen, weights, total = choice(6, 3, 2, 4), draw(6, 2, seed=5), draw(6, 24, seed=6)
    layer, whole = GroupedExperts(spec, gate_up, down), GroupedExperts(spec, gate_up, down)
    expected = whole(x[:4], chosen[:4], weights[:4], total[:4])
    x[4:] = NAN
    found = layer(x, chosen, weights, total, torch.tensor(4, device=DEVICE))
    assert torch.equal(found[:4], expected)
    assert torch.equal(found[4:], total[4:])
    assert torch.equal(layer.counts, whole.counts)


def test_no_rows_are_no_launch():
    layer = GroupedExperts(MoeSpec(3, 2, 16), draw(3, 32, 24, seed=1), draw(3, 24, 16, seed=2))
    none = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    assert layer(draw(0, 24, seed=3), none, none.float(), draw(0, 24, seed=4)).shape == (0, 24)


@pytest.mark.parametrize("most", [MOST_PAIRS, 0])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40), experts=st.integers(1, 9), top=st.integers(1, 3), size=st.sampled_from([1, 4, 16]),
    real=st.none() | st.integers(0, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_each_pair_is_in_one_tile_of_its_expert(monkeypatch, most, rows, experts, top, size, real, seed):
    """Of all rows, or of the first ones, in their order, by the kernel and by torch; and the bound of the tiles holds."""
    monkeypatch.setattr(experts_module, "MOST_PAIRS", most)
    monkeypatch.setattr(routing_module, "COMPARED", 64)
    chosen = choice(rows, experts, min(top, experts), seed)
    placed = sort_pairs(chosen, experts, size, None if real is None else torch.tensor(real, device=DEVICE))
    flat, kept = chosen.flatten().tolist(), chosen.shape[1] * (rows if real is None else min(real, rows))
    assert len(placed.tiles) == most_tiles(len(flat), experts, size)
    found: list[tuple[int, int]] = []
    for expert, first, count in placed.tiles.tolist():
        assert 0 <= count <= size
        found += [(expert, pair) for pair in placed.order[first : first + count].tolist()]
    assert found == sorted((flat[pair], pair) for pair in range(kept))
    assert placed.counts.tolist() == [sum(flat[pair] == expert for pair in range(kept)) for expert in range(experts)]


def test_tiles_grow_with_the_rows_of_an_expert():
    bf16 = torch.bfloat16
    assert [product_tile(pairs, 8, bf16, gated=False).rows for pairs in (1, 128, 200, 512, 9999)] == [16, 16, 32, 64, 128]
    assert all(product_tile(n, 8, bf16, gated=True).rows == product_tile(n, 8, bf16, gated=False).rows for n in (1, 200, 9999))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_shapes_equal_the_loop(seed):
    rng = random.Random(seed)
    experts = rng.randrange(1, 12)
    check(
        rng.randrange(1, 80), experts, rng.randrange(1, min(4, experts) + 1), rng.randrange(1, 90), rng.randrange(1, 90),
        dtype=rng.choice([torch.float32, torch.bfloat16]), seed=seed, gelu=rng.random() < 0.5,
    )  # fmt: skip


SPECS = {
    "mixtral": MoeSpec(6, 2, 24),
    "all": MoeSpec(4, 4, 24),
    "one": MoeSpec(1, 1, 24),
    "deepseek v2": MoeSpec(12, 3, 16, renormalise=False, scale=1.5, groups=4, top_groups=2),
    "deepseek v3": MoeSpec(16, 4, 16, "sigmoid", True, 2.5, True, groups=4, top_groups=2, group_score="best_two"),
}


@pytest.mark.quick("mixtral", "one", "deepseek v3")
@pytest.mark.parametrize("name", SPECS)
def test_the_choice_is_that_of_torch(name):
    """Small whole numbers make many equal scores, of which the lowest expert is chosen. The last columns are not experts."""
    spec = SPECS[name]
    outputs = torch.cat((draw(20, spec.experts + 1, seed=1), draw(20, spec.experts + 1, seed=2).round()))
    bias = draw(spec.experts, seed=3) if spec.correction_bias else None
    chosen, weights = route(spec, outputs, bias)
    expected, factors = moe.route(spec, outputs[:, : spec.experts].contiguous(), bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, factors, rtol=1e-5, atol=1e-7)


def test_a_row_without_numbers_gets_experts_and_no_weights():
    chosen, weights = route(SPECS["deepseek v3"], torch.full((1, 16), NAN, device=DEVICE), draw(16, seed=1))
    assert chosen.tolist() == moe.route(SPECS["deepseek v3"], torch.full((1, 16), NAN), draw(16, seed=1).cpu())[0].tolist()
    assert weights.isnan().all()


def test_each_row_gets_as_many_experts_as_it_wants_whatever_their_ranks():
    """A bias may be minus infinity."""
    chosen, _ = route(SPECS["deepseek v3"], draw(2, 16, seed=1), torch.full((16,), -float("inf"), device=DEVICE))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
