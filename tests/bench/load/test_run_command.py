"""`pdserve bench run`: its flags, and whole runs against a scripted server in this process."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pdserve.core.errors import ConfigError
from pdserve_bench.commands import run_session
from pdserve_bench.commands.group import bench
from pdserve_bench.commands.run_session import check_memory
from pdserve_bench.layout import Slo
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.report.files import Run, RunFileError, read_run
from pdserve_bench.row import STOPPED
from pdserve_bench.workload.request import Arrivals
from tests.bench.load.http_server import GOOD, scripted_server, whole

MODELS = whole(b"200 OK", b'{"data": [{"id": "m", "owned_by": "vllm"}]}')


def bench_run(*words: str) -> Result:
    return CliRunner().invoke(bench, ["run", *words])


@contextmanager
def serving(parts: list[bytes] | Callable[[int], list[bytes]]) -> Iterator[str]:
    """Serve a model. `parts` are an answer, or a function of its number, which counts from 1."""
    answer = parts if callable(parts) else lambda number: parts
    with serving_all(lambda number: [MODELS] if number < 2 else answer(number - 1)) as url:
        yield url


@contextmanager
def serving_all(answer: Callable[[int], list[bytes]]) -> Iterator[str]:
    """Serve in a thread. The first two requests ask for the models and the health."""
    ready: list[str] = []
    up, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with scripted_server(answer) as (url, _):
            ready.append(f"http://{url.authority}")
            loops.append(asyncio.get_running_loop())
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert up.wait(60)
        yield ready[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "w.yaml"
    path.write_text("source: {kind: random, prompt: 5, output: 3}\nvocab_size: 1000\n")
    return str(path)


def test_whole_run(tmp_path: Path, workload: str) -> None:
    result_file = tmp_path / "run.json"
    with serving(GOOD) as url:
        flags = [
            "--base-url",
            url,
            "--workload",
            workload,
            "--num-prompts",
            "5",
            "--warmup-requests",
            "2",
            "--max-concurrency",
            "2",
        ]
        files = ["--result-file", str(result_file), "--metadata", "who=me", "why=test", "--api-key", "SECRET"]
        done = bench_run(*flags, *files, "--goodput", "ttft:60000", "tpot:60000", "--percentiles", "50,99.9", "--allow-late")
    assert done.exit_code == 0, done.output
    assert "p99.9" in done.output
    assert "TTFT at most 60,000 ms and TPOT at most 60,000 ms" in done.output
    run = read_run(result_file)
    assert [row.warm_up for row in run.rows].count(True) == 2
    assert [(row.error, row.output_tokens, row.prompt_tokens) for row in run.rows] == [("", 3, 5)] * 7
    assert run.meta["metadata"] == {"who": "me", "why": "test"}
    assert run.meta["slos"] == {"": {"ttft_s": 60.0, "tpot_s": 60.0}}
    assert run.meta["configuration"]["model"] == "m"
    assert "SECRET" not in result_file.read_text()


def test_run_without_answers_fails_and_says_why(tmp_path: Path, workload: str) -> None:
    path = tmp_path / "run.json"
    said = b'{"error": {"code": "overloaded", "message": "the queue\\u001b[31m is\\nfull"}}'
    with serving([whole(b"429 Busy", said)]) as url:
        done = bench_run(
            "--base-url", url, "--workload", workload, "--num-prompts", "2", "--result-file", str(path), "--allow-late"
        )
    assert done.exit_code == 1
    assert "the queue [31m is full" in done.output
    assert read_run(path).meta["error_messages"] == {"overloaded": "the queue [31m is full"}
    assert {row.error for row in read_run(path).rows} == {"overloaded"}


def test_late_run_is_refused_and_still_written(tmp_path: Path, workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve_bench.load.watch.MAX_LAG_S", -1.0)
    path = tmp_path / "run.json"
    with serving(GOOD) as url:
        done = bench_run("--base-url", url, "--workload", workload, "--num-prompts", "2", "--result-file", str(path))
    assert done.exit_code == 3
    assert "the generator was late" in done.output
    assert read_run(path).meta["refused"].startswith("the generator was late")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_is_reported_and_written(tmp_path: Path, number: int, status: int) -> None:
    path, text = tmp_path / "run.json", tmp_path / "w.yaml"
    text.write_text(
        "source: {kind: random, prompt: 5, output: 3}\nvocab_size: 1000\narrivals: {kind: constant, rate_per_s: 200}\n"
    )

    def parts(place: int) -> list[bytes]:
        if place == 8:
            os.kill(os.getpid(), number)
        return GOOD if place < 6 else GOOD[:2]  # the later ones hang

    with serving(parts) as url:
        places = ["--max-concurrency", "3"]  # the eighth request is sent when only the sixth and the seventh still run
        flags = ["--base-url", url, "--workload", str(text), "--duration", "60", *places]
        done = bench_run(*flags, "--result-file", str(path), "--allow-late")
    assert done.exit_code == status, done.output
    run = read_run(path)
    assert run.meta["interrupted"]
    assert [row.error for row in sorted(run.rows, key=lambda row: row.number)][:7] == [""] * 5 + [STOPPED] * 2


def test_server_that_is_not_ready_gets_no_load() -> None:
    answers = [MODELS, whole(b"503 No", b'{"status": "unavailable", "reason": "no decode worker is ready"}')]
    with serving_all(lambda number: [answers[number]]) as url:
        done = bench_run("--base-url", url)
    assert done.exit_code == 2
    assert "is not ready" in done.output
    assert "no decode worker is ready" in done.output


def test_server_that_refuses_the_key_gets_no_load() -> None:
    with serving_all(lambda number: [whole(b"401 No", b'{"error": {"message": "bad key"}}')]) as url:
        done = bench_run("--base-url", url, "--workload", "random:1/1")
    assert (done.exit_code, "bad key" in done.output, "OPENAI_API_KEY" in done.output) == (2, True, True)


def test_server_that_tells_its_vocabulary_needs_no_tokenizer() -> None:
    card = whole(b"200 OK", b'{"data": [{"id": "m", "owned_by": "pdserve", "max_model_len": 16, "vocab_size": 64}]}')

    def run(card: bytes, lengths: str) -> Result:
        with serving_all(lambda number: [card] if number < 2 else GOOD) as url:
            return bench_run("--base-url", url, "--workload", lengths, "--num-prompts", "1", "--allow-late")

    assert run(card, "random:5/3").exit_code == 0
    for card_of, lengths, says in (
        (card, "random:14/3", "more than max_model_len 16"),
        (card, "text:5/3", "--tokenizer: is missing"),
        (MODELS, "random:5/3", "--tokenizer: is missing"),
        (card, "sessions:prompt=2,output=2", "--tokenizer: is missing; turns repeat"),
    ):
        done = run(card_of, lengths)
        assert (done.exit_code, says in done.output) == (2, True), done.output


def test_run_whose_time_is_over_before_its_first_request() -> None:
    card = whole(b"200 OK", b'{"data": [{"id": "m", "owned_by": "pdserve", "vocab_size": 64}]}')
    with serving_all(lambda number: [card]) as url:
        done = bench_run("--base-url", url, "--workload", "random:5/3", "--request-rate", "1e-300", "--duration", "0.01")
    assert (done.exit_code, "no request was sent" in done.output) == (1, True), done.output


def test_disk_that_fails_at_the_end_takes_no_figures(tmp_path: Path, workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, run: Run) -> None:
        raise RunFileError(path, "cannot be written: No space left on device")

    monkeypatch.setattr("pdserve_bench.commands.run_session.write_run", full)
    with serving(GOOD) as url:
        flags = ["--base-url", url, "--workload", workload, "--num-prompts", "2", "--allow-late"]
        done = bench_run(*flags, "--result-file", str(tmp_path / "run.json"))
    assert done.exit_code == 2
    assert "No space left" in done.output
    assert "request throughput" in done.output


def test_files_are_checked_before_the_run(tmp_path: Path) -> None:
    here = str(tmp_path)
    for words, says in (
        (["--result-file", f"{here}/x", "--parquet", f"{here}/x"], "does not end with .parquet"),
        (["--result-file", f"{here}/x.parquet", "--parquet", f"{here}/x.parquet"], "is the file of --result-file"),
        (["--result-file", "/proc/x.json"], "--result-file: the folder /proc cannot be written"),
        (["--num-prompts", "1000000000000", "--address", "127.0.0.1:1"], "nothing answers"),
    ):
        done = bench_run(*words)
        assert (done.exit_code in (1, 2), says in done.output) == (True, True), done.output
    assert not list(tmp_path.iterdir())


def test_rows_that_would_fill_the_memory_are_refused() -> None:
    check_memory(RunLimits(num_requests=1_000), 128)
    check_memory(RunLimits(duration_s=5, num_requests=10**12), 128)
    with pytest.raises(ConfigError, match=r"--num-prompts: .* GiB"):
        check_memory(RunLimits(num_requests=10**12), 128)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--backend", "openai"], "--base-url: is missing"),
        (["--backend", "grpc", "--base-url", "http://h"], "--base-url: is for the backends openai"),
        (["--base-url", "h:1"], "base-url: "),
        (["--goodput", "e2el:5"], "--goodput: 'e2el:5' is not of the form"),
        (["--goodput", "ttft:nan"], "--goodput: 'ttft:nan' needs a number"),
        (["--metadata", "x"], "--metadata: 'x' is not of the form KEY=VALUE"),
        (["--metadata", "a=\udcff"], "--metadata: 'a=\\udcff' is not UTF-8 text"),
        (["--percentiles", "50,101"], "--percentiles: '50,101'"),
        (["--duration", "-1"], "duration_s: -1 is not above 0"),
        (["--max-concurrency", "100000"], "max_concurrency: 100000 is above 65536"),
        (["--random-input-len", "5", "--workload", "random:1/1"], "--random-input-len: --workload random:1/1 has lengths"),
        (["--result-file", "/nowhere/x.json"], "--result-file: the folder /nowhere does not exist"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_bad_values_name_flag_and_limit(words: list[str], says: str) -> None:
    done = bench_run(*words)
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.parametrize(
    ("own", "rate", "burstiness", "trace", "places", "wanted"),
    [
        (Arrivals(), None, None, False, None, Arrivals(kind="inf")),
        (Arrivals(), math.inf, None, False, 8, Arrivals(kind="closed")),
        (Arrivals(), 5.0, None, False, 8, Arrivals(rate_per_s=5.0)),
        (Arrivals(), 5.0, 0.5, False, None, Arrivals(kind="gamma", rate_per_s=5.0, burstiness=0.5)),
        (Arrivals(kind="constant"), 5.0, None, False, None, Arrivals(kind="constant", rate_per_s=5.0)),
        (Arrivals(rate_per_s=2.0), None, None, False, None, Arrivals(rate_per_s=2.0)),
        (Arrivals(kind="trace"), None, None, False, None, Arrivals(kind="trace")),
        (Arrivals(kind="closed"), 5.0, None, False, None, Arrivals(rate_per_s=5.0)),
        (Arrivals(), 5.0, None, True, None, Arrivals(kind="trace", rate_per_s=5.0)),
    ],
)
def test_arrivals(
    own: Arrivals, rate: float | None, burstiness: float | None, trace: bool, places: int | None, wanted: Arrivals
) -> None:
    assert run_session.arrivals_of_flags(own, rate, burstiness, trace, places) == wanted


def test_arrivals_that_mean_nothing() -> None:
    for own, rate, burstiness, trace in (
        (Arrivals(), 0.0, None, False),
        (Arrivals(), math.nan, None, False),
        (Arrivals(), None, 2.0, False),
        (Arrivals(), None, 2.0, True),
    ):
        with pytest.raises(ConfigError, match=r"^--"):
            run_session.arrivals_of_flags(own, rate, burstiness, trace, None)


def test_targets() -> None:
    assert run_session.slo_of_flags([]) == Slo(1.0, 0.05)
    assert run_session.slo_of_flags(["ttft:200"]) == Slo(0.2, None)
    assert run_session.slo_of_flags(["ttft:1000 tpot:50"]) == Slo(1.0, 0.05)
    assert run_session.limits_of_flags(None, None, None, 0, 0.0, 1.0).num_requests == 1000
    assert run_session.limits_of_flags(None, 5.0, None, 0, 0.0, 1.0).num_requests is None
