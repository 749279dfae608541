"""Links are held under more load than the cores carry, and the soak that says so can fail."""

from __future__ import annotations

import pytest

from bench.soak.links import DOCUMENT, END, START_TIMEOUT_S, LinkedCluster, Seen, placed, soak
from pdserve.core.worker import LINK_VERSIONS, RESUME_LINK_VERSION

LINKS = 50
STREAMS = 50
MINUTES = 20 / 60


def test_a_row_replaces_that_of_as_many_links_and_no_other() -> None:
    page = f"| links | lost |\n|---|---|\n| 2 | 0 |\n| 500 | 7 |\n{END}\nas 20 | did\n"
    assert placed(page, "| 500 | 0 |") == page.replace("| 500 | 7 |", "| 500 | 0 |")
    assert placed(page, "| 50 | 0 |") == page.replace(END, f"| 50 | 0 |\n{END}")


def test_a_row_has_a_cell_for_each_column_of_the_page() -> None:
    head = next(line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| links |"))
    assert Seen(2, 10.0).row().count("|") == head.count("|")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("version", [LINK_VERSIONS.newest, RESUME_LINK_VERSION - 1])
def test_load_ends_no_link_unless_its_signs_of_life_stand_behind_tokens(version: int) -> None:
    """Links of the older version have no beats, and show that the same load ends such links."""
    cluster = LinkedCluster(LINKS, version)
    with cluster:
        cluster.wait_whole(START_TIMEOUT_S)
        seen = soak(cluster, MINUTES, STREAMS)
        assert seen.tokens > 0
        assert bool(seen.lost) is (version < RESUME_LINK_VERSION), cluster.logs()
