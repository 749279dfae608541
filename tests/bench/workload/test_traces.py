"""Public traces: prompts share exactly the blocks that the trace says, lengths are scaled and cut, bad lines are named."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve_bench.report.meta import collect_meta
from pdserve_bench.workload.request import Arrivals, BenchRequest
from pdserve_bench.workload.spec import read_spec
from pdserve_bench.workload.workload import Workload

DATA = Path(__file__).resolve().parents[4] / "shared/data"
RECORDED = Arrivals(kind="trace")
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:48.1805900,10,20
2023-11-16 18:15:49.0000000,0,20
"""


def mooncake(directory: Path | str, *rows: tuple[float, int, int, list[int]]) -> Path:
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    path = Path(directory) / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
    return path


def loaded(form: str, *overrides: str) -> Workload:
    return Workload(read_spec(form, ["vocab_size=300", *overrides]), None)


def ids(request: BenchRequest) -> tuple[int, ...]:
    (part,) = request.prompt
    assert isinstance(part, tuple)
    return part


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return how many tokens two prompts share from their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


BLOCKS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(BLOCKS, st.integers(1, 512)), min_size=2, max_size=6), st.sampled_from([1.0, 0.2019, 0.05]))
@example([([0, 1, 2, 3], 512), ([0], 1)], 0.2019)
def test_two_prompts_share_exactly_the_blocks_that_are_equal_from_the_start(prompts, scale):
    """Blocks that differ may share some of the first tokens that tell them apart, and nothing behind these."""
    rows = [(0.0, 512 * (len(blocks) - 1) + last, 5, blocks) for blocks, last in prompts]
    with TemporaryDirectory() as directory:
        workload = loaded(f"mooncake:{mooncake(directory, *rows)},length_scale={scale}", "arrivals.kind=inf")
    requests = list(workload.requests(workload.spec.arrivals, 3))
    block_tokens = round(512 * scale)
    assert [one.prompt_tokens for one in requests] == [len(ids(one)) for one in requests]
    assert all(-(-len(ids(one)) // block_tokens) == len(row[3]) for one, row in zip(requests, rows, strict=True))
    for place, one in enumerate(requests):
        for other, that in enumerate(requests[:place]):
            pairs = zip(rows[place][3], rows[other][3], strict=False)
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            expected = min(equal * block_tokens, len(ids(one)), len(ids(that)))
            assert expected <= shared(ids(one), ids(that)) < expected + 4
            assert shared(ids(one), ids(that)) == expected or expected < min(len(ids(one)), len(ids(that)))


def test_recorded_times_are_kept_or_scaled_to_a_rate(tmp_path):
    path = mooncake(tmp_path, (1000, 600, 5, [0, 1]), (1500, 10, 6, [2]), (3000, 512, 7, [0]))
    workload = loaded(f"mooncake:{path}")
    assert workload.spec.arrivals == RECORDED
    requests = list(workload.requests(RECORDED, 0))
    assert [(one.send_at_s, one.prompt_tokens, one.max_tokens) for one in requests] == [
        (0.0, 600, 5),
        (0.5, 10, 6),
        (2.0, 512, 7),
    ]
    assert all(len(ids(one)) == one.prompt_tokens for one in requests)
    faster = list(workload.requests(RECORDED.with_rate(10.0), 0))
    assert [one.send_at_s for one in faster] == pytest.approx([0.0, 0.05, 0.2]), "two gaps at ten requests a second"
    assert [replace(one, send_at_s=None) for one in faster] == [replace(one, send_at_s=None) for one in requests]
    drawn = list(workload.requests(Arrivals(rate_per_s=1.0), 0))
    assert [ids(one) for one in drawn] == [ids(one) for one in requests]


def test_a_repeated_trace_starts_over_with_other_tokens_at_the_same_rate(tmp_path):
    path = mooncake(tmp_path, (0, 600, 5, [0, 1]), (1000, 700, 6, [0, 2]))
    requests = list(islice(loaded(f"mooncake:{path},repeat=true").requests(RECORDED, 0), 6))
    assert [one.send_at_s for one in requests] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [one.number for one in requests] == list(range(6))
    assert shared(ids(requests[0]), ids(requests[1])) >= 512
    assert shared(ids(requests[0]), ids(requests[2])) < 4, "a cluster has nothing of an earlier pass in its cache"
    assert shared(ids(requests[2]), ids(requests[3])) >= 512


def test_what_is_cut_or_left_out_is_said(tmp_path):
    path = mooncake(tmp_path, (0, 600, 50, [0, 1]), (10, 100, 5, [2]), (20, 0, 5, []))
    cut = loaded(f"mooncake:{path},max_prompt_tokens=300,max_output_tokens=9")
    assert [(one.prompt_tokens, one.max_tokens) for one in cut.requests(RECORDED, 0)] == [(300, 9), (100, 5)]
    assert cut.notes == (
        f"1 lines of {path} have no prompt or no answer tokens and are left out.",
        "1 of 2 prompts are over 300 tokens and are cut to that.",
        "1 of 2 answers are cut to 9 tokens.",
    )
    dropped = loaded(f"mooncake:{path},max_prompt_tokens=300,too_long=drop", "arrivals.kind=inf")
    assert [one.prompt_tokens for one in dropped.requests(Arrivals(kind="inf"), 0)] == [100]
    assert "1 of 2 prompts are over 300 tokens and are left out." in dropped.notes
    with pytest.raises(ConfigError, match="every prompt is over max_prompt_tokens 9"):
        loaded(f"mooncake:{path},max_prompt_tokens=9,too_long=drop")


def test_azures_times_are_ordered_and_no_prompts_begin_alike(tmp_path):
    (tmp_path / "a.csv").write_text(AZURE)
    workload = loaded(f"azure:{tmp_path / 'a.csv'}")
    requests = list(workload.requests(workload.spec.arrivals, 0))
    assert [one.send_at_s for one in requests] == pytest.approx([0.0, 1.5, 4.0])
    assert [(one.prompt_tokens, one.max_tokens) for one in requests] == [(374, 44), (10, 20), (396, 109)]
    assert len({ids(one)[:4] for one in requests}) == 3
    assert len(workload.notes) == 1
    assert (workload.mean_prompt_tokens, workload.mean_output_tokens) == pytest.approx((260.0, 173 / 3))


def test_the_fingerprint_tells_workloads_apart_but_not_rates_and_places(tmp_path):
    rows = ((0, 600, 5, [0, 1]), (1000, 700, 6, [0, 2]))
    (tmp_path / "other").mkdir()
    one, same = mooncake(tmp_path, *rows), mooncake(tmp_path / "other", *rows)
    fingerprint = loaded(f"mooncake:{one}").fingerprint
    assert loaded(f"mooncake:{same}", "arrivals.rate_per_s=3").fingerprint == fingerprint
    assert loaded(f"mooncake:{one},length_scale=0.5").fingerprint != fingerprint
    assert loaded(f"mooncake:{one}", "arrivals={kind: closed}").fingerprint != fingerprint
    mooncake(tmp_path, *rows[:1], (1000, 701, 6, [0, 2]))
    assert loaded(f"mooncake:{one}").fingerprint != fingerprint


GOOD = '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("mooncake", GOOD + "{", "line 2: Input data was truncated"),
        ("mooncake", GOOD + "\n" + GOOD.replace("[1]", '["1"]'), r"line 3: Expected `int`, got `str` - at `\$.hash_ids"),
        ("mooncake", GOOD.replace("5", "-5", 1), r"line 1: Expected `int` >= 0 - at `\$.input_length"),
        ("mooncake", GOOD.replace("[1]", "[1, 2]"), "line 1: hash_ids has 2 blocks; input_length 5 needs 1"),
        ("mooncake", GOOD.replace('"timestamp": 0, ', ""), "line 1: .*missing required field `timestamp`"),
        ("mooncake", "", "holds no request"),
        ("azure", "TIMESTAMP,GeneratedTokens\n", "line 1: the column ContextTokens is missing"),
        ("azure", AZURE + "now,1,2\n", "line 6: TIMESTAMP must be a time, got 'now'"),
        ("azure", AZURE + "2023-11-16 18:15:49.-1,1,2\n", "line 6: TIMESTAMP must be a time"),
        (
            "azure",
            AZURE + "2023-11-16 18:15:49.0,1.5,2\n",
            "line 6: ContextTokens must be a whole number from 0 to 16777216, got '1.5'",
        ),
        (
            "azure",
            AZURE + "2023-11-16 18:15:49.0,1\n",
            "line 6: GeneratedTokens must be a whole number from 0 to 16777216, got ''",
        ),
    ],
)
def test_a_malformed_line_is_named_with_its_field(tmp_path, kind, text, named):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=named):
        loaded(f"{kind}:{tmp_path / 'file'}")


def test_lines_of_other_systems_are_read_and_hostile_ones_refused(tmp_path, monkeypatch):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt_ids": [1], "max_tokens": 3}\r\n\r\n')
    assert [one.prompt for one in requests_of(path)] == [((1,),)]
    for content, says in ((b"\x1f\x8b\x08", "is compressed"), (b"\0" * 100, "line 1: is longer than 50 bytes")):
        monkeypatch.setattr("pdserve_bench.workload.traces.MOST_LINE_BYTES", 50)
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            requests_of(path)


def requests_of(path: Path) -> list[BenchRequest]:
    workload = Workload(read_spec(f"jsonl:{path}", ["vocab_size=100"]), None)
    return list(workload.requests(Arrivals(kind="inf"), 0))


def test_limits_that_a_request_exceeds_are_named(tmp_path):
    path = mooncake(tmp_path, (0, 5, 5, [1]), (1, 600, 50, [0, 1]))
    with pytest.raises(ConfigError, match="line 2: 600 prompt and 50 answer tokens are over max_model_len 649"):
        loaded(f"mooncake:{path}", "max_model_len=649")
    with pytest.raises(ConfigError, match=r"length_scale must be at least .*blocks of 2 tokens"):
        loaded(f"mooncake:{path},length_scale=0.004")
    with pytest.raises(ConfigError, match=r"cannot read the workload's file .*No such file"):
        loaded("mooncake:/no/such")
    with pytest.raises(ConfigError, match=r"cannot read the workload's file .*No such file"):
        loaded("azure:/no/such")


@pytest.mark.parametrize(
    ("form", "means"),
    [
        ("mooncake:mooncake/conversation_trace.jsonl", (12035.0, 342.6)),
        ("azure:azure2023/AzureLLMInferenceTrace_conv.csv", (1154.7, 211.1)),
    ],
)
def test_the_published_traces_are_workloads(form, means):
    kind, _, name = form.partition(":")
    if not (DATA / name).exists():
        pytest.skip("the public traces are not beside this checkout")
    workload = loaded(f"{kind}:{DATA / name}")
    assert (workload.mean_prompt_tokens, workload.mean_output_tokens) == pytest.approx(means, abs=0.5)
    assert all(len(ids(one)) == one.prompt_tokens for one in islice(workload.requests(workload.spec.arrivals, 0), 20))


def test_a_result_tells_apart_two_files_of_one_name(tmp_path):
    path = mooncake(tmp_path, (0, 600, 5, [0, 1]), (1000, 700, 6, [0, 2]))
    now = datetime.now(UTC)
    workload = loaded(f"mooncake:{path}")
    meta = collect_meta(workload=workload.to_dict(), configuration={}, seed=0, slos={}, started=now, ended=now)
    assert meta["workload_fingerprint"] == workload.fingerprint
    mooncake(tmp_path, (0, 600, 5, [0, 1]), (1000, 700, 7, [0, 2]))
    assert loaded(f"mooncake:{path}").to_dict()["fingerprint"] != meta["workload_fingerprint"]
