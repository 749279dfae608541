"""The choice of nodes of a Ray cluster for workers, and the reason why a worker has no place yet. Pure.

Ray says nothing about an actor that it cannot place. It waits, which is right where an autoscaler or a person may add a
node. So this module applies Ray's rules itself, to tell what is missing and which command brings it.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.core.settings.labels import LabelSelector, match_all

CPU: Final = "CPU"  # Ray's names of the resources that `ray start --num-cpus` and `--num-gpus` offer
GPU: Final = "GPU"
_FLAGS: Final = {CPU: "--num-cpus", GPU: "--num-gpus"}
_SETTINGS: Final = {CPU: "num_cpus", GPU: "num_gpus"}
ROUNDING: Final = 1e-4  # Ray counts resources in ten-thousandths


Request = tuple[frozenset[tuple[str, float]], frozenset[tuple[str, LabelSelector]]]
"""The request of one worker: (resource, amount) pairs and (label, selector) pairs. It equals what Ray reports as pending."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of one worker: amounts of Ray's resources by name, none of them 0, and selectors of a node's labels."""

    amounts: Mapping[str, float]
    labels: Mapping[str, str]
    ranks: int = 1  # the amounts are those of so many processes, which one node must hold
    cores: int = 0  # a gang that reserves no CPUs needs so many all the same; 0: it reserves them, or may share cores

    def __str__(self) -> str:
        parts = [f"{name}: {amount:g}" for name, amount in self.amounts.items()]
        parts += [f"{name}={selector}" for name, selector in self.labels.items()]
        return ", ".join(parts) or "nothing but a node"

    @property
    def said(self) -> str:
        """The needs as a sentence that begins with the worker."""
        return f"it needs {self}" if self.ranks == 1 else f"its gang of {self.ranks} ranks needs {self} on one node"

    @property
    def request(self) -> Request:
        """The needs in the form of Ray's pending requests."""
        selectors = {(name, LabelSelector.parse(text)) for name, text in self.labels.items()}
        return frozenset(self.amounts.items()), frozenset(selectors)


@dataclass(frozen=True, slots=True)
class Node:
    """A living node as Ray describes it: all resources that it has (`total`), and those that nobody uses now (`free`)."""

    node_id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodeView:
    """A Ray cluster at one moment."""

    address: str  # host:port of Ray's control service
    nodes: tuple[Node, ...]
    pending: tuple[Request, ...] = ()  # the requests that have no node yet, one for each worker
    autoscaled: bool = False  # an autoscaler adds nodes
    coming: tuple[str, ...] = ()  # the kinds of nodes that the autoscaler starts now
    hopeless: tuple[Mapping[str, float], ...] = ()  # the amounts of requests for which the autoscaler has no kind of node
    takes_token: bool = False


def covers(offered: Mapping[str, float], amounts: Mapping[str, float]) -> bool:
    """Tell whether the offered resources hold all amounts, up to Ray's rounding."""
    return all(offered.get(name, 0.0) + ROUNDING / 2 >= amount for name, amount in amounts.items())


def spread(workers: Sequence[Needs], nodes: Sequence[Node], there: Iterable[str] = ()) -> list[str | None]:
    """Return a node id for each worker, so that workers are spread evenly over the nodes that suit them. A gang goes to a node
    that has cores for all its ranks, if there is one.

    None stands for a worker for which no node has room. there: node ids of the workers that have a place already, one
    for each worker.
    """
    left = {node.node_id: dict(node.free) for node in nodes}
    counts = Counter(there)
    chosen: list[str | None] = []
    for needs in workers:
        suit = [n for n in nodes if match_all(needs.labels, n.labels) and covers(left[n.node_id], needs.amounts)]
        # Ray may know less than all CPUs of a node, so a node that seems too small is taken where no other one is left.
        node = min(suit, key=lambda node: (node.total.get(CPU, 0.0) < needs.cores, counts[node.node_id]), default=None)
        chosen.append(node.node_id if node else None)
        if node:
            counts[node.node_id] += 1
            _take(left[node.node_id], needs.amounts)
    return chosen


def without_node(asked: Sequence[Needs], view: NodeView) -> list[bool]:
    """Tell for each worker whether Ray still looks for its node.

    False means that its process is being started: the resources that it takes are then already in use, by itself.
    """
    left = Counter(view.pending)
    waits = []
    for needs in reversed(asked):  # among workers with equal needs, the first get a node first
        waits.append(left[needs.request] > 0)
        left[needs.request] -= 1
    return waits[::-1]


def waits_for(role: str, needs: Needs, view: NodeView, *, placed: Sequence[tuple[str, Needs]], waiting: int) -> str | None:
    """Return why a worker has no place and what mends that; None when a node has room, so Ray is starting the process.

    placed: (node id, needs) of our workers that have a place. waiting: the number of workers of the role that have none.
    """
    if not view.nodes:
        return "the Ray cluster has no living node"
    labelled = [node for node in view.nodes if match_all(needs.labels, node.labels)]
    if any(covers(node.free, needs.amounts) for node in labelled):
        return None
    if busy := [node for node in labelled if covers(_without(node, placed), needs.amounts)]:
        hosts = ", ".join(sorted({node.host for node in busy}))
        return f"{needs.said}, which others use on {hosts}{_most_free(needs, busy)}"
    offered = any(covers(node.total, needs.amounts) for node in labelled)
    said = f"{needs.said}, which " + ("our other workers use up" if offered else "no node of the Ray cluster offers")
    said += _most_free(needs, labelled)
    change = f"change {_settings(role, needs)}"
    if not view.autoscaled:
        return f"{said}. Start one with: {start_command(needs, view, waiting)} ; or {change}"
    if any(dict(amounts) == dict(needs.amounts) for amounts in view.hopeless):
        return f"{said}, nor has the autoscaler a kind of node that does: add one to its configuration, or {change}"
    return f"{said}; the autoscaler " + (f"starts {', '.join(view.coming)}" if view.coming else "was asked for one")


def _most_free(needs: Needs, nodes: Sequence[Node]) -> str:
    """Return how much of what a gang needs on one node the node with the most has free. Empty: the worker is no gang."""
    if needs.ranks == 1 or not nodes:
        return ""
    name = max(needs.amounts, key=needs.amounts.__getitem__)
    best = max(nodes, key=lambda node: (node.free.get(name, 0.0), node.total.get(name, 0.0)))
    return f" (the most on one node is {name}: {best.free.get(name, 0.0):g} free, of {best.total.get(name, 0.0):g})"


def start_command(needs: Needs, view: NodeView, workers: int) -> str:
    """Return the command that makes a machine a node with room for `workers` workers with these needs.

    The command sends the token where the cluster takes one.
    """
    words = ["RAY_worker_niceness=0", *(["RAY_AUTH_MODE=token"] if view.takes_token else [])]
    words += ["ray", "start", f"--address={view.address}"]
    words += [f"{flag}={needs.amounts[name] * workers:g}" for name, flag in _FLAGS.items() if name in needs.amounts]
    custom = {name: amount * workers for name, amount in needs.amounts.items() if name not in _FLAGS}
    if custom:
        words.append(f"--resources={json.dumps(custom)}")
    labels = {name: LabelSelector.parse(text).example for name, text in needs.labels.items()}
    if pairs := [f"{name}={value}" for name, value in labels.items() if value is not None]:
        words.append(f"--labels={','.join(pairs)}")
    return shlex.join(words)


def _settings(role: str, needs: Needs) -> str:
    """Return the names of the settings from which the needs come."""
    names = [_SETTINGS[name] for name in _FLAGS if name in needs.amounts]
    names += ["resources"] if needs.amounts.keys() - _FLAGS.keys() else []
    names += ["labels"] if needs.labels else []
    settings = " and ".join(f"{role}.{name}" for name in names)
    return settings if needs.ranks == 1 else f"{settings}, or the degrees in {role}.engine"


def _without(node: Node, placed: Sequence[tuple[str, Needs]]) -> dict[str, float]:
    """Return the resources that the node would have free if only our placed workers used it."""
    left = dict(node.total)
    for node_id, needs in placed:
        if node_id == node.node_id:
            _take(left, needs.amounts)
    return left


def _take(left: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        left[name] = left.get(name, 0.0) - amount
