"""The page that is made from results: its markers, what is written between them, and that it is in step with the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.claims.__main__ import BENCHMARKS, RESULTS, in_step
from bench.claims.claim import Claim, Judgement, Table, Verdict
from bench.claims.document import BadDocument, check_marks, part, write
from bench.claims.figures import Figures
from bench.claims.measured.intensity_plot import Mark, plot
from bench.claims.results import Entry, Results

FOUND = Entry("2026-01-02", "abc1234", "two cores", "a model", False, 1.0, Figures({"times": [2.0, 2.0, 2.0]}))
BEGIN, END = "<!-- claim:one begin -->", "<!-- claim:one end -->"


def judge(found: Figures) -> Judgement:
    """Confirm whatever has enough rounds."""
    return Judgement(Verdict.CONFIRMED, f"Here it is {found.median('times'):g}.")


def table(found: Figures) -> Table:
    """Return one row."""
    return Table(("times", "unit"), ((f"{found.median('times'):g}", "x"),))


CLAIM = Claim("one", "It is twice.", "a paper", "it is twice.", 1.0, lambda *_: Figures(), judge, table)


def test_the_document_of_the_repository_says_what_the_results_say() -> None:
    assert in_step(Results(RESULTS), BENCHMARKS.read_text(encoding="utf-8"))


def test_a_part_names_claim_source_verdict_figures_and_origin() -> None:
    text = part(CLAIM, FOUND)
    for words in (
        "It is twice.",
        "a paper",
        "**Confirmed.**",
        "| 2 | x |",
        "2026-01-02",
        "abc1234",
        "two cores",
        "one compute",
    ):
        assert words in text


def test_quick_or_missing_figures_are_told_as_not_measured() -> None:
    quick = Entry("2026-01-02", "abc1234", "two cores", "a model", True, 1.0, FOUND.figures)
    few = Entry("2026-01-02", "abc1234", "two cores", "a model", False, 1.0, Figures({"times": [2.0]}))
    assert all("**Not measured" in part(CLAIM, entry) for entry in (None, quick, few))
    assert all("Confirmed" not in part(CLAIM, entry) for entry in (None, quick, few))


def test_writing_changes_only_what_is_between_the_markers_and_is_stable() -> None:
    before = f"# Page\n\nprose {{}} \\1\n\n{BEGIN}\nold\n{END}\n\nmore prose\n"
    after = write(before, [CLAIM], {"one": FOUND})
    head, _, rest = after.partition(BEGIN)
    assert (head, rest.partition(END)[2]) == ("# Page\n\nprose {} \\1\n\n", "\n\nmore prose\n")
    assert "old" not in after
    assert write(after, [CLAIM], {"one": FOUND}) == after


@given(st.lists(st.sampled_from([BEGIN, END, "<!-- claim:two begin -->", "<!-- claim:two end -->", "prose"]), max_size=6))
def test_only_one_closed_pair_for_each_claim_is_in_order(lines: list[str]) -> None:
    marks = [line for line in lines if line != "prose"]
    try:
        check_marks("\n".join(lines), ["one"])
    except BadDocument:
        assert marks != [BEGIN, END]
    else:
        assert marks == [BEGIN, END]


def test_a_marker_of_another_form_is_not_passed_over() -> None:
    with pytest.raises(BadDocument, match="another form"):
        check_marks(f"{BEGIN}\n{END}\n text <!-- claim:two begin -->", ["one"])


def test_a_document_without_a_pair_for_a_claim_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match="one"):
        write("# Page\n", [CLAIM], {})


def test_the_roofline_is_drawn_for_light_and_for_dark_pages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="drawing needs an optional dependency")
    plot(
        tmp_path / "roofline.png",
        24e9,
        202e9,
        [Mark("prefill of 512", 420.0, 200e9, True), Mark("decode of 1", 1.0, 2e10, False)],
    )
    light, dark = ((tmp_path / name).read_bytes() for name in ("roofline.png", "roofline-dark.png"))
    assert light[:4] == dark[:4] == b"\x89PNG"
    assert light != dark
