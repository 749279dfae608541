"""The command line without a cluster: flags become settings, mistakes become one line."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pdserve.cli import main
from pdserve.commands import demo, requests, settings
from pdserve.commands.failures import one_line_errors
from pdserve.commands.generate import summary
from pdserve.commands.prompts import PromptStream
from pdserve.config import ClusterConfig
from pdserve.core.errors import ConfigError, Unavailable
from pdserve.core.sampling import Placement
from pdserve.rpc.v1 import inference_pb2

HEAVY = ("ray", "torch", "grpc", "rich", "nixl")


def parse(*arguments: str) -> ClusterConfig:
    """What the flags of `up` amount to."""
    seen: list[ClusterConfig] = []

    @click.command()
    @settings.cluster_options
    def command(**flags: Any) -> None:
        seen.append(settings.cluster_config(**flags))

    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_flag_that_only_vllm_has_says_what_to_do_instead() -> None:
    page = (Path(__file__).parents[2] / "docs/vllm.md").read_text(encoding="utf-8")
    ours = {flag for flags, *_ in settings.FLAGS for flag in flags}
    for flags, instead in settings.LACKING:
        for flag in flags:
            refused = run("up", flag, "2")
            assert refused.exit_code == 2
            assert f"vLLM's {flag} does not exist here: {instead}." in refused.stderr
            assert f"`{flag}`" in page
            assert flag not in ours
    assert "Did you mean '--max-model-len'?" in run("up", "--max-model-length", "2").stderr


def test_no_flags_are_the_defaults() -> None:
    assert parse() == ClusterConfig()


def test_every_flag_reaches_its_setting() -> None:
    config = parse(
        *(
            "--prefill",
            "0",
            "--decode",
            "3",
            "--model",
            "tiny",
            "--served-model-name",
            "m",
            "--load-format",
            "dummy",
            "--host",
            "0.0.0.0",
        ),
        *("--http-port", "1", "--grpc-port", "2", "--link-port", "3", "--max-model-len", "64", "--max-num-seqs", "5"),
        *("--max-num-batched-tokens", "128", "--block-size", "8", "--kv-cache-memory", "64MiB", "--dtype", "float32"),
        *("--kv-cache-dtype", "bf16"),
        *("--placement", "colocated", "--colocate-below-tokens", "9", "--batch-invariant", "--log-dir", "l"),
        *("--address", "auto", "--no-kv-checksum"),
    )
    assert not config.lease.kv_checksum
    engine, router = config.engine, config.router
    assert (config.prefill.replicas, config.decode.replicas, config.address, config.log_dir) == (0, 3, "auto", "l")
    assert (router.host, router.http_port, router.grpc_port, router.link_port) == ("0.0.0.0", 1, 2, 3)
    assert (router.placement, router.colocate_below_tokens) == ("colocated", 9)
    assert engine.kv_cache_dtype == "bf16"
    assert engine.load_format == "dummy"
    assert (engine.model, engine.served_model_name, engine.dtype, engine.batch_invariant) == ("tiny", "m", "float32", True)
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (64, 5, 128)
    assert (engine.block_size, engine.kv_cache_memory) == (8, 64 << 20)


@pytest.mark.parametrize(
    "names", [("--tensor-parallel-size", "--pipeline-parallel-size", "--enable-expert-parallel"), ("-tp", "-pp", "-ep")]
)
def test_gangs_have_vllms_flags(names: tuple[str, str, str]) -> None:
    engine = parse(names[0], "2", names[1], "4", names[2]).engine
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.enable_expert_parallel) == (2, 4, True)
    alone = parse("--set", "prefill.engine.tensor_parallel_size=2", "--no-enable-expert-parallel")
    assert [alone.engine_for(pool).ranks for pool in (alone.prefill, alone.decode)] == [2, 1]
    assert parse(names[0], "2", "--rank-collective", "gloo").engine.rank_collective == "gloo"


@pytest.mark.parametrize("given", ["https://a.example, null", '["https://a.example", "null"]'])
def test_origins_are_a_list_in_vllms_form_or_with_commas(given: str) -> None:
    assert parse("--allowed-origins", given).router.allowed_origins == ("https://a.example", "null")


def test_speculation_has_vllms_flag() -> None:
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    how = parse("--speculative-config", given).engine.speculative_config
    assert (how.method, how.num_speculative_tokens, how.prompt_lookup_max) == ("ngram", 5, 4)
    assert not parse().engine.speculative_config.drafts
    alone = parse("--set", "decode.engine.speculative_config={method: suffix}")
    assert [alone.engine_for(pool).speculative_config.drafts for pool in (alone.prefill, alone.decode)] == [False, True]


def test_port_zero_frees_grpc_as_well_unless_it_is_given() -> None:
    assert parse("--port", "0").router.grpc_port == 0
    assert parse("--port", "0", "--grpc-port", "7").router.grpc_port == 7
    assert parse("--port", "5").router.grpc_port == 50051


def test_flags_override_the_file_and_set_overrides_both(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("engine: {block_size: 8, max_num_seqs: 3}")
    config = parse("--config", str(file), "--block-size", "32", "--set", "engine.max_num_seqs=4")
    assert (config.engine.block_size, config.engine.max_num_seqs) == (32, 4)


def test_a_relative_recording_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router runs in another directory."""
    monkeypatch.chdir(tmp_path)
    assert parse("--record", "file").router.record_file == str(tmp_path / "file")
    assert parse().router.record_file is None


def test_a_relative_model_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse("--model", "m").engine.model == str(tmp_path / "m")
    assert parse("--model", "org/name").engine.model == "org/name"
    drafts = parse("--speculative-config", '{"method": "draft_model", "model": "m"}').engine.speculative_config
    assert drafts.model == str(tmp_path / "m")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("up", "--port", "99999"), "--http-port"),
        (("up", "-tp", "65"), "--tensor-parallel-size"),
        (("up", "-tp", "9"), "tensor_parallel_size 9"),
        (("up", "--kv-cache-memory", "lots"), "--kv-cache-memory"),
        (("up", "--allowed-origins", "[*]"), "--allowed-origins"),
        (("up", "--allowed-origins", "[1]"), "error: router.allowed_origins"),
        (("up", "--speculative-config", "ngram"), "--speculative-config"),
        (("up", "--speculative-config", "[1]"), "--speculative-config"),
        (("up", "--speculative-config", '{"method": "eagle"}'), "error: engine.speculative_config.method must be"),
        (
            ("up", "--speculative-config", '{"draft_tensor_parallel_size": 1}'),
            "error: unknown setting engine.speculative_config",
        ),
        (
            ("up", "--speculative-config", '{"method": "suffix", "num_speculative_tokens": 65}'),
            "error: engine.speculative_config.num_speculative_tokens",
        ),
        (("up", "--decode", "0"), "--decode"),
        (("up", "--placement", "moon"), "--placement"),
        (("up", "--set", "engine.blok=1"), "error: unknown setting engine.blok"),
        (("up", "--config", "missing.yaml"), "error: cannot read missing.yaml"),
        (("up", "--address", "nowhere"), "error: address must be local, auto or HOST:PORT"),
        (("demo", "--set", "decode.replicas=0"), "error: decode.replicas must be at least 1"),
        (("generate", "--placement", "moon", "x"), "--placement"),
        (("generate", "--logit-bias", "7", "x"), "--logit-bias"),
        (("generate", "--logit-bias", "-7=1", "x"), "--logit-bias"),
        (("generate", "--logprobs", "2", "x"), "--logprobs"),
    ],
)
def test_wrong_settings_exit_with_2_and_name_the_flag(arguments: tuple[str, ...], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


@pytest.mark.parametrize("path", [(), *commands(main)], ids=" ".join)
def test_help_was_cut_at_45_characters_and_told_limits_of_the_wire(path: tuple[str, ...]) -> None:
    drawn = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).output
    assert all(len(line) <= 80 for line in drawn.splitlines() if "|" not in line), "a list of choices is one word"
    assert "..." not in drawn.partition("Commands:")[2]
    assert not re.search("[0-9]{6}", drawn), "nobody gives a number near this limit"


def test_a_number_that_fits_no_field_still_tells_the_limit() -> None:
    for flags in (("--max-tokens", "4294967296"), ("--stop-token-ids", "-1"), ("--logit-bias", "4294967296=1")):
        result = run("generate", *flags, "hi")
        assert result.exit_code == 2
        assert "is not in the range 0<=x<=4294967295" in result.stderr


@pytest.mark.parametrize("command", ["status", "generate", "chat"])
def test_nobody_home_is_one_line_with_a_hint(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--address", "127.0.0.1:9"], input="hi")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: nothing answers at 127.0.0.1:9; is `pdserve up` running")


@pytest.mark.parametrize(("error", "status"), [(ConfigError("x"), 2), (Unavailable("x"), 1), (None, 0)])
def test_errors_become_exit_statuses(error: Exception | None, status: int) -> None:
    @click.command()
    @one_line_errors
    def command() -> None:
        if error:
            raise error

    result = CliRunner().invoke(command)
    assert result.exit_code == status
    assert result.stderr == ("error: x\n" if error else "")


def test_help_imports_nothing_heavy() -> None:
    script = f"import sys, pdserve.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_unset_sampling_flags_stay_unset() -> None:
    request = requests.build(text="hi", max_tokens=None, temperature=None, placement=None)
    assert not request.sampling.HasField("max_tokens")
    assert not request.sampling.HasField("temperature")
    assert not request.HasField("deadline_s")
    assert request.placement == 0


def test_set_request_flags_arrive() -> None:
    request = requests.build(
        messages=[("user", "hi")],
        temperature=0.0,
        seed=(1 << 64) - 1,
        stop=("a",),
        placement=Placement.COLOCATED.value,
        deadline_s=1.5,
    )
    assert request.sampling.HasField("temperature")
    assert (request.sampling.seed, list(request.sampling.stop), request.deadline_s) == ((1 << 64) - 1, ["a"], 1.5)
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "hi")]


def test_every_way_to_pick_tokens_has_its_flag() -> None:
    seen: list[inference_pb2.GenerateRequest] = []

    @click.command()
    @requests.request_options
    def command(**fields: Any) -> None:
        seen.append(requests.build(text="hi", logprobs=3, **fields))

    arguments = "--presence-penalty 0.5 --frequency-penalty -1 --repetition-penalty 1.25 --logit-bias 7=-100 --logit-bias 8=0.5"
    result = CliRunner().invoke(command, arguments.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    sampling = seen[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.25)
    assert (dict(sampling.logit_bias), sampling.logprobs) == ({7: -100.0, 8: 0.5}, 3)


def test_flags_limit_the_drafts_of_a_request_and_the_summary_says_how_many_were_right() -> None:
    seen: list[inference_pb2.GenerateRequest] = []

    @click.command()
    @requests.request_options
    def command(**fields: Any) -> None:
        seen.append(requests.build(text="hi", **fields))

    for arguments in ("", "--speculation off", "--num-speculative-tokens 0"):
        assert CliRunner().invoke(command, arguments.split(), catch_exceptions=False).exit_code == 0
    asked = [(one.speculation, one.HasField("num_speculative_tokens")) for one in seen]
    assert asked == [("", False), ("off", False), ("", True)]
    assert CliRunner().invoke(command, ["--speculation", "on"]).exit_code == 2

    drafts = inference_pb2.Speculation(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=3)
    report = inference_pb2.RequestReport(speculation=drafts)
    assert summary(inference_pb2.GenerateResponse(report=report)).endswith(
        "; 37.5% of its drafts were right, 2.50 tokens a step with drafts"
    )
    assert "drafts" not in summary(inference_pb2.GenerateResponse())


def test_demo_counts_only_requests_whose_kv_crossed() -> None:
    last = inference_pb2.GenerateResponse(report=inference_pb2.RequestReport(kv_bytes=1))
    assert demo._problem(PromptStream("r", "p", last=last)) is None
    assert (
        demo._problem(PromptStream("r", "p", last=inference_pb2.GenerateResponse())) == "no KV bytes were moved between workers"
    )
    assert demo._problem(PromptStream("r", "p", error="broke")) == "broke"
    assert demo._problem(PromptStream("r", "p")) == "the stream ended before the request did"


@pytest.mark.parametrize("flag", [("--name", "mine"), ("--leave-running",)])
def test_a_bound_cluster_cannot_be_left_to_another_up(flag: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, ["up", "--bound", *flag])
    assert result.exit_code == 2
    assert f"{flag[0]} is for a cluster that another `pdserve up` can find" in result.output
