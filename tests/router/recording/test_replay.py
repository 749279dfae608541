"""A recording is written beside a router, and replays to equal effects; what is no whole recording is refused by name."""

from __future__ import annotations

import json
import stat
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pdserve.cli import main
from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError, InvalidRequest, Overloaded
from pdserve.core.ids import RequestId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.policy import BUILT_IN
from router.recording import recorder as recorder_module
from router.recording.codec import event_from_plain
from router.recording.recorder import END_BYTES, Recorder
from router.recording.redact import expand
from router.recording.replay import Replay
from router.recording.replay import replay as replay_with
from router.recording.transcript import Transcript
from tests.router.core_peers import FINGERPRINT, Stage


def played(**config: object) -> Stage:
    """Two requests, one of which loses its decode worker, and a refused one."""
    stage = Stage(max_queued_requests=1, **config)
    stage.join("prefill-0", Role.PREFILL)
    decodes = [stage.join(f"decode-{i}", Role.DECODE, max_num_seqs=1) for i in range(2)]
    stage.submit("r", max_tokens=5)
    stage.run(3)
    lost = next(peer for peer in decodes if peer.jobs)
    stage.leave(lost)
    for name in ("s", "t", "u", "v"):
        try:
            stage.submit(name)
        except Overloaded:
            break
    stage.run()
    stage.assert_empty()
    return stage


def replay(lines: Iterable[bytes]) -> Replay:
    return replay_with(lines, lambda config: BUILT_IN)


LINES = played().notes.lines


def run_replay(path: Path, lines: list[bytes], *more: str) -> Result:
    path.write_bytes(b"".join(lines))
    return CliRunner().invoke(main, ["replay", str(path), *more], catch_exceptions=False)


def test_a_recording_replays_to_equal_effects_and_tells_a_story(tmp_path: Path) -> None:
    lines = [*LINES, Transcript.end("the router stopped")]
    assert any(b'"raised":{"type":"Overloaded"' in line for line in lines), "a refused Submit was recorded"
    shown = run_replay(tmp_path / "file", lines, "--request", "r")
    assert shown.exit_code == 0, shown.output
    told = shown.stdout.splitlines()
    assert told[0] == f"{len(LINES) - 1} events, effects equal; the recording ends: the router stopped"
    assert told[1] == "request r: finished"
    kinds = [line.split()[3] for line in told[2:]]
    assert kinds[0] == "queued"
    assert kinds[-1] == "ended"
    assert {"lost", "retried"} <= set(kinds)


def test_a_recording_of_a_killed_router_has_no_last_line_and_replays(tmp_path: Path) -> None:
    shown = run_replay(tmp_path / "file", LINES)
    assert shown.exit_code == 0
    assert "the router was killed or still runs" in shown.stdout


def test_a_line_that_a_killed_router_left_half_written_ends_the_recording_and_its_stories_are_told(tmp_path: Path) -> None:
    shown = run_replay(tmp_path / "file", [*LINES, LINES[2][:-9]], "--request", "r")
    assert shown.exit_code == 0
    told = shown.stdout.splitlines()
    says = (
        f"the recording ends: line {len(LINES) + 1} is cut off, so the router was killed, its disk was full, or it still runs"
    )
    assert told[0] == f"{len(LINES) - 1} events, effects equal; {says}"
    assert told[1] == "request r: finished"


@pytest.mark.parametrize(
    "wrong", [{"work": 3}, {"work": {"handle": []}}, {"type": "SendBind", "request_id": "nobody"}, {"work": {}}]
)
def test_a_difference_about_no_request_that_is_known_is_shown_without_a_story(tmp_path: Path, wrong: object) -> None:
    """An effect of a damaged file ended the command by a traceback, and a request without a story by an error."""
    line = json.loads(LINES[1]) | {"effects": [wrong]}
    shown = run_replay(tmp_path / "file", [LINES[0], json.dumps(line).encode() + b"\n"])
    assert shown.exit_code == 1
    assert shown.stdout.startswith("0 events, effects equal; then they differ at line 2, ")
    assert not shown.stderr


def test_the_text_of_a_recording_commands_no_terminal(tmp_path: Path) -> None:
    shown = run_replay(tmp_path / "file", [LINES[0], b'{"end":"\\u001b[31mred"}\n'])
    assert shown.stdout == "0 events, effects equal; the recording ends: '\\x1b[31mred'\n"


def test_biases_and_stop_ids_are_recorded_as_counts_and_replay() -> None:
    """They are token ids, which tell of a request's content as its prompt does."""
    sampling = SamplingParams(logit_bias=((77_001, -5.5), (77_002, 1.5)), stop_token_ids=(77_003, 77_004))
    submit = ev.Submit(RequestId("r"), RequestSpec((1, 2), sampling), arrived_s=1.0, deadline_s=9.0)
    line = Transcript(RouterConfig(), FINGERPRINT, key=bytes(32)).line(1.0, submit, [])
    assert b"7700" not in line
    assert b"-5.5" not in line
    read = event_from_plain(expand(json.loads(line)["event"]))
    assert isinstance(read, ev.Submit)
    assert len(read.spec.sampling.logit_bias) == len(read.spec.sampling.stop_token_ids) == 2
    assert read.spec.sampling.edits_logits


def test_prompts_that_are_recorded_replay_as_well() -> None:
    stage = played(record_prompts=True)
    assert b"[0,1,2,3]" in b"".join(stage.notes.lines)
    assert not stage.notes.problems()


@pytest.mark.parametrize("kind", ["SendBind", "EmitDelta", "EmitDone", "SendAttach"])
def test_the_first_difference_is_shown_with_the_story_of_its_request(tmp_path: Path, kind: str) -> None:
    lines = [json.loads(line) for line in LINES]
    found = [(n, e) for n, line in enumerate(lines) for e in line.get("effects", []) if e["type"] == kind]
    number, effect = found[-1]
    lines[number]["effects"][lines[number]["effects"].index(effect)] = effect | {"wrong": True}
    shown = run_replay(tmp_path / "file", [json.dumps(line).encode() + b"\n" for line in lines])
    assert shown.exit_code == 1
    assert shown.stdout.startswith(f"{number - 1} events, effects equal; then they differ at line {number + 1}, ")
    assert "\nrequest " in shown.stdout
    assert "queued" in shown.stdout


def test_a_missing_effect_and_another_error_are_differences() -> None:
    lines = [json.loads(line) for line in LINES]
    number = next(n for n, line in enumerate(lines) if len(line.get("effects", [])) > 1)
    gone = lines[number]["effects"].pop()
    short = replay([json.dumps(line).encode() + b"\n" for line in lines]).difference
    assert short is not None
    assert (short.recorded, short.replayed) == (None, gone)
    lines = [json.loads(line) for line in LINES]
    number = next(n for n, line in enumerate(lines) if "raised" in line)
    lines[number]["raised"]["message"] = "another"
    other = replay([json.dumps(line).encode() + b"\n" for line in lines]).difference
    assert other is not None
    assert (other.line, other.recorded) == (number + 1, {"raised": lines[number]["raised"]})


BAD: list[tuple[list[bytes], str]] = [
    ([], "is not a recording of pdserve"),
    ([b"\n"], "line 1 is not JSON"),
    ([b"\x00\xff garbage"], "line 1 is cut off"),
    ([b"\x00\xff garbage\n"], "line 1 is not JSON"),
    ([b"[1]\n"], "line 1 is no object"),
    ([b'{"a":1}\n'], "is not a recording of pdserve"),
    ([LINES[0].replace(b'"pdserve_recording":1', b'"pdserve_recording":2')], "was written in format 2, by pdserve"),
    ([LINES[0].replace(b'"max_attempts":', b'"max_tries":')], "line 1 has no settings"),
    ([LINES[0].replace(b'"max_attempts":4', b'"max_attempts":0')], "line 1 has no settings"),
    ([b'{"pdserve_recording":1}\n'], "line 1 has no settings"),
    ([LINES[0], b"garbage\n"], "line 2 is not JSON"),
    ([LINES[0], b"{}\n"], "line 2 holds no event"),
    ([LINES[0], b'{"now_s":"x","event":{"type":"Tick"}}\n'], "line 2 holds no event"),
    ([LINES[0], b'{"now_s":1,"event":{"type":"Tock"}}\n'], "line 2 holds no event"),
    ([LINES[0], b'{"now_s":1,"event":7}\n'], "line 2 holds no event"),
    ([LINES[0], b'{"now_s":1,"event":{"type":"Submit","prompt_ids":-1}}\n'], "line 2 holds no event"),
    ([b"[" * 100_000 + b"\n"], "line 1 is not JSON"),
    ([LINES[0], b'{"now_s":1,"event":' + b'{"a":' * 900 + b"1" + b"}" * 901 + b"\n"], "line 2 holds no event: RecursionError"),
    ([LINES[0], b'{"now_s":"nan","event":{"type":"Tick"},"effects":[]}\n'], "line 2 holds no event: ValueError('now_s"),
    ([LINES[0], b'{"now_s":1' + b"0" * 400 + b',"event":{"type":"Tick"},"effects":[]}\n'], "line 2 holds no event: Overfl"),
    ([LINES[0], b'{"now_s":1,"event":{"prompt_ids":100000000000}}\n'], "line 2 holds no event: ValueError('a count must"),
    ([LINES[0], b'{"now_s":1,"event":{"prompt_ids":-1}}\n'], "line 2 holds no event: ValueError('a count must"),
    ([LINES[0], b'{"now_s":1,"event":{"type":"Tick"}}\n'], "line 2 must have either a list of effects or an error"),
    ([LINES[0], b'{"now_s":1,"event":{"type":"Tick"},"effects":[1]}\n'], "line 2 must have either"),
    ([LINES[0], b'{"now_s":1,"event":{"type":"Tick"},"effects":[],"raised":{}}\n'], "line 2 must have either"),
]


@pytest.mark.parametrize(("lines", "says"), BAD, ids=[says for _, says in BAD])
def test_what_is_no_recording_is_a_typed_error(tmp_path: Path, lines: list[bytes], says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replay(lines)
    assert caught.value.field == "recording"
    shown = run_replay(tmp_path / "file", lines)
    assert shown.exit_code == 1
    assert shown.stderr.startswith(f"error: recording: {says}")
    assert len(shown.stderr.splitlines()) == 1


def test_a_policy_that_is_code_is_not_imported_unless_asked_for(tmp_path: Path) -> None:
    """A recording comes from elsewhere: it must not choose what is run here."""
    own = [LINES[0].replace(b'"prefill_policy":"prefix_aware"', b'"prefill_policy":"antigravity:fly"'), *LINES[1:]]
    shown = run_replay(tmp_path / "file", own)
    assert shown.exit_code == 1
    assert "names the policy 'antigravity:fly', which --own-policies would import" in shown.stderr
    assert "antigravity" not in sys.modules
    known = [LINES[0].replace(b'"prefill_policy":"prefix_aware"', b'"prefill_policy":"router.core.policy:least_loaded"')]
    assert run_replay(tmp_path / "file", [*known, *LINES[1:]], "--own-policies").exit_code == 0


def test_an_unknown_request_is_a_typed_error(tmp_path: Path) -> None:
    shown = run_replay(tmp_path / "file", LINES, "--request", "nobody")
    assert (shown.exit_code, shown.stderr) == (1, "error: request_id: the recording has no request 'nobody'\n")


def record(path: Path, **config: object) -> Recorder:
    return Recorder(RouterConfig(record_file=str(path), **config), FINGERPRINT)  # type: ignore[arg-type]


def test_a_recorder_writes_what_replays_and_only_the_owner_reads_it(tmp_path: Path) -> None:
    recorder = record(tmp_path / "file")
    for _ in range(100):
        recorder.note(1.5, ev.Tick(), [])
    recorder.close()
    recorder.close()
    result = replay((tmp_path / "file").read_bytes().splitlines(keepends=True))
    assert (result.events, result.end, result.difference) == (100, "the router stopped", None)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert b'record_file":null' in (tmp_path / "file").read_bytes()


def test_a_file_that_exists_is_kept_and_a_folder_that_does_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"the router before")
    recorder = record(tmp_path / "file")
    recorder.close()
    assert (tmp_path / "file").read_bytes() == b"the router before"
    assert recorder.path == str(tmp_path / "file.2")
    with pytest.raises(ConfigError, match=r"router\.record_file: cannot create .*No such file"):
        record(tmp_path / "no" / "file")


@pytest.mark.parametrize("name", ["", ".", "/", "a\0b"])
def test_a_folder_is_no_file_to_record_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number was put behind the name of the folder, and the recording went into the file .2 or beside the folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^router\.record_file: "):
        Recorder(RouterConfig(record_file=name), FINGERPRINT).close()
    assert not list(tmp_path.iterdir())


def test_a_full_file_ends_with_the_reason_and_replays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 10_000
    monkeypatch.setattr("router.recording.recorder.MAX_BYTES", limit)
    recorder = record(tmp_path / "file")
    for _ in range(1000):
        recorder.note(1.5, ev.Tick(), [])
    recorder.close()
    content = (tmp_path / "file").read_bytes()
    assert limit - END_BYTES - 100 < len(content) <= limit
    assert replay(content.splitlines(keepends=True)).end == "the file has 10000 bytes, as many as a recording may have"
    assert "has stopped: the file has 10000 bytes" in caplog.text


def test_a_slow_disk_stops_the_recording_and_never_the_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left out in between: what is in the file is whole up to its last line."""
    monkeypatch.setattr(recorder_module, "MAX_QUEUED", 10)
    gate = threading.Event()
    slow = Transcript.line

    def held(self: Transcript, now_s: float, event: ev.Event, outcome: object) -> bytes:
        gate.wait(60)
        return slow(self, now_s, event, outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(Transcript, "line", held)
    recorder = record(tmp_path / "file")
    for number in range(100):
        recorder.note(float(number), ev.Tick(), [])
    gate.set()
    recorder.close()
    result = replay((tmp_path / "file").read_bytes().splitlines(keepends=True))
    assert result.end == "10 events waited to be written"
    assert result.events in (10, 11)
    recorder.note(1.0, ev.Tick(), [])  # is dropped


def test_a_disk_that_fails_costs_the_recording_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise OSError("no space")

    monkeypatch.setattr(Transcript, "line", fails)
    recorder = record(tmp_path / "file")
    recorder.note(1.0, ev.Tick(), [])
    recorder.close()
    recorder.note(1.0, ev.Tick(), [])
    assert not recorder._thread.is_alive()
