"""What Ray says when it cannot be joined, in words that help."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from ray.exceptions import AuthenticationError

from pdserve.cluster.errors import ClusterError
from pdserve.cluster.ray_session import RaySession, _explain
from pdserve.config import ClusterConfig


def test_a_ray_that_wants_a_token_was_reported_as_a_lost_connection() -> None:
    lost = ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")
    lost.__cause__ = AuthenticationError("InvalidAuthToken: Authentication token is missing or incorrect")
    assert "it wants its token; set RAY_AUTH_TOKEN" in _explain(ClusterConfig(address="auto"), lost)


def test_a_ray_that_is_not_there_is_not_a_matter_of_tokens() -> None:
    said = _explain(ClusterConfig(address="192.0.2.1:6379"), ConnectionError("Failed to connect"))
    assert (
        said
        == "cannot join Ray at 192.0.2.1:6379: Failed to connect; start one with `ray start --head`, or use --address local"
    )


def test_a_machine_that_is_no_node_is_told_how_to_become_one() -> None:
    """The words are Ray's own, of its `resolve_node_to_connect`; another machine is not at hand here."""
    ray_says = "No node info found matching attributes: '192.0.2.7' when trying to resolve node to connect to."
    said = _explain(ClusterConfig(address="192.0.2.1:6379"), RuntimeError(ray_says))
    assert said.endswith("this machine is none of its nodes; make it one with `ray start --address=192.0.2.1:6379`")


def test_an_address_that_nobody_answers_is_refused_by_its_flag_and_not_tried_for_a_minute(tmp_path: Path) -> None:
    with socket.socket() as silent:  # bound and not listening: nobody else can take the port meanwhile
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"cannot join Ray at {address}.*--address"):
            RaySession.connect(ClusterConfig(address=address), tmp_path)
