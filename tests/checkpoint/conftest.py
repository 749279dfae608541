"""The tiny model, made once, and copies of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pdserve.checkpoint.resolve import resolve


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    return resolve("tiny")


@pytest.fixture
def copy(tiny_dir, tmp_path) -> Path:
    return shutil.copytree(tiny_dir, tmp_path / "copy")
