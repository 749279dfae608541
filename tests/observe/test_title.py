"""Process titles, in whatever order a parent hands its environment over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.observe.title import KEEP_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
SHOW = """
from pdserve.observe.title import set_title
set_title("decode-0")
print(open("/proc/self/cmdline").read().partition("\\0")[0])
print(len(open("/proc/self/environ").read().split("\\0")) > 2)
"""


@pytest.mark.parametrize("value", ["1", None])
@pytest.mark.parametrize("first", [True, False])
def test_a_title_stands_and_the_environment_stays(value: str | None, *, first: bool) -> None:
    """Ray hands the variable on, in the order of a hash table: where it came first, the process had no title."""
    others = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    kept = {} if value is None else {KEEP_ENVIRONMENT: value}
    environment = kept | others if first else others | kept
    shown = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.split("\n")[:2] == ["pdserve: decode-0", "True"]
