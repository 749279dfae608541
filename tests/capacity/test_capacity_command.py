"""`pdserve capacity` from its flags to its tables, JSON and drawing."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pdserve.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "capacity.md"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["capacity", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    result = run("--model", "llama-3-8b", "--gpu", "h100-sxm", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@functools.cache
def default() -> dict[str, Any]:
    """Return what is found without further flags."""
    return found()


def test_the_worked_example_of_the_page_is_what_the_command_prints() -> None:
    blocks = PAGE.read_text().split("```\n")
    (example,) = (block for block in blocks if block.startswith("$ pdserve capacity"))
    command, _, printed = example.partition("\n")
    result = CliRunner().invoke(main, command.removeprefix("$ pdserve ").split())
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == printed.splitlines()
    assert max(map(len, printed.splitlines())) <= 100


def test_json_has_the_question_and_every_result() -> None:
    answer = found("--gpus", "16", "--isl", "1024", "--price-per-hour", "3")
    assert answer["question"]["model"] == "llama-3-8b"
    assert answer["question"]["isl"] == 1024
    assert answer["answer"]["kv_bytes_per_token"] == 131_072
    assert answer["answer"]["kv_bytes_per_request"] == 1024 * 131_072
    assert answer["answer"]["cost"]["per_gpu_hour"] == 3
    assert answer["answer"]["verdict"]["lever"]
    assert [step["batch"] for step in answer["answer"]["steps"]][:3] == [1, 2, 4]


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        (("--tp", "2"), ("degrees", "tensor"), 2),
        (("--tensor-parallel-size", "2"), ("degrees", "tensor"), 2),
        (("-tp", "2"), ("degrees", "tensor"), 2),
        (("--pipeline-parallel-size", "2"), ("degrees", "pipeline"), 2),
        (("-pp", "2"), ("degrees", "pipeline"), 2),
        (("--prefill-tensor-parallel-size", "4"), ("prefill_degrees", "tensor"), 4),
        (("--prefill-pipeline-parallel-size", "4"), ("prefill_degrees", "pipeline"), 4),
        (("--kv-cache-dtype", "int8"), ("kv_bytes_per_token",), 65_536),
        (("--num-kv-heads", "4"), ("kv_bytes_per_token",), 65_536),
        (("--context", "4096"), ("room", "context"), 4096),
        (("--users", "80", "--tp", "1", "--gpus", "8"), ("room", "users"), 10),
        (("--link", "100gbe"), ("link", "bytes_per_s"), 12.5e9),
        (("--gpu-memory-gb", "160", "--tp", "1"), ("memory", "total_bytes"), 160e9),
        (("--gpu-memory-utilization", "0.5", "--tp", "1"), ("memory", "usable_bytes"), 40e9),
    ],
    ids=str,
)
def test_each_flag_changes_the_answer(flags: tuple[str, ...], path: tuple[str, ...], value: float) -> None:
    answer, usual = found(*flags)["answer"], default()["answer"]
    for step in path:
        answer, usual = answer[step], usual[step]
    assert answer == value != usual


@pytest.mark.parametrize(
    "flags",
    [
        ("--isl", "512"), ("--osl", "64"), ("--ttft", "0.2"), ("--tpot", "0.02"), ("--attainment", "0.99"),
        ("--dtype", "float32"), ("--quantization", "fp8"), ("--compute-share", "0.9"), ("--bandwidth-share", "0.9"),
        ("--link-share", "0.1"), ("--gpu-tflops", "500"), ("--gpu-bandwidth-gb-s", "2000"), ("--max-num-batched-tokens", "256"),
        ("--gpus", "9"), ("--gpus-per-node", "4"), ("--prefill-tp", "2"), ("--pp", "4"),
    ],
    ids=str,
)  # fmt: skip
def test_no_flag_is_ignored(flags: tuple[str, ...]) -> None:
    assert found(*flags)["answer"] != default()["answer"]


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        *((flag, value, flag) for flag in (
            "--gpus", "--tp", "--pp", "--prefill-tp", "--prefill-pp", "--gpus-per-node", "--isl", "--osl", "--users",
            "--context", "--max-num-batched-tokens", "--num-kv-heads",
        ) for value in ("0", "-1", str(10**30))),
        *((flag, value, flag) for flag in (
            "--ttft", "--tpot", "--attainment", "--price-per-hour", "--gpu-memory-utilization", "--compute-share",
            "--bandwidth-share", "--link-share", "--gpu-tflops", "--gpu-bandwidth-gb-s", "--gpu-memory-gb",
        ) for value in ("0", "-1", "nan", "inf", "1e300")),
        ("--gpu", "h900", "h100-sxm"), ("--model", "llama-9", "llama-2-70b"), ("--link", "carrier pigeon", "400gbe"),
        ("--node-link", "carrier pigeon", "400gbe"), ("--node-link", "nvlink", "400gbe"),
        ("--dtype", "int3", "bfloat16"), ("--quantization", "int3", "fp8"), ("--kv-cache-dtype", "int3", "fp8_e4m3"),
        ("--tp", "3", "32 query heads"), ("--num-kv-heads", "16", "8 KV heads"), ("--isl", "200000", "131072 positions"),
        ("--osl", "1", "at least 2"), ("--tp", "16", "--tp"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_flag_is_one_line_that_names_it_and_the_limit(flag: str, value: str, named: str) -> None:
    result = run("--model", "llama-3-8b", "--gpu", "h100-sxm", flag, value)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert flag in result.stderr or named in result.stderr
    assert named in result.stderr


@pytest.mark.parametrize("kind", ["a pipe that nobody writes", "a device without an end"])
def test_a_configuration_without_an_end_is_not_read(tmp_path: Path, kind: str) -> None:
    """The command once waited for ever, or read until the memory was full."""
    config = tmp_path / "config.json"
    if kind.startswith("a pipe"):
        os.mkfifo(config)
    else:
        config.symlink_to("/dev/zero")
    result = run("--model", str(tmp_path), "--gpu", "h100-sxm")
    assert (result.exit_code, "it is no regular file" in result.output) == (2, True), result.output


def test_a_drawing_is_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    assert run("--model", "llama-3-8b", "--gpu", "l4", "--plot", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert run("--model", "llama-3-405b", "--gpu", "l4", "--plot", str(file)).exit_code == 0  # nothing fits, and it draws that
    result = run("--model", "llama-3-8b", "--gpu", "l4", "--plot", str(tmp_path / "no" / "plot.png"))
    assert result.exit_code == 2
    assert "--plot cannot write" in result.stderr


def test_every_named_model_and_every_gpu_has_an_answer() -> None:
    from pdserve.capacity.answer import answer
    from pdserve.capacity.devices import devices
    from pdserve.capacity.model_source import find_model, published_models
    from pdserve.capacity.question import CapacityQuestion
    from pdserve.commands.capacity.command import plain

    for model, gpu in zip(published_models(), itertools.cycle(devices().values()), strict=False):
        question = CapacityQuestion(find_model(model), gpu, isl=512, osl=64)
        json.dumps(plain(question, answer(question)), allow_nan=False)


def test_it_loads_neither_torch_nor_the_network() -> None:
    code = "import sys, pdserve.capacity.answer, pdserve.capacity.plot, pdserve.commands.capacity.tables as t; "
    code += "print([n for n in ('torch', 'ray', 'matplotlib') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"
