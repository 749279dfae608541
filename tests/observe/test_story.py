"""Stories are bounded: they keep their beginning and their end, and a ring of them keeps the latest."""

from __future__ import annotations

from enum import Enum

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ErrorCode
from pdserve.core.ids import Incarnation, LeaseId, WorkerId
from pdserve.observe.story import KEPT_FIRST, MAX_ENTRIES, MAX_TEXT_CHARS, Story, StoryRing


class Kind(Enum):
    KIND = "kind"


def add(story: Story, at_s: float, text: str) -> int:
    """Return by how many entries the story has grown."""
    return story.note(at_s, Kind.KIND, text=text)


@given(st.integers(0, 4 * MAX_ENTRIES))
def test_a_story_keeps_its_beginning_and_its_end_and_counts_the_rest(count: int) -> None:
    story = Story()
    grown = sum(add(story, float(at), "x" * (at % 7)) for at in range(count))
    times = [int(entry.at_s) for entry in story.entries]
    assert len(times) + story.left_out == count
    assert len(times) <= MAX_ENTRIES
    assert times[:KEPT_FIRST] == list(range(min(count, KEPT_FIRST)))
    if count > KEPT_FIRST:
        assert times[KEPT_FIRST:] == list(range(count - len(times) + KEPT_FIRST, count))
    assert grown == len(story)


def test_a_long_text_is_cut() -> None:
    story = Story()
    story.note(0.0, Kind.KIND, message="m" * 10_000)
    ((_, text),) = story.entries[0].fields
    assert len(str(text)) == MAX_TEXT_CHARS
    assert str(text).endswith("...")


def test_values_become_text_when_the_story_is_read() -> None:
    story = Story()
    scores = tuple((WorkerId(f"decode-{number}"), number / 3) for number in range(2))
    given = {"error": ErrorCode.OVERLOADED, "lease": LeaseId(Incarnation(10), 2), "scores": scores, "attempt": 2, "wait_s": 0.5}
    story.note(1.0, Kind.KIND, **given)
    story.note(2.0, Kind.KIND, scores=scores * 100)
    first, second = story.entries
    expected = {
        "error": "overloaded",
        "lease": f"{10:016x}.2",
        "scores": "decode-0 0, decode-1 0.333",
        "attempt": 2,
        "wait_s": 0.5,
    }
    assert (first.at_s, first.kind, dict(first.fields)) == (1.0, "kind", expected)
    assert len(str(second.fields[0][1])) == MAX_TEXT_CHARS


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=40)), max_size=80), st.integers(1, 5), st.integers(1, 30))
def test_a_ring_keeps_its_bounds_and_the_newest(notes: list[tuple[int, str]], max_stories: int, max_entries: int) -> None:
    """Stories grow while they are in the ring, as those of workers do."""
    ring: StoryRing[Story] = StoryRing(max_stories=max_stories, max_entries=max_entries)
    for name, text in notes:
        story = ring.get(str(name))
        if story is None:
            story = Story()
            ring.keep(str(name), story)
        ring.grew(add(story, 0.0, text))
        ring.check_invariants()


def test_a_story_with_the_same_id_replaces_the_earlier_one() -> None:
    ring: StoryRing[Story] = StoryRing(max_stories=4, max_entries=10)
    for _ in range(3):
        story = Story()
        story.note(0.0, Kind.KIND)
        ring.keep("a", story)
        ring.check_invariants()
    assert len(ring) == 1
