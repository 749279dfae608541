"""The pages about `pdserve bench` name every flag and every field, and their examples are workloads."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import click
import msgspec
import pytest
import yaml

from pdserve_bench.commands.group import bench
from pdserve_bench.workload import spec
from pdserve_bench.workload.jsonl import JsonlLine
from pdserve_bench.workload.request import Arrivals
from pdserve_bench.workload.spec import read_spec
from pdserve_bench.workload.workload import load_workload

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/benchmarking.md").read_text()
WORKLOADS = (ROOT / "docs/workloads.md").read_text()
FLAG = re.compile(r"--[a-z][a-z-]*")
SOURCES = (
    spec.RandomSource,
    spec.TextSource,
    spec.SessionSource,
    spec.MooncakeSource,
    spec.AzureSource,
    spec.JsonlSource,
)


@pytest.mark.parametrize("command", ["run", "compare", "goodput", "verdict"])
def test_the_page_names_every_flag_of_each_command(command):
    context = click.Context(bench)
    found = bench.get_command(context, command)
    assert found is not None
    flags = {option.opts[0] for option in found.params if isinstance(option, click.Option)}
    assert flags <= set(FLAG.findall(PAGE))


def test_the_page_shows_only_flags_that_exist():
    context = click.Context(bench)
    commands = [bench.get_command(context, name) for name in bench.list_commands(context)]
    known = {flag for one in commands if one for option in one.params for flag in option.opts}
    assert set(FLAG.findall(PAGE)) <= known | {"--help"}


def test_the_page_of_workloads_names_every_field():
    fields = {field.encode_name for source in SOURCES for field in msgspec.structs.fields(source)}
    fields |= {f"arrivals.{field.encode_name}" for field in msgspec.structs.fields(Arrivals)}
    fields |= {field.encode_name for field in msgspec.structs.fields(spec.WorkloadSpec)} - {"arrivals", "source"}
    fields |= {field.encode_name for field in msgspec.structs.fields(JsonlLine)}
    assert fields <= set(re.findall(r"`([a-z_.]+)`", WORKLOADS))


def test_the_examples_of_the_pages_are_workloads():
    inline = re.findall(r"```yaml\n(.*?)```", WORKLOADS, re.DOTALL)
    assert [spec.parse_spec(yaml.safe_load(text)).source for text in inline]
    for form in re.findall(r"`((?:random|text|sessions):[^`]+)`", WORKLOADS):
        read_spec(form)


@pytest.mark.parametrize("form", ["workload.yaml", "jsonl:requests.jsonl"])
def test_the_example_files_are_workloads(form, monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    workload = load_workload(form, None, max_model_len=2048, overrides=["vocab_size=999"])
    sent = list(islice(workload.requests(Arrivals(rate_per_s=2.0), 0), 5))
    assert len(sent) == 5
    assert {request.slo_class for request in sent} & {"chat", "batch"}
