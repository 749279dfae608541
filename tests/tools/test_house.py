"""The checks of `tools.house`, on a small tree of its own: protocols with one class, and doors of rooms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import house

FILES = {
    "pdserve/planner/__init__.py": '__all__ = ["limits"]',
    "pdserve/planner/limits.py": "from pdserve.planner.means import Mean",
    "pdserve/planner/means.py": "",
    "pdserve/cluster/__init__.py": "",
    "pdserve/cluster/user.py": "\n".join(
        f"from pdserve.{name}"
        for name in ("planner.limits import Limits", "planner import limits", "planner.means import Mean")
    ),
    "router/core/shapes.py": """
class Two(Protocol):
    size: int
    def take(self): ...
class Lone(Protocol):
    def give(self): ...
class Function(Protocol):
    def __call__(self): ...
class First:
    def __init__(self):
        self.size = 1
    def take(self): ...
class Second(First):
    def give(self): ...
""",
}


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    house.door.cache_clear()
    yield
    house.door.cache_clear()


def test_a_protocol_needs_two_classes_with_all_its_names_unless_it_is_a_function() -> None:
    assert [line.split(" ", 1)[1] for line in house.lone_protocols()] == ["Lone: Second"]


def test_a_room_is_entered_by_what_its_door_names() -> None:
    assert house.past_doors() == ["pdserve/cluster/user.py:3 pdserve.planner.means"]
    assert house.without_door() == ["pdserve.cluster", "router.core"]
