"""The search itself, on models that fit a page: a search that finds nothing must be one that could have found it."""

from collections import OrderedDict

import pytest

from pdserve.core.ids import LeaseId
from pdserve.core.reader import Reader
from tests.search.explorer import Step, TooManyStates, Violation, canonical, endless, explore, stranded
from tests.search.machines import Machines


class Counter:
    """Counts up by 1 or 2 to 7 and there turns back to 5; 4 is bad if asked for."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def initial(self) -> int:
        return 0

    def successors(self, n: int):
        if n == 7:
            yield Step(("back",), 5, True)
            return
        yield Step(("one",), n + 1, True)
        if n < 6:
            yield Step(("two",), n + 2, False)

    def check(self, n: int) -> None:
        if n == self.bad:
            raise Violation("bad")

    def quiescent(self, n: int) -> bool:
        return n == 4


def test_a_counterexample_is_a_shortest_one():
    found = explore(Counter(bad=4), max_states=100).counterexample
    assert found is not None
    assert found.events == (("two",), ("two",))


def test_every_state_and_event_is_counted_once():
    result = explore(Counter(), max_states=100)
    assert result.counterexample is None
    assert sorted(result.graph.states) == list(range(8))
    assert result.num_transitions == 6 * 2 + 1 + 1


def test_a_search_that_was_cut_short_shows_nothing():
    with pytest.raises(TooManyStates):
        explore(Counter(), max_states=3)


def test_what_cannot_become_quiescent_is_told_with_the_way_there():
    model = Counter()
    found = stranded(explore(model, max_states=100), model)
    assert found is not None
    assert len(found.events) == 3, "5 is the first state past 4"


def test_quiescence_may_not_rest_on_an_event_that_need_not_happen():
    class OnlyByLuck(Counter):
        def quiescent(self, n: int) -> bool:
            return n in (4, 7)

        def successors(self, n: int):
            for step in super().successors(n):
                yield step._replace(sure=n != 6)

    model = OnlyByLuck()
    assert stranded(explore(Counter(), max_states=100), model) is None
    assert stranded(explore(model, max_states=100), model) is not None


def test_a_cycle_is_found_only_with_progress_and_inside():
    result = explore(Counter(), max_states=100, keep_labels=True)
    found = endless(result, lambda n: True, lambda label: label == ("back",))
    assert found is not None
    assert found.cycle[0] == ("back",)
    assert endless(result, lambda n: n != 5, lambda label: label == ("back",)) is None
    assert endless(result, lambda n: True, lambda label: False) is None


def test_machines_that_differ_in_anything_but_their_history_are_told_apart():
    class Sub(Reader):
        pass

    for kind in (Reader, Sub):
        one, two = kind(LeaseId(1, 1), 4, 2), kind(LeaseId(1, 1), 4, 2)
        one.history.append("x")
        assert canonical(one) == canonical(two)
        one.watermark = 2
        assert canonical(one) != canonical(two)
    assert canonical({1: 2, 3: 4}) == canonical({3: 4, 1: 2})
    assert canonical(OrderedDict({1: 2, 3: 4})) != canonical(OrderedDict({3: 4, 1: 2}))


def test_a_machines_event_is_applied_to_a_copy_and_its_invariants_checked():
    def advance(reader: Reader, watermark: int) -> int:
        reader.watermark = watermark
        return watermark

    def overrun(reader: Reader) -> None:
        reader.posted = 3

    machines = Machines()
    start = machines.add(Reader(LeaseId(1, 1), 4, 2))
    after, answer = machines.apply(start, advance, 2)
    assert (after != start, answer) == (True, 2)
    assert machines.apply(start, advance, 2) == (after, 2)
    assert machines.ask(start, lambda reader: reader.watermark) == 0
    with pytest.raises(AssertionError):
        machines.apply(start, overrun)
