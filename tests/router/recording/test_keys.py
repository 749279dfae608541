"""Prefix keys in recordings: they are replaced, and an index decides the same from what replaces them."""

from __future__ import annotations

from functools import reduce
from operator import xor

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.block_hash import PrefixDelta
from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.prefix_index import PrefixIndex
from router.recording.codec import event_from_plain, to_plain
from router.recording.redact import Redaction
from tests.router.core_peers import hello

LINKS = (ev.LinkId(1), ev.LinkId(2))
FAULTS = st.sampled_from(("none", "none", "none", "lost", "digest", "full", "full digest"))
DELTAS = st.lists(st.tuples(st.sampled_from(LINKS), st.sets(st.integers(1, 9)), FAULTS), max_size=20)


def deltas(drawn: list[tuple[ev.LinkId, set[int], str]]) -> list[ev.PrefixSeen]:
    """Two workers, which tell what they hold, and sometimes something else."""
    told: dict[ev.LinkId, tuple[int, set[int]]] = dict.fromkeys(LINKS, (0, set()))
    events = []
    for link, now, fault in drawn:
        number, before = told[link]
        number += 1 + (fault == "lost")
        digest = reduce(xor, now, 0) ^ (99 if "digest" in fault else 0)
        full = "full" in fault
        added, removed = (now, set[int]()) if full else (now - before, before - now)
        events.append(ev.PrefixSeen(link, PrefixDelta(number, tuple(added), tuple(removed), digest, full)))
        told[link] = number, now
    return events


@given(DELTAS)
def test_an_index_decides_the_same_from_what_replaces_the_keys(drawn: list[tuple[ev.LinkId, set[int], str]]) -> None:
    redaction = Redaction(b"k" * 32, prompts=False)
    real, replayed = PrefixIndex(1 << 20), PrefixIndex(1 << 20)
    for index in (real, replayed):
        for link in LINKS:
            index.join(link, hello(f"w{link}", Role.PREFILL))
    for event in deltas(drawn):
        again = event_from_plain(redaction.hide(to_plain(event)))
        assert isinstance(again, ev.PrefixSeen)
        asks = [
            index.apply(seen.link, seen.delta, now_s=float(at_s))
            for at_s, (index, seen) in enumerate([(real, event), (replayed, again)])
        ]
        assert asks[0] == asks[1]
        assert [len(real.held(link)) for link in LINKS] == [len(replayed.held(link)) for link in LINKS]


def test_no_key_is_told_and_equal_keys_stay_equal() -> None:
    keys = (0xABCDEF, 0x123456789)
    redaction = Redaction(b"k" * 32, prompts=True)
    submit = ev.Submit(RequestId("r"), RequestSpec((1,), SamplingParams(seed=1)), 0.0, 1.0, prefix_keys=keys)
    seen = ev.PrefixSeen(LINKS[0], PrefixDelta(1, keys[::-1], (), keys[0] ^ keys[1], True))
    asked, told = redaction.hide(to_plain(submit))["prefix_keys"], redaction.hide(to_plain(seen))["delta"]
    assert asked == told["added"][::-1]
    assert told["digest"] == asked[0] ^ asked[1]
    assert not {*keys, keys[0] ^ keys[1]} & {*asked, told["digest"]}
