"""`pdserve up` with everything real and default settings: it is told to stop under streams, and a request ends its workers."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from poisoned_worker import POISON

from pdserve.client import AdminClient
from testkit.client import generate_all, request
from testkit.load import Load

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
ROOT = str(HERE.parents[2])
UP = ("up", "--model", "tiny", "--kv-cache-memory", "16MiB", "--port", "0", "--grpc-port", "0")
BOUND_S = 120.0
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def address(command: Any, port: str) -> str:
    found = re.search(rf"^{port} +(?:http://)?([\d.:]+)", command.text, re.MULTILINE)
    assert found is not None, command.text
    return found[1]


def wait_for(look: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BOUND_S
    while not (seen := look()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)
    return seen


def asked(http: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, str]]:
    """The status and the headers of an answer. 0: nobody listens."""
    call = urllib.request.Request(f"http://{http}{path}", None if body is None else json.dumps(body).encode())
    call.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(call, timeout=BOUND_S) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as exc:
        return exc.code, {name.lower(): value for name, value in exc.headers.items()}
    except OSError:
        return 0, {}


def test_sigterm_of_up_ends_no_stream(run_command: Any) -> None:
    """(1) Streams run on both decode workers, and more are on their way. (2) SIGTERM: it is not healthy, and new requests are
    told when to try again. (3) All streams end well, in their first attempts. (4) `up` ends with 0, and leaves nothing."""
    command = run_command(*UP, "--decode", "2", program=("-m", "pdserve.cli"), PYTHONPATH=ROOT)
    command.wait_for("ready; Ctrl-C stops it")
    http = address(command, "HTTP")
    asks = [request([5 + n] * 30, max_tokens=1800, **GREEDY) for n in range(48)]  # some seconds, also on a busy machine
    with Load(address(command, "gRPC"), asks) as load:
        load.until(lambda outcomes: sum(len(one.answer.ids) > 5 for one in outcomes) >= 12, BOUND_S)  # others wait, or prefill
        command.child.send_signal(signal.SIGTERM)
        status, _ = wait_for(lambda: seen if (seen := asked(http, "/health"))[0] != 200 else None)
        refused, headers = asked(http, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        ran = [one for one in load.outcomes if not one.done]
        ends = load.finish()
    assert ran, "all streams had ended before it was asked"
    assert (status, refused) == (503, 503)
    assert int(headers["retry-after"]) >= 1
    assert [(one.reason, one.details) for one in ends if not one.ok] == []
    assert {one.answer.report.attempts for one in ends} == {1}
    assert command.end() == 0, command.text
    command.assert_nothing_left()


def test_a_poison_request_fails_alone_and_costs_no_worker_its_restarts(run_command: Any) -> None:
    """(1) A request runs beside others, and ends each worker that decodes it. (2) It fails with an error of its own after three
    deaths, and the others are as undisturbed. (3) All workers come back, and only the first death counts: a later accident of
    a worker is told with the restarts that it has left."""
    command = run_command(*UP, "--decode", "3", program=(str(HERE / "run_poisoned_cli.py"),))
    command.wait_for("ready; Ctrl-C stops it")
    grpc, names = address(command, "gRPC"), {"prefill-0", "decode-0", "decode-1", "decode-2"}
    others = [request([20 + n] * 30, max_tokens=300, **GREEDY) for n in range(9)]
    expected = [answer.ids for answer in generate_all(grpc, others)]
    with Load(grpc, [request([*POISON, 9, 9], max_tokens=300, **GREEDY), *others]) as load:
        poison, *ends = load.finish()
    assert poison.reason == "poison_request", (poison.status, poison.details, command.text)
    assert [(one.reason, one.details) for one in ends if not one.ok] == []
    assert [one.answer.ids for one in ends] == expected
    with AdminClient(address(command, "admin")) as admin:

        def ready() -> dict[str, int]:
            state = admin.cluster_state()
            return {one.hello.worker_id: one.hello.pid for one in state.workers if one.ready}

        wait_for(lambda: ready().keys() == names)
        told = [one.worker_id for one in admin.cluster_state().poisoned_workers]
        deaths = re.findall(r"(decode-\d) restarting", command.text)
        assert len(deaths) == 3, command.text
        assert len(told) == 2, command.text
        (first,) = (Counter(deaths) - Counter(told)).elements()
        again = told[-1]
        time.sleep(2.0)  # `up` asks the router once a second which deaths count
        os.kill(ready()[again], signal.SIGKILL)
        counted = 1 + (again == first)
        pattern = rf"(?s)(?:{again} restarting.*){{{deaths.count(again)}}}{again} restarting; in \S+ s, {counted} of 6 restarts"
        command.wait_for(pattern)
        wait_for(lambda: ready().keys() == names)
    assert "given up" not in command.text
    command.signal(signal.SIGINT)
    assert command.end() == 0, command.text
    command.assert_nothing_left()
