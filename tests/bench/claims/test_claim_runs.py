"""A run over claims: it resumes, keeps to its budget, and survives a claim that fails. The clock is virtual."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.claims.__main__ import main
from bench.claims.claim import Claim, Judgement, Table, Verdict
from bench.claims.figures import Figures
from bench.claims.results import BadResults, Results
from bench.claims.run import Identity, Outcome, run
from bench.claims.setup import Rounds, Setup

HERE = Identity("abc1234", "a machine", "m")


class World:
    """A virtual clock, and claims that take time by it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.rounds: dict[str, int] = {}

    def claim(self, name: str, minutes: float = 1.0, *, round_s: float = 10.0, fails: bool = False) -> Claim:
        """Return a claim whose rounds take `round_s` seconds each, five at most."""

        def measure(setup: Setup, rounds: Rounds) -> Figures:
            found = Figures()
            for _ in rounds.of(5):
                self.now_s += round_s
                found.add("times", 2.0)
                if fails:
                    raise OSError("no such machine")
            self.rounds[name] = len(found.samples["times"])
            return found

        def judge(found: Figures) -> Judgement:
            return Judgement(Verdict.CONFIRMED, f"It is {found.median('times')}.")

        return Claim(name, "It is so.", "a source", "a rule.", minutes, measure, judge, lambda _: Table(("a",), (("b",),)))

    def run(
        self, claims: list[Claim], path: Path, *, minutes: float = 60, identity: Identity = HERE, again: bool = False
    ) -> Outcome:
        """Run the claims with results in a file."""
        setup = Setup("tiny")
        return run(claims, setup, Results(path), identity, budget_s=60 * minutes, again=again, clock=lambda: self.now_s)


def test_a_run_resumes_where_the_last_one_stopped(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "results" / "claims.json"
    one, other = world.claim("one"), world.claim("other")
    assert world.run([one], path).measured == ["one"]
    second = world.run([one, other], path)
    assert (second.kept, second.measured) == (["one"], ["other"])
    assert set(Results(path).entries) == {"one", "other"}
    assert Results(path).entries["one"].figures.samples == {"times": [2.0] * 5}
    assert world.run([one], path, again=True).measured == ["one"]


@pytest.mark.parametrize("other", [{"commit": "fff0000"}, {"machine": "another"}, {"model": "n"}])
def test_another_commit_machine_or_model_is_measured_again(tmp_path: Path, other: dict[str, str]) -> None:
    world, path = World(), tmp_path / "claims.json"
    world.run([world.claim("one")], path)
    assert world.run([world.claim("one")], path, identity=replace(HERE, **other)).measured == ["one"]


def test_code_that_is_not_committed_is_measured_again(tmp_path: Path) -> None:
    world, path, dirty = World(), tmp_path / "claims.json", replace(HERE, commit="abc1234+")
    world.run([world.claim("one")], path, identity=dirty)
    assert world.run([world.claim("one")], path, identity=dirty).measured == ["one"]


def test_what_does_not_fit_the_budget_is_left_out_and_named(tmp_path: Path) -> None:
    world = World()
    claims = [world.claim("long", 5.0), world.claim("short", 1.0), world.claim("late", 1.0, round_s=20)]
    outcome = world.run(claims, tmp_path / "claims.json", minutes=1.2)
    assert (outcome.measured, outcome.no_time) == (["short"], ["long", "late"])


def test_slow_rounds_end_early_but_never_before_there_is_an_interval(tmp_path: Path) -> None:
    world = World()
    world.run([world.claim("slow", 1.0, round_s=1000)], tmp_path / "claims.json")
    world.run([world.claim("quick", 1.0, round_s=1)], tmp_path / "claims.json")
    assert world.rounds == {"slow": 3, "quick": 5}


def test_a_quick_run_takes_the_fewest_rounds(tmp_path: Path) -> None:
    world = World()
    results = Results(tmp_path / "claims.json")
    run([world.claim("one")], Setup("tiny", quick=True), results, HERE, budget_s=600, clock=lambda: world.now_s)
    assert (world.rounds, results.entries["one"].quick) == ({"one": 3}, True)


def test_a_claim_that_fails_costs_nobody_else(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "claims.json"
    outcome = world.run([world.claim("bad", fails=True), world.claim("good")], path)
    assert (outcome.failed, outcome.measured) == ({"bad": "OSError: no such machine"}, ["good"])
    assert set(Results(path).entries) == {"good"}


def test_a_write_that_is_cut_short_leaves_the_old_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, path = World(), tmp_path / "claims.json"
    world.run([world.claim("one")], path)
    before = path.read_text()
    monkeypatch.setattr("pdserve_bench.report.files.os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        world.run([world.claim("other")], path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2, "claims": {}}', '{"format": 1, "claims": {"one": {"date": "x"}}}'])
def test_a_wrong_file_is_refused_with_advice(tmp_path: Path, text: str) -> None:
    path = tmp_path / "claims.json"
    path.write_text(text)
    with pytest.raises(BadResults, match="--results"):
        Results(path)


def test_quick_figures_are_not_taken_over_into_a_full_run(tmp_path: Path) -> None:
    world, path = World(), tmp_path / "claims.json"
    world.run([world.claim("one")], path)
    results = Results(path)
    results.put("one", replace(results.entries["one"], quick=True))
    assert world.run([world.claim("one")], path).measured == ["one"]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (["--quick"], "--results"),
        (["--quick", "--write-docs"], "run without it"),
        (["--check", "--only", "kv-cache"], "leave out"),
        (["--model", "tiny", "--write-docs"], "default model"),
        (["--budget-minutes", "nan"], "0 or more"),
        (["--only", "nonsense"], "nonsense"),
    ],
)
def test_a_command_line_that_would_ignore_something_is_refused(
    given: list[str], advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["claims", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert advice in capsys.readouterr().err


def test_a_whole_run_is_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """(1) A claim is measured with the tiny model and its verdict printed. (2) A damaged file is refused in one line."""
    path = tmp_path / "claims.json"
    command = ["claims", "--quick", "--model", "tiny", "--only", "decode-batch", "--results", str(path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr("bench.claims.measured.steps.AT_LEAST_S", 0.0)
    assert main() == 0
    assert "decode-batch: " in capsys.readouterr().out
    assert Results(path).entries["decode-batch"].quick
    path.write_text("{")
    assert main() == 1
    assert "delete it" in " ".join(capsys.readouterr().out.split())
