"""The nodes of the Ray cluster that this process has joined, in one look at what Ray's control service knows."""

from __future__ import annotations

import os
from typing import Any, Final

import ray
from ray import _raylet
from ray.core.generated import autoscaler_pb2, common_pb2

from pdserve.cluster.nodes import Node, NodeView, Request
from pdserve.core.settings.labels import LabelSelector

LOOK_TIMEOUT_S: Final = 5.0
_PROTOCOL: Final[Any] = autoscaler_pb2  # these modules and the compiled part of Ray have no type stubs
_COMMON: Final[Any] = common_pb2
_COMPILED: Final[Any] = _raylet
_NOT_IN: Final = _COMMON.LABEL_OPERATOR_NOT_IN
MOST_PENDING: Final = 1000  # requests that are alike and kept at most; other users of the cluster may have any number
_USABLE: Final = (_PROTOCOL.RUNNING, _PROTOCOL.IDLE)  # neither dead nor draining


def look() -> NodeView | None:
    """Ask Ray for its nodes. None means that Ray does not answer now, so nothing can be said about them."""
    address = str(ray.get_runtime_context().gcs_address)
    reply = _PROTOCOL.GetClusterStatusReply()
    try:
        reply.ParseFromString(_COMPILED.GcsClient(address).get_cluster_status(timeout_s=LOOK_TIMEOUT_S))
    except ray.exceptions.RayError:
        return None
    return view_of(reply, address)


def view_of(reply: Any, address: str) -> NodeView:
    """Translate a `GetClusterStatusReply` of Ray's control service."""
    state = reply.autoscaling_state
    return NodeView(
        address=address,
        nodes=tuple(_node(state) for state in reply.cluster_resource_state.node_states if state.status in _USABLE),
        pending=tuple(
            _request(each.request)
            for each in reply.cluster_resource_state.pending_resource_requests
            for _ in range(min(each.count, MOST_PENDING))
        ),
        autoscaled=reply.HasField("autoscaling_state"),  # only an autoscaler writes it
        coming=tuple(
            sorted({each.ray_node_type_name for each in (*state.pending_instances, *state.pending_instance_requests)})
        ),
        takes_token=os.environ.get("RAY_AUTH_MODE", "").lower() == "token",  # Ray or the operator has set it
        hopeless=tuple(dict(request.resources_bundle) for request in state.infeasible_resource_requests),
    )


def _request(request: Any) -> Request:
    selectors = {
        (rule.label_key, LabelSelector(rule.operator == _NOT_IN, tuple(sorted(rule.label_values))))
        for selector in request.label_selectors[:1]  # the others are fallbacks, and our requests have none
        for rule in selector.label_constraints
    }
    return frozenset(request.resources_bundle.items()), frozenset(selectors)


def _node(state: Any) -> Node:
    return Node(
        node_id=state.node_id.hex(),
        host=state.node_ip_address,
        total=dict(state.total_resources),
        free=dict(state.available_resources),
        labels=dict(state.labels),
    )
