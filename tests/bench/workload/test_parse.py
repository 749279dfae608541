"""The value of `--workload`: short forms, YAML files, and errors that name the field."""

from __future__ import annotations

from itertools import islice

import pytest

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import Arrivals, Uniform
from pdserve_bench.workload.spec import (
    ClassMix,
    JsonlSource,
    MooncakeSource,
    RandomSource,
    SessionSource,
    parse_spec,
    read_spec,
)
from pdserve_bench.workload.workload import load_workload


def test_short_forms_are_what_they_say():
    assert read_spec("random:1024/128").source == RandomSource(prompt=1024, output=128)
    assert read_spec("random:9/8,prefix_tokens=7").source == RandomSource(prompt=9, output=8, prefix_tokens=7)
    assert read_spec("sessions:turns=3,think_s=2").source == SessionSource(turns=3, think_s=2)
    assert read_spec("sessions:").source == SessionSource()
    assert read_spec("jsonl:/a,b/c.jsonl,output=5").source == JsonlSource(file="/a,b/c.jsonl", output=5)
    trace = read_spec("mooncake:a=b.jsonl,length_scale=0.1")
    assert trace.source == MooncakeSource(file="a=b.jsonl", length_scale=0.1)
    assert trace.arrivals == Arrivals(kind="trace")


def test_a_yaml_file_says_everything_and_flags_override_it(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("""
source: {kind: random, prompt: {kind: uniform, mean: 100, range_ratio: 0.5}, output: 20}
arrivals: {kind: gamma, burstiness: 0.5}
classes: {chat: 0.7, batch: {weight: 0.3, prompt: 400}}
""")
    spec = read_spec(str(path), ["arrivals.rate_per_s=3", "source.output=30"], max_model_len=2048)
    assert spec.source == RandomSource(prompt=Uniform(mean=100, range_ratio=0.5), output=30)
    assert spec.arrivals == Arrivals(kind="gamma", burstiness=0.5, rate_per_s=3.0)
    assert spec.mixes == {"chat": ClassMix(weight=0.7), "batch": ClassMix(weight=0.3, prompt=400)}
    assert spec.max_model_len == 2048
    assert parse_spec(spec.to_dict()) == spec
    request = next(load_workload(str(path), None, overrides=["vocab_size=99"]).requests(Arrivals(rate_per_s=1.0), 0))
    assert request.slo_class in spec.classes


@pytest.mark.parametrize(
    ("form", "overrides", "named"),
    [
        ("random:1024", [], r"--workload random:1024: the lengths are given as PROMPT/OUTPUT"),
        ("random:a/b", [], "PROMPT/OUTPUT"),
        ("random:0/5", [], r"Expected `int` >= 1 - at `\$.source.prompt"),
        ("random:9999999999/5", [], "at most 9 digits"),
        ("random:99999999/5", [], r"Expected `int` <= 16777216 - at `\$.source.prompt"),
        ("sessions:turns=300", [], "workload.source.turns may be 300, more than 256"),
        ("sessions:think_s=.inf", [], r"Expected `float` <= 1000000.0 - at `\$.source.think_s"),
        ("random:9/5,foo=1", [], r"unknown field `foo` - at `\$.source`"),
        ("random:9/5,foo", [], "a field is given as NAME=VALUE, got 'foo'"),
        ("random:9/5", ["sauce=1"], "unknown field `sauce`"),
        ("random:9/5", ["sauce"], "NAME=VALUE, got 'sauce'"),
        ("random:9/5", ["source.prompt.mean=1", "source.prompt.mean.x=2"], "prompt is not a section"),
        ("random:9/5", ["arrivals={kind: ["], "arrivals is not valid YAML"),
        ("examples/requests.jsonl", [], "is given as jsonl:examples/requests.jsonl"),
        ("random:9/5", ["classes={a: 0}"], r"Expected `float` > 0.0 - at `\$.classes"),
        ("random:9/5", ["classes={a: .inf}"], "weights must be finite"),
        ("random:9/5,prompt={kind: list", [], "is not valid YAML"),
        ("random:9/5", ["source.prompt={kind: list, values: []}"], "length >= 1"),
        ("random:9/5", ["source.prompt={kind: list, values: [1], weights: [1, 2]}"], "weights must be 1 numbers"),
        ("mooncake:x", ["classes={a: {weight: 1, prompt: 4}}"], "workload.classes.a: the file gives the lengths"),
        ("sonnet:9/5", [], "cannot read this YAML file .*begins with none of random:, text:"),
    ],
)
def test_what_is_wrong_is_named(form, overrides, named):
    with pytest.raises(ConfigError, match=named):
        read_spec(form, overrides)


def test_a_seed_out_of_bounds_is_refused():
    workload = load_workload("random:9/5", None, overrides=["vocab_size=99"])
    with pytest.raises(ConfigError, match="seed must be from 0"):
        workload.requests(Arrivals(kind="inf"), -1)


def test_requests_are_made_when_they_are_asked_for():
    """A workload without an end gives its first requests, however many would follow."""
    workload = load_workload("random:100000/5", None, overrides=["vocab_size=99"])
    assert [one.number for one in islice(workload.requests(Arrivals(kind="inf"), 0), 10)] == list(range(10))
