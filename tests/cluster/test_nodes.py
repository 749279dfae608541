"""Where workers may go, and what is said of those that have no place."""

from __future__ import annotations

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray._private.label_utils import validate_label_selector
from ray.core.generated import autoscaler_pb2

from pdserve.cluster.nodes import CPU, GPU, Needs, Node, NodeView, covers, spread, start_command, waits_for, without_node
from pdserve.cluster.ray_session import view_of
from pdserve.core.settings.labels import LabelSelector, match_all

ADDRESS = "10.0.0.1:6379"
BIG = Needs({"big": 1.0}, {})


def node(name: str, total: dict[str, float] | None = None, free: dict[str, float] | None = None, **labels: str) -> Node:
    offered = total or {}
    return Node(name, f"host-{name}", offered, offered if free is None else free, labels)


def said(
    needs: Needs, *nodes: Node, placed: tuple[tuple[str, Needs], ...] = (), waiting: int = 1, **view: object
) -> str | None:
    return waits_for("decode", needs, NodeView(ADDRESS, nodes, **view), placed=placed, waiting=waiting)  # type: ignore[arg-type]


def test_what_is_offered_and_free_is_waited_for_in_silence() -> None:
    assert said(BIG, node("a"), node("b", {"big": 1})) is None
    assert said(Needs({}, {}), node("a")) is None


def test_what_no_node_offers_comes_with_the_command_and_the_setting() -> None:
    needs = Needs({CPU: 4.0, GPU: 1.0, "big": 0.5}, {"pool": "decode", "zone": "in(a, b)", "spot": "!yes"})
    text = said(needs, node("a", {CPU: 2}), waiting=2)
    assert text is not None
    assert (
        "needs CPU: 4, GPU: 1, big: 0.5, pool=decode, zone=in(a, b), spot=!yes, which no node of the Ray cluster offers" in text
    )
    assert "change decode.num_cpus and decode.num_gpus and decode.resources and decode.labels" in text
    command = text.partition("Start one with: ")[2].partition(" ; or")[0]
    assert shlex.split(command) == [
        "RAY_worker_niceness=0",
        "ray",
        "start",
        f"--address={ADDRESS}",
        "--num-cpus=8",
        "--num-gpus=2",
        '--resources={"big": 1.0}',
        "--labels=pool=decode,zone=a",
    ]


def test_a_gang_without_a_node_says_how_many_ranks_need_it() -> None:
    gang = Needs({CPU: 8.0}, {}, ranks=4)
    text = said(gang, node("a", {CPU: 4}), node("b", {CPU: 4}))
    assert text is not None
    assert text.startswith(
        "its gang of 4 ranks needs CPU: 8 on one node, which no node of the Ray cluster offers (the most on one node is "
        "CPU: 4 free, of 4). Start one with"
    )
    assert "--num-cpus=8 ; or change decode.num_cpus, or the degrees in decode.engine" in text
    used = said(gang, node("a", {CPU: 8}, free={})) or ""
    assert used == (
        "its gang of 4 ranks needs CPU: 8 on one node, which others use on host-a (the most on one node is CPU: 0 free, of 8)"
    )
    assert gang.request == Needs({CPU: 8.0}, {}).request, "Ray knows nothing of ranks"


def test_a_gang_that_reserves_no_cpus_goes_to_a_node_with_cores_for_all_its_ranks() -> None:
    """It went to the node with the fewest workers, where it did not start."""
    gang = Needs({}, {}, ranks=4, cores=4)
    small, large = node("small", {CPU: 2}), node("large", {CPU: 4}, free={})
    assert spread([gang, gang], [small, large], there=["large"]) == ["large", "large"]
    assert spread([gang], [small]) == ["small"], "Ray may know less than all cores: the worker itself counts them"
    assert spread([Needs({}, {})], [small, large], there=["large"]) == ["small"]


def test_the_command_for_a_cluster_that_takes_a_token_was_refused_by_ray() -> None:
    assert "RAY_AUTH_MODE=token ray start" in start_command(BIG, NodeView(ADDRESS, (), takes_token=True), 1)


def test_a_label_on_one_node_and_a_resource_on_another_help_nobody() -> None:
    needs = Needs({"big": 1.0}, {"pool": "decode"})
    assert "no node" in (said(needs, node("a", {"big": 1}), node("b", pool="decode")) or "")


def test_what_others_use_is_told_apart_from_what_we_use_ourselves() -> None:
    used = node("b", {"big": 1}, free={})
    assert said(BIG, node("a"), used) == "it needs big: 1, which others use on host-b"
    assert "which our other workers use up. Start one with" in (said(BIG, node("a"), used, placed=(("b", BIG),)) or "")


def test_an_autoscaler_is_given_time_unless_it_has_no_such_node() -> None:
    assert (said(BIG, node("a"), autoscaled=True) or "").endswith("; the autoscaler was asked for one")
    assert (said(BIG, node("a"), autoscaled=True, coming=("big-node",)) or "").endswith("; the autoscaler starts big-node")
    hopeless = said(BIG, node("a"), autoscaled=True, hopeless=({"big": 1.0},)) or ""
    assert "nor has the autoscaler a kind of node that does" in hopeless
    assert "ray start" not in hopeless


def test_a_worker_whose_process_is_being_started_was_told_that_others_use_what_it_has() -> None:
    """Of three that ask alike one has no node; of those that ask by labels, the one whose request is pending."""
    labelled = [Needs({}, {"pool": selector}) for selector in ("a", "in(b, a)", "!a")]
    view = NodeView(ADDRESS, (), pending=(BIG.request, Needs({}, {"pool": "in(a, b)"}).request))
    assert without_node([BIG, BIG, BIG], view) == [False, False, True]
    assert without_node(labelled, view) == [False, True, False]
    assert without_node([], view) == []


def test_a_cluster_without_nodes_is_said_to_have_none() -> None:
    assert said(BIG) == "the Ray cluster has no living node"


AMOUNTS = st.dictionaries(st.sampled_from([CPU, GPU, "big"]), st.sampled_from([0.5, 1.0, 2.0]))
KINDS = st.dictionaries(st.just("pool"), st.sampled_from(["a", "b"]))
SELECTORS = st.dictionaries(st.just("pool"), st.sampled_from(["a", "!a", "in(a, b)", "!in(b, c)"]))
NEEDS = st.builds(Needs, AMOUNTS, SELECTORS)
NODES = st.lists(st.tuples(AMOUNTS, KINDS), max_size=4).map(
    lambda drawn: [node(str(number), amounts, **labels) for number, (amounts, labels) in enumerate(drawn)]
)


@given(needs=NEEDS, nodes=NODES, workers=st.integers(1, 3))
def test_the_node_that_the_command_starts_has_room_for_them(needs: Needs, nodes: list[Node], workers: int) -> None:
    words = dict(
        word.removeprefix("--").split("=", 1) for word in shlex.split(start_command(needs, NodeView(ADDRESS, ()), workers))[3:]
    )
    offered = {CPU: float(words.get("num-cpus", 0)), GPU: float(words.get("num-gpus", 0))}
    offered |= json.loads(words.get("resources", "{}"))
    labels = dict(pair.split("=") for pair in words.get("labels", "").split(",") if pair)
    assert spread([needs] * workers, [node("new", offered, **labels)]) == ["new"] * workers


@given(workers=st.lists(NEEDS, max_size=6), nodes=NODES)
def test_workers_are_spread_over_nodes_that_suit_them_and_no_node_is_promised_twice(
    workers: list[Needs], nodes: list[Node]
) -> None:
    chosen = spread(workers, nodes)
    for each in nodes:
        here = [needs for needs, node_id in zip(workers, chosen, strict=True) if node_id == each.node_id]
        assert all(match_all(needs.labels, each.labels) for needs in here)
        total = {name: sum(needs.amounts.get(name, 0.0) for needs in here) for name in (CPU, GPU, "big")}
        assert covers(each.total, total)


@given(count=st.integers(0, 20), there=st.lists(st.sampled_from("abc"), max_size=3), nodes=st.integers(1, 3))
def test_workers_that_need_nothing_are_spread_evenly(count: int, there: list[str], nodes: int) -> None:
    names = "abc"[:nodes]
    before = [name for name in there if name in names]
    chosen = spread([Needs({}, {})] * count, [node(name) for name in names], before)
    loads = [chosen.count(name) + before.count(name) for name in names]
    assert None not in chosen
    assert max(loads) - min(loads) <= max(1, len(before))


@pytest.mark.parametrize(
    ("selector", "matching", "other"),
    [
        ("a", ["a"], ["b", None]),
        ("!a", ["b", None], ["a"]),
        ("in(a, b)", ["a", "b"], ["c", None]),
        ("!in(a,b)", ["c", None], ["a", "b"]),
    ],
)
def test_selectors_mean_what_they_mean_to_ray(selector: str, matching: list[str | None], other: list[str | None]) -> None:
    assert validate_label_selector({"pool": selector}) is None
    parsed = LabelSelector.parse(selector)
    assert LabelSelector.parse(str(parsed)) == parsed
    assert " " not in str(parsed), "Ray takes it for part of the value"
    assert all(parsed.matches(value) for value in matching)
    assert not any(parsed.matches(value) for value in other)


@pytest.mark.parametrize("text", ["", "-a", "a b", "in()", "in(a", "!!a", "in(a, )", "x" * 64])
def test_what_is_no_selector_is_refused_before_ray_sees_it(text: str) -> None:
    with pytest.raises(ValueError, match="is not a label selector"):
        LabelSelector.parse(text)


def test_rays_answer_becomes_a_view_of_nodes_that_can_be_used() -> None:
    reply = autoscaler_pb2.GetClusterStatusReply()
    for number, status in enumerate(("RUNNING", "DRAINING", "DEAD", "IDLE")):
        state = reply.cluster_resource_state.node_states.add(status=status, node_ip_address=f"10.0.0.{number}")
        state.node_id = bytes([number])
        state.total_resources["big"] = 2.0
        state.available_resources["big"] = 1.0
        state.labels["pool"] = "decode"
    asked = reply.cluster_resource_state.pending_resource_requests.add(count=2).request
    asked.resources_bundle["big"] = 1.0
    for operator, values in (("LABEL_OPERATOR_IN", ["b", "a"]), ("LABEL_OPERATOR_NOT_IN", ["x"])):
        rules = asked.label_selectors.add() if not asked.label_selectors else asked.label_selectors[0]
        rules.label_constraints.add(label_key="pool" if values[1:] else "spot", operator=operator, label_values=values)
    view = view_of(reply, ADDRESS)
    assert view.pending == (Needs({"big": 1.0}, {"pool": "in(a, b)", "spot": "!x"}).request,) * 2
    assert [each.host for each in view.nodes] == ["10.0.0.0", "10.0.0.3"]
    assert view.nodes[0] == Node("00", "10.0.0.0", {"big": 2.0}, {"big": 1.0}, {"pool": "decode"})
    assert not view.autoscaled
    reply.autoscaling_state.pending_instances.add(ray_node_type_name="gpu-node")
    reply.autoscaling_state.pending_instance_requests.add(ray_node_type_name="gpu-node", count=2)
    reply.autoscaling_state.infeasible_resource_requests.add().resources_bundle["huge"] = 1.0
    view = view_of(reply, ADDRESS)
    assert (view.autoscaled, view.coming, view.hopeless) == (True, ("gpu-node",), ({"huge": 1.0},))
