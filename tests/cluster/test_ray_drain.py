"""Workers that drain leave a real Ray cluster for good; the last one only by force."""

from __future__ import annotations

import re
import signal
from typing import Any

import psutil
import pytest

from pdserve.client import AdminClient
from pdserve.client.command_line import CallFailed
from pdserve.cluster import processes

pytestmark = pytest.mark.ray
WAIT_S = 90.0


@pytest.mark.slow
def test_up_says_who_drained_and_does_not_start_it_again(run_command: Any) -> None:
    """(1) One of two decode workers drains: `up` says so, its process ends though restarts are left, the others go on.
    (2) The last decode worker drains only by force. The cluster stays, since `pdserve scale` can fill the pool again."""
    command = run_command("up", "--port", "0", "--decode", "2")
    command.wait_for("ready; Ctrl-C stops it")
    address = re.search(r"^admin +(\S+)", command.text, re.MULTILINE)
    assert address is not None
    with AdminClient(address[1]) as client:
        pids = {worker.hello.worker_id: worker.hello.pid for worker in client.cluster_state().workers}
        leaving = psutil.Process(pids["decode-1"])
        assert list(client.drain("decode-1"))[-1].done
        command.wait_for("decode-1 drained and left")
        assert not processes.wait_gone([leaving], WAIT_S)
        assert [worker.hello.worker_id for worker in client.cluster_state().workers] == ["decode-0", "prefill-0"]
        with pytest.raises(CallFailed, match="the last decode worker that serves"):
            list(client.drain("decode-0"))
        assert list(client.drain("decode-0", force=True))[-1].done
        command.wait_for("decode-0 drained and left")
        assert [worker.hello.worker_id for worker in client.cluster_state().workers] == ["prefill-0"]
    command.child.send_signal(signal.SIGTERM)
    assert command.end() == 0
    assert "no decode worker is left" not in command.text
    assert "restarting" not in command.text
