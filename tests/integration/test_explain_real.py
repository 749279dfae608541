"""A decode worker dies under a request of real processes: the story tells of it, and the recording replays to equal effects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from real_service import APART, BOUND_S, GREEDY, QUICK_BEATS, OpenStream, long_prefill, serving, tiny, wait_prefilling

from pdserve.config import RouterConfig
from pdserve.rpc.status import REQUEST_ID_METADATA
from testkit.client import request
from testkit.processes import ProcessCluster
from testkit.told_worker import Hold

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
SALT = "the salt of a tenant"
PROMPT = "hello there"
HELD = 100  # tokens: a request that is held here has not ended when a worker dies


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "file"


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="module")
def cluster(recording: Path, hold: Hold) -> Iterator[ProcessCluster]:
    router = RouterConfig(record_file=str(recording))
    engine = tiny(max_num_batched_tokens=4)
    places = hold.places("prefill-0", "decode-0", "decode-1")
    with ProcessCluster(engine, prefill=1, decode=2, router=router, worker=QUICK_BEATS, places=places) as running:
        yield running


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdserve.cli", command, *arguments],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        check=False,
    )


def explained(cluster: ProcessCluster, request_id: str) -> dict[str, list[str]]:
    """Return the kinds of entries that `pdserve explain` printed, by router and worker."""
    shown = run("explain", request_id, "--address", cluster.admin)
    assert shown.returncode == 0, shown.stderr
    kinds: dict[str, list[str]] = {"text": [shown.stdout]}
    for line in shown.stdout.splitlines()[1:]:
        parts = line.split()
        if parts[1:2] == ["s"]:
            kinds.setdefault(parts[2], []).append(parts[3])
    return kinds


@pytest.mark.slow
def test_a_lost_decode_worker_is_in_the_story_and_in_the_recording(
    cluster: ProcessCluster, recording: Path, hold: Hold
) -> None:
    """(1) A worker dies under a stream. (2) The story has the loss, the retry and what both workers that live did. (3) Another
    dies in a handoff. (4) The recording of it all replays."""
    message = request(PROMPT, APART, max_tokens=200, **GREEDY)
    message.cache_salt, message.request_id = SALT, "mine"
    with hold.at(HELD), OpenStream(cluster, message) as stream:
        stream.read(5)
        victim = serving(cluster)
        cluster.processes[victim].kill()
        hold.release()
        stream.read(200)
        assert stream.report.attempts == 2
        request_id = stream.report.request_id
    survivor = ({"decode-0", "decode-1"} - {victim}).pop()
    told, by_client_id = explained(cluster, request_id), explained(cluster, "mine")
    (text,), _ = told.pop("text"), by_client_id.pop("text")  # workers' times differ by the latency of the answer
    assert told == by_client_id
    router = told["router"]
    assert router[0] == "queued"
    assert router[-1] == "ended"
    assert [kind for kind in router if kind in ("lost", "retried")] == ["lost", "retried"]
    assert router.count("committed") == 2
    assert {"received", "reserved", "attached", "pulled", "committed", "finished"} <= set(told[survivor])
    assert told["prefill-0"].count("granted") == 2
    assert f"{victim}: no part of the story, since it is not linked to this router now" in text
    assert f"the link of decode worker {victim} broke" in text
    for secret in (SALT, PROMPT):
        assert secret not in text

    with hold.at(HELD), long_prefill(cluster, APART, request_id="handoff") as prompt:
        failing = prompt.initial_metadata()[REQUEST_ID_METADATA]
        wait_prefilling(cluster)
        cluster.processes[survivor].kill()
        cluster.wait_state(lambda state: len(state.workers) == 1, BOUND_S)
        prompt.cancel()
        with pytest.raises(grpc.RpcError):
            prompt.read(1)
    cluster.wait_state(lambda state: state.running_requests + state.queued_requests == 0, BOUND_S)
    story = explained(cluster, failing)
    assert "lost" in story["router"]
    assert {"granted", "computed", "cancelled", "lease_ended"} <= set(story["prefill-0"])

    cluster.processes["router"].stop()
    replayed = run("replay", str(recording), "--request", request_id)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "events, effects equal; the recording ends: the router stopped" in replayed.stdout
    assert f"request {request_id}: finished" in replayed.stdout
    content = recording.read_text()
    for secret in (SALT, PROMPT):
        assert secret not in content
    assert json.loads(content.splitlines()[0])["prompts"] is False
