"""The messages between `pdserve up` and its Ray driver. Each request has one answer, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdserve.cluster.events import Event
from pdserve.cluster.member import Member
from pdserve.cluster.nodes import Node
from pdserve.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to the driver: join Ray, or start one below the private folder."""

    config: ClusterConfig
    private: str
    name: str  # the cluster's


@dataclass(frozen=True, slots=True)
class Joined:
    """The driver's answer to `Begin`. It sends an error instead when it could not join Ray."""

    node_host: str
    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a method of the pool."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """The events since the last answer, and all workers as they are now, without the handles of Ray."""

    events: tuple[Event, ...]
    members: tuple[Member, ...]
