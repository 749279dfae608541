"""`pdserve scale`, `pdserve plan` and the history in `pdserve status`: they show what the actuator reports."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pdserve.cli import main
from pdserve.client import AdminClient
from pdserve.cluster.router_process import Endpoints
from pdserve.commands.scaling import tables
from pdserve.rpc.v1 import common_pb2, inference_pb2, scaling_pb2

WAIT_S = 60.0


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def plan() -> scaling_pb2.ScalingPlan:
    need = scaling_pb2.PoolNeed(
        role=common_pb2.ROLE_PREFILL,
        demand_tokens_per_s=9800.0,
        worker_tokens_per_s=4100.0,
        correction=1.0,
        raw_workers=2.39,
        wanted=3,
        size=2,
        limits=["prefill.max_replicas"],
    )
    other = scaling_pb2.PoolNeed(role=common_pb2.ROLE_DECODE, correction=1.0, wanted=1, size=1)
    return scaling_pb2.ScalingPlan(reasons=["The prompts need 2.39 prefill workers."], pools=[need, other])


class Actuator:
    """An actuator that takes orders and says that they are reached, or refuses all of them."""

    def __init__(self, admin: str, refuses: str) -> None:
        self._refuses = refuses
        self.report = scaling_pb2.ScalingReport(mode="fixed", prefill=0, decode=0, plan=plan())
        self._over = threading.Event()
        self._client = AdminClient(admin)
        first = self._poll(0)
        self._term = first.term
        self.report.order = first.order.number  # an order of an earlier test is over
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _poll(self, term: int) -> scaling_pb2.ActuateResponse:
        return self._client.actuate(scaling_pb2.ActuateRequest(actuator="a test", term=term, report=self.report))

    def _run(self) -> None:
        while not self._over.wait(0.02):
            order = self._poll(self._term).order
            if order.number > self.report.order:
                self.report.order, self.report.refused = order.number, self._refuses
                self.report.mode = "automatic" if order.sizes.automatic else "fixed"
                self.report.events.append(scaling_pb2.ScalingEvent(text=f"order {order.number} is taken", age_s=0.1))
            else:
                del self.report.events[:]

    def close(self) -> None:
        self._over.set()
        self._thread.join(WAIT_S)
        self._client.close()


@contextmanager
def actuator(endpoints: Endpoints, refuses: str = "") -> Iterator[Actuator]:
    running = Actuator(endpoints.admin, refuses)
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prefil=3"], "there is no pool 'prefil'; the pools are prefill and decode"),
        (["decode=two"], "write decode=N"),
        (["decode=-1"], "write decode=N"),
        (["decode=99999999"], "write decode=N"),
        (["decode=1", "decode=2"], "decode is given twice"),
        ([], "give either sizes, such as prefill=3, or --auto"),
        (["--auto", "decode=1"], "give either sizes, such as prefill=3, or --auto"),
    ],
)
def test_an_order_that_is_written_wrongly_reaches_nobody(arguments: list[str], says: str) -> None:
    result = run("scale", *arguments, "--address", "127.0.0.1:1")
    assert (result.exit_code, says in result.output) == (2, True), result.output


@pytest.mark.parametrize("flag", [("--seconds", "2"), ("--config", "x.yaml"), ("--set", "decode.replicas=2")], ids=" ".join)
def test_a_flag_that_only_a_dry_run_follows_is_refused_without_it(flag: tuple[str, str]) -> None:
    result = run("plan", *flag, "--address", "127.0.0.1:1")
    assert (result.exit_code, "only what --dry-run plans" in result.output) == (2, True), result.output


def test_an_order_is_watched_until_it_is_reached(endpoints: Endpoints) -> None:
    with actuator(endpoints):
        result = run("scale", "prefill=0", "--address", endpoints.admin)
    assert (result.exit_code, result.output) == (0, "prefill 0, decode 0: all take requests\n")


def test_a_refused_order_is_an_error_that_names_the_limit(endpoints: Endpoints) -> None:
    with actuator(endpoints, "prefill: 9 is over prefill.max_replicas (4)"):
        result = run("scale", "prefill=9", "--address", endpoints.admin)
    assert (result.exit_code, result.stderr) == (2, "error: prefill: 9 is over prefill.max_replicas (4)\n")


def test_the_planner_may_decide_again(endpoints: Endpoints) -> None:
    with actuator(endpoints):
        result = run("scale", "--auto", "--address", endpoints.admin)
    assert (result.exit_code, "the planner decides the sizes" in result.output) == (0, True)


def test_the_plan_is_shown_with_its_numbers_and_reasons(endpoints: Endpoints) -> None:
    with actuator(endpoints):
        short = run("plan", "--address", endpoints.admin)
        long = run("plan", "--explain", "--address", endpoints.admin)
        read = json.loads(run("plan", "--json", "--address", endpoints.admin).output)
    assert "the planner: prefill 2, decode 1" in short.output
    assert "does not follow the planner" in short.output
    assert "The prompts need" not in short.output
    for said in ("9,800", "4,100", "2.39", "prefill.max_replicas", "- The prompts need 2.39 prefill workers."):
        assert said in long.output
    assert (read["mode"], read["pools"][0]["size"], read["pools"][0]["limits"]) == ("fixed", 2, ["prefill.max_replicas"])


def test_a_dry_run_plans_without_an_actuator(endpoints: Endpoints) -> None:
    arguments = ("plan", "--dry-run", "--seconds", "1", "--explain", "--address", endpoints.admin)
    result = run(*arguments)
    assert (result.exit_code, "the planner: prefill" in result.output) == (0, True), result.output
    wrong = run(*arguments, "--set", "autoscaling.planner={tolerance: -1}")
    assert (wrong.exit_code, "autoscaling.planner.tolerance" in wrong.stderr) == (2, True)
    assert run("plan", "--set", "decode.replicas=2", "--address", endpoints.admin).exit_code == 2


def test_status_tells_who_comes_and_leaves_and_what_happened() -> None:
    state = scaling_pb2.ScalingState(
        actuator="pdserve up, pid 17",
        term=1,
        age_s=31.0,
        report=scaling_pb2.ScalingReport(
            mode="automatic",
            prefill=3,
            decode=2,
            members=[
                scaling_pb2.ScalingMember(
                    worker_id="prefill-2", role=common_pb2.ROLE_PREFILL, phase="waiting for a node", detail="it needs GPU: 1"
                )
            ],
        ),
        history=[
            scaling_pb2.ScalingEvent(age_s=age, text=f"event {index}") for index, age in enumerate([9e4, 7e3, 99, 5, 2, 1])
        ],
    )
    console = Console(width=100, record=True, file=io.StringIO())
    for part in tables.summary(state):
        console.print(part)
    text = console.export_text()
    for said in (
        "wanted: prefill 3, decode 2 (automatic)",
        "silent since 31 s",
        "waiting for a node",
        "it needs GPU: 1",
        "2 h ago",
    ):
        assert said in text
    assert "event 0" not in text  # the last five
    assert tables.summary(inference_pb2.GetClusterStateResponse().scaling) == []
