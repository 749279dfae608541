"""`pdserve flip`: what it says at its end, and what it takes for a failure. Real workers flip in tests/integration."""

from __future__ import annotations

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from pdserve.cli import main
from pdserve.cluster.router_process import Endpoints
from pdserve.commands.scaling.flip import _prove
from pdserve.rpc.v1 import common_pb2, inference_pb2

OLD, NEW = 0x1A << 56, 0x2B << 56


def state(**changes: object) -> inference_pb2.WorkerState:
    hello = {"worker_id": "prefill-0", "role": common_pb2.ROLE_DECODE, "pid": 4711, "incarnation": NEW, "flips": 1}
    return inference_pb2.WorkerState(hello=common_pb2.WorkerHello(**(hello | changes)))  # type: ignore[arg-type]


BEFORE = state(role=common_pb2.ROLE_PREFILL, incarnation=OLD, flips=0)


def test_the_proof_names_the_process_its_incarnations_and_its_flip() -> None:
    said = io.StringIO()
    assert _prove(Console(file=said, width=40), BEFORE, state(), "decode", NEW) == 0
    assert said.getvalue() == (
        "prefill-0 is a decode worker now: same process (pid 4711), incarnation 1a000000 -> 2b000000, weights kept "
        "(flip 1 of this process)\n"
    )


def test_a_server_that_the_flip_has_started_again_is_told() -> None:
    said = io.StringIO()
    assert _prove(Console(file=said, width=40), BEFORE, state(engine="vllm 0.32.0"), "decode", NEW) == 0
    assert said.getvalue().endswith("its server of vllm 0.32.0 started again (flip 1 of this process)\n")


@pytest.mark.parametrize("after", [state(pid=4712), state(flips=0), state(incarnation=NEW + 1)], ids=["pid", "flips", "again"])
def test_a_process_that_was_started_anew_is_no_flip(after, capsys) -> None:
    assert _prove(Console(file=io.StringIO()), BEFORE, after, "decode", NEW) == 1
    assert "prefill-0 was started anew" in capsys.readouterr().err


def test_an_unknown_worker_is_an_error_of_one_line(endpoints: Endpoints) -> None:
    result = CliRunner().invoke(main, ["flip", "moon", "--router", endpoints.admin])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: worker_id: 'moon' is not linked to this router; linked: ")
    assert result.stderr.count("\n") == 1
