"""`pdserve models`: the table of families and the facts about one model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from pdserve.capacity.model_source import find_model, published_models
from pdserve.checkpoint.families.examples import example
from pdserve.checkpoint.families.registry import FAMILIES, family_of
from pdserve.checkpoint.resolve import resolve
from pdserve.cli import main
from pdserve.commands.models import _families_table
from pdserve.engine.models import decoder
from pdserve.engine.ways import COMPILED, NO_GPU, TORCH, TRITON


def told(*arguments: str) -> Any:
    result = CliRunner().invoke(main, ["models", *arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return {row["architecture"]: row for row in told()}


def test_every_family_of_the_registry_has_an_example_and_a_row(rows: dict[str, Any]) -> None:
    assert list(rows) == list(FAMILIES)
    assert rows["LlamaForCausalLM"]["attention"] == "GQA"
    assert rows["DeciLMForCausalLM"]["attention"] == "MHA; MQA"
    assert rows["DeepseekV3ForCausalLM"]["attention"].startswith("MLA")
    assert rows["MixtralForCausalLM"]["mlp"] == "2 of 8 experts"
    assert "post_norms" in rows["Gemma3ForCausalLM"]["others"]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_backend_refuses_is_what_the_engine_says(rows: dict[str, Any], architecture: str) -> None:
    refused = decoder.obstacle(family_of(architecture).read(example(architecture)))
    assert rows[architecture]["backends"][TORCH] == (refused or "yes")


def test_one_model_is_described_without_its_weights(tmp_path: Path) -> None:
    shutil.copytree(resolve("tiny"), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    found = told(str(tmp_path), "--kv-cache-dtype", "fp32")
    assert found["parameters"] == 512 * 64 * 2 + 4 * (64 * (64 + 64 + 64) + 3 * 64 * 128)
    assert found["weights_bytes"] == 2 * found["parameters"]
    assert found["kv_bytes_per_token"] == 4 * 2 * 2 * 16 * 4  # layers, planes, heads, numbers of a head, bytes of one
    assert found["backends"][TORCH] == "yes"
    assert found["runs_by"] in (COMPILED, TORCH, TRITON)
    if found["device"] == "cpu":
        assert found["backends"][TRITON] == NO_GPU


SERVED = [name for name, entry in published_models().items() if entry["config"].get("architectures", [""])[0] in FAMILIES]


@pytest.mark.parametrize("name", SERVED)
def test_a_published_name_is_described_as_capacity_planning_describes_it(name: str) -> None:
    """Two readers of one configuration: a family here, and the formulas of `pdserve capacity` there."""
    found, shape = told(name), find_model(name).shape
    assert found["model"] == name
    assert [found["architecture"]] == published_models()[name]["config"]["architectures"]
    assert found["layers"] == shape.num_layers
    assert found["parameters"] == shape.numbers
    assert found["kv_bytes_per_token"] == 2 * shape.kv_numbers
    assert found["runs_by"] in (COMPILED, TORCH, TRITON)


def test_published_names_have_the_attention_of_their_families() -> None:
    kinds = {name: told(name)["attention"] for name in ("Qwen3-8B", "llama-2-7b", "mistral-7b", "qwen2.5-7b", "gemma-3-27b")}
    assert kinds == {
        "Qwen3-8B": "GQA, qk_norm", "llama-2-7b": "MHA", "mistral-7b": "GQA, window", "qwen2.5-7b": "GQA, bias",
        "gemma-3-27b": "GQA, window, qk_norm, scale; GQA, qk_norm, scale",
    }  # fmt: skip
    deepseek = told("deepseek-v3")
    assert (deepseek["attention"], deepseek["mlp"]) == ("MLA", "dense; 8 of 256 experts and a shared one")


def test_a_published_checkpoint_that_is_refused_says_why() -> None:
    assert "fp8" in told("deepseek-v3")["checkpoint_refused"]
    assert told("qwen3-8b")["checkpoint_refused"] is None
    drawn = CliRunner().invoke(main, ["models", "gemma-3-27b"], catch_exceptions=False)
    assert "Gemma3ForConditionalGeneration" in drawn.output
    assert "published checkpoint" not in drawn.output
    unpublished = CliRunner().invoke(main, ["models", "gpt-3-175b"])
    assert unpublished.exit_code == 2
    assert "never published" in unpublished.output
    unread = CliRunner().invoke(main, ["models", "bloom-176b"])
    assert unread.exit_code == 2
    assert "BloomForCausalLM is not supported" in unread.output


def test_a_directory_wins_over_a_published_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(resolve("tiny"), tmp_path / "qwen3-8b")
    monkeypatch.chdir(tmp_path)
    assert told("qwen3-8b")["layers"] == 4


def test_both_tables_are_drawn_and_a_wrong_model_is_one_line() -> None:
    whole = CliRunner().invoke(main, ["models"], catch_exceptions=False)
    assert "Llama" in whole.output
    one = CliRunner().invoke(main, ["models", "tiny"], catch_exceptions=False)
    assert "KV of a token" in one.output
    wrong = CliRunner().invoke(main, ["models", "./nowhere"])
    assert wrong.exit_code != 0


def test_the_table_of_families_cut_names_in_two_on_80_columns(rows: dict[str, Any]) -> None:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(_families_table(list(rows.values())))
    drawn = captured.get()
    assert all(len(line) <= 80 for line in drawn.splitlines())
    names = {part for name in FAMILIES for part in re.findall("^[A-Za-z0-9]+?(?=For|$)|ForConditional.*", name)}
    told = ("embedding_scale", "qk_norm,", "shared", "compiled", "Triton,", "torch")
    assert {*names, *told} <= {*drawn.split()}
