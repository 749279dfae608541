"""`pdserve models`: the table of families and the facts about one model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pdserve.checkpoint.families.examples import example
from pdserve.checkpoint.families.registry import FAMILIES, family_of
from pdserve.checkpoint.resolve import resolve
from pdserve.cli import main
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


def test_both_tables_are_drawn_and_a_wrong_model_is_one_line() -> None:
    whole = CliRunner().invoke(main, ["models"], catch_exceptions=False)
    assert "Llama" in whole.output
    one = CliRunner().invoke(main, ["models", "tiny"], catch_exceptions=False)
    assert "KV of a token" in one.output
    wrong = CliRunner().invoke(main, ["models", "./nowhere"])
    assert wrong.exit_code != 0
