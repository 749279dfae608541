"""Ray's own autoscaler (version 2) over nodes that are processes of this machine, and steady traffic beside it.

Ray brings the provider of such nodes for tests of its own: it starts a raylet where a cloud would rent a machine. Everything
else is what an operator has: a head with a cluster YAML, the monitor that Ray starts, and its idle timeout.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
import ray
import yaml
from ray_nodes import ROOT, RayNode, free_ports

from pdserve.cluster import processes
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from testkit.load import Outcome, attempt

IDLE_S = 4.0
HEAD_ID = "f" * 51 + "00000"
NODE_ID, NODE_TYPE = "RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME"
HEAD_TYPE = "ray.head.default"
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
SECTION = (ROOT / "docs" / "autoscaling.md").read_text().partition("## With Ray's autoscaler")[2].partition("\n## ")[0]
DOCUMENTED, POOLS = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL))
"""The two files of the manual: the cluster of Ray, and the pools of pdserve."""


def cluster_yaml(address: str) -> dict[str, Any]:
    """Return the cluster of docs/autoscaling.md with the provider of nodes for tests. One node of each pool is always there."""
    return DOCUMENTED | {
        "cluster_name": "pdserve",
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": HEAD_ID,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
        },
        "auth": {"ssh_user": "nobody"},
        "available_node_types": _renamed_head(DOCUMENTED["available_node_types"]),
        "head_node_type": HEAD_TYPE,
        "file_mounts": {},
        **{f"{each}_commands": [] for each in COMMANDS},
        **{each: [] for each in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    }


def _renamed_head(node_types: dict[str, Any]) -> dict[str, Any]:
    """Return the types of nodes under the name that the provider gives to the head."""
    return {HEAD_TYPE if name == DOCUMENTED["head_node_type"] else name: each for name, each in node_types.items()}


class AutoscaledRay:
    """A head of Ray with its autoscaler. Closing it ends the nodes that the autoscaler started as well."""

    def __init__(self, folder: Path) -> None:
        host = str(ray.util.get_node_ip_address())
        port, client_port = free_ports(2)
        self.address = f"{host}:{port}"
        self.token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": "token"}
        described = folder / "cluster.yaml"
        described.write_text(yaml.safe_dump(cluster_yaml(self.address)))
        environment = {
            **self.token,
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            NODE_ID: HEAD_ID,
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        flags: dict[str, object] = {"port": port, "node_ip_address": host, "ray_client_server_port": client_port}
        flags |= {"num_cpus": 0, "include_dashboard": "false", "autoscaling_config": described}
        self._head = RayNode("ray start --head", folder / "ray", name="head", environment=environment, **flags)
        try:
            self._head.wait_started()
        except BaseException:
            self.close()
            raise

    def nodes(self, node_type: str) -> dict[str, psutil.Process]:
        """Return the raylets of the nodes of a type that live, by node id."""
        return {found[0]: process for process, found in self._raylets() if found[1] == node_type}

    def node_of(self, pid: int) -> str:
        """Return the id of the node on which a worker runs, which inherited it. Empty: it or its node's raylet has ended."""
        try:
            node_id = psutil.Process(pid).environ().get(NODE_ID, "")
        except psutil.NoSuchProcess:
            return ""
        return node_id if any(found[0] == node_id for _, found in self._raylets()) else ""

    def _raylets(self) -> list[tuple[psutil.Process, tuple[str, str]]]:
        found = []
        for process in self._head.processes():
            try:
                if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    variables = process.environ()  # empty while a process ends
                    found.append((process, (variables.get(NODE_ID, ""), variables.get(NODE_TYPE, ""))))
            except psutil.NoSuchProcess:  # it ended meanwhile
                continue
        return found

    def close(self) -> None:
        """End everything at once: nobody waits for a drain of the nodes."""
        started = self._head.processes()
        self._head.child.kill()
        processes.kill(started)
        self._head.close()


class Traffic:
    """Sends the messages again and again, one each `interval_s`, until it is stopped. Leaving it cancels what still runs.

    What arrives does not wait for what was sent before; only `MOST` requests at a time run, so a slow machine is not flooded.
    """

    MOST = 12

    def __init__(
        self,
        address: str,
        messages: Sequence[inference_pb2.GenerateRequest],
        expected: Sequence[Sequence[int]],
        interval_s: float,
    ) -> None:
        """expected: the token ids of the answer to each message."""
        self._address, self._messages, self._expected, self._interval_s = address, messages, expected, interval_s
        self.outcomes: list[tuple[int, Outcome]] = []
        self._stop = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if kind is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(self._loop)])
        self._thread.join(60.0)
        assert not self._thread.is_alive(), "requests hang"
        self._loop.close()

    def assert_none_lost(self) -> None:
        """Every request has ended well, with the expected tokens."""
        assert self.outcomes
        lost = [(o.reason or o.status, o.details) for _, o in self.outcomes if not o.ok]
        assert not lost, f"{len(lost)} of {len(self.outcomes)}: {lost}"
        changed = [i for i, o in self.outcomes if o.answer.ids != self._expected[i]]
        assert not changed, changed

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._send())
        except asyncio.CancelledError:
            pass

    async def _send(self) -> None:
        gate = asyncio.Semaphore(self.MOST)
        began_s = time.monotonic()
        async with grpc.aio.insecure_channel(self._address) as channel, asyncio.TaskGroup() as group:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for count in itertools.count():
                await asyncio.sleep(max(0.0, began_s + count * self._interval_s - time.monotonic()))
                await gate.acquire()
                if self._stop.is_set():
                    return
                index, outcome = count % len(self._messages), Outcome()
                self.outcomes.append((index, outcome))
                task = group.create_task(attempt(stub, self._messages[index], outcome))
                task.add_done_callback(lambda _: gate.release())
