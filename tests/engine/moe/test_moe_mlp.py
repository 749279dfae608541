"""A mixture of experts over batches: against a loop in float64, and bit for bit in any company."""

from __future__ import annotations

import math
import random

import pytest
import torch
from moe_reference import Weights

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.layers import moe
from pdserve.engine.layers.rows import PROBE_ROWS, TiledRows, WholeRows

HIDDEN = 40
GROUPS = {"groups": 4, "top_groups": 2}
SPECS = {
    "mixtral": MoeSpec(4, 2, 24),
    "qwen3": MoeSpec(8, 3, 16, renormalise=False),
    "qwen2": MoeSpec(8, 3, 16, renormalise=False, shared=32, shared_gate=True),
    "deepseek v2": MoeSpec(8, 3, 16, renormalise=False, scale=1.5, shared=32, **GROUPS),
    "deepseek v3": MoeSpec(8, 3, 16, "sigmoid", True, 2.5, True, **GROUPS, group_score="best_two", shared=16),
    "one expert": MoeSpec(1, 1, 16),
    "all experts": MoeSpec(4, 4, 16, shared=16),
}


def rows_of(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def computed(layer: moe.MoeMlp, rows: TiledRows | WholeRows, x: torch.Tensor, *, padding: float = 0.0) -> torch.Tensor:
    padded = x.new_full((rows.padded(len(x)), HIDDEN), padding)
    padded[: len(x)] = x
    return layer(padded, len(x))[: len(x)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows", [WholeRows, TiledRows])
def test_a_layer_equals_the_loop_in_float64(name, rows):
    weights, way = Weights.random(SPECS[name], HIDDEN), rows()
    layer, x = weights.layer(way), rows_of(37, 1)
    torch.testing.assert_close(computed(layer, way, x).double(), weights.loop(x), rtol=0, atol=5e-6)
    assert layer.counts.sum() == 37 * SPECS[name].experts_per_token, "padding is counted, or a token is not"


@pytest.mark.parametrize("name", ["qwen2", "deepseek v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_its_company(name, dtype):
    rows = TiledRows()
    layer = Weights.random(SPECS[name], HIDDEN).layer(rows, dtype)
    rng, x = random.Random(5), rows_of(150, 2, dtype)
    alone = torch.cat([computed(layer, rows, row.unsqueeze(0)) for row in x])
    for count in (2, 3, 5, 31, 33, 64, 100, 150):
        picked = rng.sample(range(150), count)
        assert torch.equal(computed(layer, rows, x[picked], padding=rng.choice([0.0, 1.0, math.nan])), alone[picked])


def test_rows_that_all_choose_one_expert_have_the_bits_of_each_alone():
    """An expert gets more rows than any tile has, the others none."""
    rows = TiledRows()
    layer = Weights.random(MoeSpec(8, 1, 16), HIDDEN).layer(rows)
    x = rows_of(1, 3).repeat(300, 1) * torch.linspace(0.5, 2, 300).unsqueeze(-1)
    together = computed(layer, rows, x)
    assert sorted(layer.counts.tolist()) == [0] * 7 + [300]
    assert torch.equal(together, torch.cat([computed(layer, rows, row.unsqueeze(0)) for row in x]))


def test_an_expert_is_called_with_settled_row_counts_alone(monkeypatch):
    """This expert's bits depend on the number of its rows, as those of many matrix products do."""
    rows = TiledRows()
    layer = Weights.random(SPECS["mixtral"], HIDDEN).layer(rows)
    experts = [lambda y, own=own: own(y) + (0.0 if len(y) in (16, 32) else len(y)) for own in layer._experts]
    monkeypatch.setattr(layer, "_experts", experts)
    rows.settle(layer.samples(rows_of(PROBE_ROWS, 9)))
    assert rows.sizes == (16, 32)
    x = rows_of(101, 10)
    together = computed(layer, rows, x)
    assert torch.equal(together, torch.cat([computed(layer, rows, row.unsqueeze(0)) for row in x]))


def test_the_memory_of_an_expert_is_bounded_and_its_pieces_change_nothing(monkeypatch):
    weights, rows = Weights.random(SPECS["mixtral"], HIDDEN), TiledRows()
    layer, x = weights.layer(rows), rows_of(200, 4)
    whole = computed(layer, rows, x)
    calls: list[int] = []
    experts = [lambda y, own=own: (calls.append(len(y)), own(y))[1] for own in layer._experts]
    monkeypatch.setattr(layer, "_experts", experts)
    monkeypatch.setattr(moe, "MOST_ROWS", 32)
    assert torch.equal(computed(layer, rows, x), whole)
    assert max(calls) == 32
    assert len(calls) > 4


@pytest.mark.parametrize("rows", [WholeRows, TiledRows])
def test_a_row_that_is_no_number_stays_alone(rows):
    way = rows()
    layer = Weights.random(SPECS["qwen2"], HIDDEN).layer(way)
    x = rows_of(20, 6)
    whole = computed(layer, way, x)
    x[7, 3] = math.nan
    broken = computed(layer, way, x)
    assert broken[7].isnan().all()
    kept = [row for row in range(20) if row != 7]
    torch.testing.assert_close(broken[kept], whole[kept], **({"rtol": 0, "atol": 0} if rows is TiledRows else {}))


def test_counts_say_which_experts_were_chosen():
    weights, rows = Weights.random(SPECS["qwen3"], HIDDEN), WholeRows()
    layer, x = weights.layer(rows), rows_of(50, 7)
    assert layer.counts.sum() == 0, "the trial of row counts is no load"
    computed(layer, rows, x)
    experts, _ = moe.route(weights.spec, x @ weights.router.t(), None)
    assert layer.counts.tolist() == [int((experts == expert).sum()) for expert in range(8)]
    computed(layer, rows, x[:10])
    assert layer.counts.sum() == 60 * 3
