"""The generations of keys against one dict and an order of ages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.prefix_index import GENERATIONS, KeyMasks

KEYS = st.lists(st.integers(1, 60), max_size=12)
CALLS = st.lists(st.tuples(st.sampled_from(("set", "unset", "pop")), st.integers(0, 3), KEYS), max_size=60)


@given(CALLS, st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_masks_are_those_of_one_dict_and_the_youngest_keys_stay(calls: list[tuple[str, int, list[int]]], size: int) -> None:
    masks, model = KeyMasks(size), dict[int, int]()
    age: dict[int, int] = {}
    for turn, (call, worker, keys) in enumerate(calls):
        bit = 1 << worker
        if call == "set":
            masks.set(bit, keys)
            for key in keys:
                if not model.get(key, 0) & bit:
                    model[key] = model.get(key, 0) | bit
                    age[key] = turn
        elif call == "unset":
            masks.unset(bit, keys)
            model = {key: left for key, mask in model.items() if (left := mask & ~bit if key in keys else mask)}
        elif model:
            key, mask = masks.pop_oldest()
            assert model.pop(key) == mask
            # The youngest generation has fewer than `size` keys when a call adds its own, at most 12 in this test.
            assert len(model) < size + 12 or age[key] < max(age[other] for other in model)
        assert dict(masks.items()) == model
        assert len(masks) == len(model)
        assert all(masks.get(key) == mask for key, mask in model.items())
        assert masks.get(61) is None


def test_the_oldest_generation_is_taken_first() -> None:
    masks = KeyMasks(4)
    for first in range(0, 12, 4):
        masks.set(1, range(first, first + 4))
    masks.set(2, (0,))  # young again
    taken = [masks.pop_oldest()[0] for _ in range(12)]
    assert set(taken[:3]) == {1, 2, 3}
    assert set(taken[3:7]) == {4, 5, 6, 7}
    assert set(taken[7:]) == {8, 9, 10, 11, 0}


def test_keys_that_go_leave_no_generations_behind() -> None:
    masks = KeyMasks(8)
    for first in range(0, 8000, 8):
        masks.set(1, range(first, first + 8))
        masks.unset(1, range(first, first + 7))
        assert len(masks._generations) <= GENERATIONS + 1
    assert len(masks) == 1000


def test_equal_masks_share_one_object() -> None:
    """A walk compares neighbours by identity."""
    masks = KeyMasks(1000)
    for worker in range(40):
        masks.set(1 << worker, range(100))
    assert len({id(mask) for _, mask in masks.items()}) == 1
