"""The output of a command that keeps a cluster up may break: the disk is full, its reader or its terminal is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from pdserve.cluster.events import Event, EventPart, PartStarted
from pdserve.cluster.launch import Cluster
from pdserve.config import ClusterConfig

PROGRAM = """
import os, sys
from pdserve.cluster.events import LogsKept
from pdserve.commands.console import make_console
from pdserve.commands.progress import StartView
view = StartView(make_console(steady=True), lambda: None)
with view:
    for _ in range(3):
        view(LogsKept("/logs"))
os.write(2, b"goes on")
"""


@pytest.mark.parametrize("output", ["full", "no reader", "no terminal"])
def test_an_up_whose_output_broke_goes_on(output: str) -> None:
    """It ended `pdserve up`, and with it the whole cluster."""
    if output == "full":
        ends = [os.open("/dev/full", os.O_WRONLY)]
    else:
        ends = [*os.openpty()] if output == "no terminal" else [*os.pipe()]
        os.close(ends.pop(0))
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=ends[0], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False
        )
    finally:
        os.close(ends[0])
    assert (done.returncode, done.stderr) == (0, b"goes on")


def test_a_listener_that_fails_ends_nothing() -> None:
    def fails(_event: Event) -> None:
        raise OSError("no space left")

    Cluster(ClusterConfig(), stop=threading.Event(), listener=fails)._hear(PartStarted(EventPart.RAY))
