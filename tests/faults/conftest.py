"""One cluster of two pairs for each module, healed before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_service import Service, messages, two_pairs


@pytest.fixture(scope="module")
def shared() -> Iterator[Service]:
    with two_pairs() as cluster:
        yield Service(cluster, messages(24))


@pytest.fixture
def service(shared: Service) -> Service:
    shared.cluster.heal()
    return shared
