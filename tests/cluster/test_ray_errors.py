"""What Ray says when it cannot be joined, in words that help."""

from __future__ import annotations

from ray.exceptions import AuthenticationError

from pdserve.cluster.ray_session import _explain
from pdserve.config import ClusterConfig


def test_a_ray_that_wants_a_token_was_reported_as_a_lost_connection() -> None:
    lost = ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")
    lost.__cause__ = AuthenticationError("InvalidAuthToken: Authentication token is missing or incorrect")
    assert "RAY_AUTH_MODE=token" in _explain(ClusterConfig(address="auto"), lost)


def test_a_ray_that_is_not_there_is_not_a_matter_of_tokens() -> None:
    said = _explain(ClusterConfig(address="192.0.2.1:6379"), ConnectionError("Failed to connect"))
    assert (
        said
        == "cannot join Ray at 192.0.2.1:6379: Failed to connect; start one with `ray start --head`, or use --address local"
    )
