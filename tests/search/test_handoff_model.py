"""Every reachable state of the handoff, in configurations that each make one thing possible.

Safety in each state: nothing is decoded from but the prompt's own KV of every group, no two readers of a lease are told
OK, a read only writes into inbound or quarantined blocks of its bind, and the invariants of every production machine hold.
Liveness from each state: with the router dead and the network cut for ever, what the workers do by themselves ends with
nothing held.
"""

from dataclasses import replace

import pytest

from pdserve.core import lease as lease_module
from tests.search.explorer import explore, stranded
from tests.search.group_mutants import GROUPS
from tests.search.handoff import Handoff
from tests.search.handoff_state import Config
from tests.search.window_mutants import SHARED, WINDOW

SMALL = {
    "one bind, prefill restarts": Config(decode_blocks=(2,), max_binds=1, max_grants=1),
    "steps whose writes land late": Config(decode_blocks=(2,), max_binds=1, max_grants=1, local_steps=True),
    "prefix hits on both sides": Config(
        prefill_blocks=3, decode_blocks=(3,), max_binds=1, max_grants=1, prefill_cached=True, decode_cached=True
    ),
    "two binds of a lease on one worker": Config(decode_blocks=(2,), max_grants=1),
    "a block of the lender rots, and a copy goes wrong": Config(
        decode_blocks=(2,), max_binds=1, max_grants=1, prefill_restarts=0, checksums=True, rots=1, flips=1
    ),
    "checksums and a prefill that restarts": Config(decode_blocks=(2,), max_binds=1, max_grants=1, checksums=True),
    "changed tickets": Config(decode_blocks=(2,), max_binds=1, max_grants=1, prefill_restarts=0, hostile_tickets=True),
    "two groups: one bind, prefill restarts": replace(GROUPS, prefill_restarts=1, retries=True),
    "two groups: prefix hits on prefill, one group evicted": replace(GROUPS, prefill_cached=True),
    "two groups: prefix hits on decode, one group evicted": replace(GROUPS, decode_cached=True),
    "two groups: a block of one rots, and a copy goes wrong": replace(
        GROUPS, prompts=((1, 2),), retries=True, checksums=True, rots=1, flips=1
    ),
    "a window: three blocks, two of them dead": replace(WINDOW, more_blocks=(0,), windows=(2,)),
    "two groups, one with a window: a copy goes wrong": replace(WINDOW, prompts=((1, 2, 3),), checksums=True, flips=1),
}

MOVES = Config(prompts=((1,),), prefill_blocks=2, decode_blocks=(1, 1), prefill_restarts=0)
"""Two attempts of a request, each with a lease and a decode worker of its own."""

LARGE = {
    "tickets of others and changed ones": Config(
        prompts=((1,), (2,)),
        decode_blocks=(2,),
        prefill_restarts=0,
        retries=False,
        hostile_tickets=True,
    ),
    "a rotted prefix, copies that go wrong, another form on decode": Config(
        prefill_blocks=3,
        decode_blocks=(3,),
        max_binds=1,
        prefill_restarts=0,
        prefill_cached=True,
        decode_cached=True,
        checksums=True,
        rots=1,
        flips=1,
        converted=True,
    ),
    "three blocks": Config(prompts=((1, 2, 3, 4, 5),), prefill_blocks=3, decode_blocks=(3,), max_binds=1, max_grants=1),
    "decode restarts": Config(decode_blocks=(2,), max_grants=1, decode_restarts=1),
    "a request moves, and a decode worker dies": replace(MOVES, decode_restarts=1),
    "renewals in time": Config(decode_blocks=(2,), max_grants=1, ttl=2),
    "two attempts, prefill restarts": Config(decode_blocks=(2,)),
    "two readers of a lease, prefill restarts": Config(max_grants=1),
    "two leases share a prefix on both sides": Config(
        prompts=((1, 2, 3), (1, 2, 4)), prefill_blocks=3, decode_blocks=(3,), prefill_restarts=0, retries=False
    ),
    "two attempts with room for both on prefill": Config(prefill_blocks=3, decode_blocks=(2,), prefill_restarts=0),
    "two groups: two binds of a lease on one worker": replace(GROUPS, max_binds=2, retries=True),
    "two groups: prefix hits on both sides, one group evicted": replace(GROUPS, prefill_cached=True, decode_cached=True),
    "two groups, one with a window: three blocks": WINDOW,
    "two groups, one with a window: prefix hits on both sides": replace(
        WINDOW, prompts=((1, 2, 3),), prefill_cached=True, decode_cached=True
    ),
    "a window: a block is freed behind it while another lease holds it": SHARED,
    "two groups: two blocks, one rots, and a copy goes wrong": replace(GROUPS, retries=True, checksums=True, rots=1, flips=1),
}

MAX_STATES = 700_000
"""Above the largest configuration: a change that makes one larger says so at once instead of filling the memory."""


def search(name: str, config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    model = Handoff(config)
    result = explore(model, max_states=MAX_STATES)
    with capsys.disabled():
        machines = f"{model.machines.num_states:,} states and {model.machines.num_events:,} events of production machines"
        print(f"\n{name}: {result.num_states:,} states, {result.num_transitions:,} transitions; {machines}")
    assert result.counterexample is None, str(result.counterexample)
    left = stranded(result, model)
    assert left is None, str(left)


@pytest.mark.quick(
    "one bind*",
    "steps*",
    "prefix*",
    "a block*",
    "checksums*",
    "changed*",
    "a window*",
    "two groups, one*",
    "two groups: a block*",
)
@pytest.mark.parametrize("name", SMALL)
def test_nothing_corrupts_leaks_or_hangs_the_handoff(name, capsys):
    search(name, SMALL[name], capsys)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the largest take half a minute of a core that is not shared
@pytest.mark.parametrize("name", LARGE)
def test_nothing_corrupts_leaks_or_hangs_a_larger_handoff(name, capsys):
    search(name, LARGE[name], capsys)


def test_forgetting_how_a_lease_ended_is_safe(capsys, monkeypatch):
    """Tombstones are bounded: without one a repeated Commit is answered GONE, which costs a retry and nothing else."""
    monkeypatch.setattr(lease_module, "MAX_TOMBSTONES", 0)
    search("no tombstones", Config(decode_blocks=(2,), max_grants=1), capsys)


def test_the_search_reaches_what_it_is_about():
    """A search that never activates, shares, quarantines or rebinds would find nothing because it looks at nothing."""
    seen = set()
    for name in ("prefix hits on both sides", "two binds of a lease on one worker"):
        result = explore(Handoff(SMALL[name]), max_states=MAX_STATES, keep_labels=True)
        seen |= {label[0] for label in result.graph.edge_labels}
    assert seen >= {
        "bind", "rebind", "grant", "attach", "launch", "collect", "view arrives", "copy", "done", "failed", "stopped",
        "commit arrives", "answer arrives", "commit unanswered", "finish", "cancel", "release", "tick", "expire", "evict",
        "restart", "retry request",
    }  # fmt: skip


@pytest.mark.slow
def test_the_search_reaches_what_a_planned_move_does():
    """The router gives up an attempt that decodes, and binds the next one elsewhere, before the first worker hears of it. What
    it decides for a drain, an ejection or a trial is no more than that, at any moment."""
    graph = explore(Handoff(MOVES), max_states=MAX_STATES, keep_labels=True).graph
    edges = zip(graph.sources, graph.edge_labels, strict=True)
    left = [graph.states[source] for source, label in edges if label[0] == "retry request"]
    assert any(bind.active for s in left for decode in s.decodes for bind in decode.binds)
    assert any(all(any(bind.active for bind in decode.binds) for decode in s.decodes) for s in graph.states)
