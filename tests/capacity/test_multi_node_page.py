"""docs/multi-node.md: its commands run, and its tables are what they answer."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from deploy import gangs
from pdserve.cli import main
from pdserve.config import ClusterConfig, load

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "multi-node.md"
COMMANDS = {
    name: shlex.split(command)
    for command, name in re.findall(r"^pdserve (capacity .*?) +# ([A-Z])$", PAGE.read_text(), re.MULTILINE)
}


@functools.cache
def asked(name: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, [*COMMANDS[name], "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def memory_row(name: str) -> str:
    found = asked(name)["answer"]
    gpus, memory = found["degrees"]["tensor"] * found["degrees"]["pipeline"], found["memory"]
    sizes = [f"{memory[part] / 1e9:,.1f}" for part in ("usable_bytes", "weights_bytes", "kv_bytes")]
    prompt = f"{found['kv_bytes_per_request'] / 1e6:,.1f}"
    nodes = -(-gpus // asked(name)["question"]["gpus_per_node"])
    return f"| {' | '.join([name, str(gpus), str(nodes), *sizes, prompt, str(found['room']['max_users'])])} |"


def rates_row(name: str) -> str:
    found = asked(name)["answer"]
    step = next(step for step in found["steps"] if step["batch"] == 64)
    handoff = next(one for one in found["transfers"] if one["link"] == found["link"]["name"])
    times = (found["prefill_floor_s"], step["step_s"], step["links_s"], handoff["transfer_s"])
    rates = (found[placement]["requests_per_s"] for placement in ("prefill", "decode", "colocated"))
    verdict = found["verdict"]
    split = verdict["split"] if verdict["disaggregate"] else None
    how = f"{split['prefill']} + {split['decode']}" if split else f"{found['workers']} colocated"
    cells = [name, *(f"{time * 1e3:.1f}" for time in times), *(f"{rate:.2f}" for rate in rates)]
    return f"| {' | '.join(cells)} | {verdict['requests_per_s']:.1f} ({how}) |"


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("row", [memory_row, rates_row], ids=["memory", "rates"])
def test_each_row_of_the_page_is_what_its_command_answers(name: str, row: Any) -> None:
    assert row(name) in PAGE.read_text().splitlines()


def test_every_row_has_a_command() -> None:
    rows = re.findall(r"^\| ([A-Z]) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [*COMMANDS, *COMMANDS]
    assert len(COMMANDS) == 8


def test_the_manifests_of_the_page_are_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^python -m deploy\.gangs (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert gangs.main(shlex.split(command)) == 0
        kinds = {manifest["kind"] for manifest in yaml.safe_load_all(capsys.readouterr().out)}
        assert ("LeaderWorkerSet" in kinds) is ("--kind lws" in command)
        assert ("RayCluster" in kinds) is ("--kind ray" in command)


@pytest.mark.parametrize(("example", "name"), [("nodes-70b", "A"), ("nodes-671b", "G")])
def test_the_examples_have_the_degrees_of_the_page(example: str, name: str) -> None:
    config, found = load(ClusterConfig, ROOT / "examples" / f"{example}.yaml"), asked(name)
    degrees = config.engine.degrees
    assert {"tensor": degrees.tensor, "pipeline": degrees.pipeline, "experts": degrees.experts} == found["answer"]["degrees"]
    assert config.engine.vllm.nodes == -(-degrees.ranks // found["question"]["gpus_per_node"])
    assert (config.prefill.replicas + config.decode.replicas) * degrees.ranks == found["question"]["gpus"]
