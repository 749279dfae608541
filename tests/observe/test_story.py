"""Stories are bounded: they keep their beginning and their end, and a ring of them keeps the latest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.observe.story import KEPT_FIRST, MAX_ENTRIES, MAX_TEXT_CHARS, Story, StoryRing


def add(story: Story, at_s: float, text: str) -> int:
    """Return by how many bytes the story has grown."""
    added, dropped = story.add(at_s, "kind", text=text)
    return added.num_bytes - (0 if dropped is None else dropped.num_bytes)


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
    assert grown == story.num_bytes


def test_a_long_text_is_cut() -> None:
    story = Story()
    story.add(0.0, "lost", message="m" * 10_000)
    ((_, text),) = story.entries[0].fields
    assert len(str(text)) == MAX_TEXT_CHARS
    assert str(text).endswith("...")


@given(st.lists(st.tuples(st.integers(0, 9), st.text(max_size=40)), max_size=80), st.integers(1, 5), st.integers(300, 3000))
def test_a_ring_keeps_its_bounds_and_the_newest(notes: list[tuple[int, str]], max_stories: int, max_bytes: int) -> None:
    """Stories grow while they are in the ring, as those of workers do."""
    ring: StoryRing[Story] = StoryRing(max_stories=max_stories, max_bytes=max_bytes)
    for name, text in notes:
        story = ring.get(str(name))
        if story is None:
            story = Story()
            ring.keep(str(name), story)
        ring.grew(add(story, 0.0, text))
        ring.check_invariants()


def test_a_story_with_the_same_id_replaces_the_earlier_one() -> None:
    ring: StoryRing[Story] = StoryRing(max_stories=4, max_bytes=10_000)
    for _ in range(3):
        story = Story()
        story.add(0.0, "kind")
        ring.keep("a", story)
        ring.check_invariants()
    assert len(ring) == 1
