"""The spread of tokens over experts, as a worker tells it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.worker import MOST_HOT, ExpertLoad, HotExpert, expert_load

COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def test_an_even_layer_has_the_imbalance_one_and_the_lowest_expert_is_named() -> None:
    assert expert_load([(4, [5, 5, 5])]) == ExpertLoad(15, 1.0, 1.0, (HotExpert(4, 0, 1.0),))


def test_layers_without_tokens_do_not_count() -> None:
    assert expert_load([]) is None
    assert expert_load([(0, [0, 0])]) is None
    assert expert_load([(0, [0, 0]), (1, [0, 6])]) == ExpertLoad(6, 2.0, 2.0, (HotExpert(1, 1, 2.0),))


@given(st.lists(COUNTS, max_size=12))
def test_the_spread_is_that_of_its_definition(layers: list[list[int]]) -> None:
    load = expert_load(enumerate(layers))
    used = {layer: counts for layer, counts in enumerate(layers) if any(counts)}
    if load is None:
        assert not used
        return
    ratios = {layer: max(counts) / (sum(counts) / len(counts)) for layer, counts in used.items()}
    assert load.choices == sum(map(sum, layers))
    assert load.imbalance == pytest.approx(sum(ratios.values()) / len(ratios))
    assert load.worst_imbalance == pytest.approx(max(ratios.values()))
    assert len(load.hottest) == min(len(used), MOST_HOT)
    assert [one.imbalance for one in load.hottest] == sorted((one.imbalance for one in load.hottest), reverse=True)
    for one in load.hottest:
        assert used[one.layer].index(max(used[one.layer])) == one.expert
        assert one.imbalance == pytest.approx(ratios[one.layer])
    named = {one.layer for one in load.hottest}
    assert all(ratios[layer] <= load.hottest[-1].imbalance + 1e-9 for layer in used if layer not in named)
