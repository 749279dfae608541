"""Links are held under more load than the cores carry, and the soak that says so can fail."""

from __future__ import annotations

import signal
import time

import pytest

from bench.soak.links import DOCUMENT, END, START_TIMEOUT_S, LinkedCluster, Seen, placed, soak
from pdserve.config import RouterConfig
from testkit.light_worker import HELD_UP

LINKS = 50
STREAMS = 50
MINUTES = 20 / 60
HEARTBEAT_LOST_S = RouterConfig().heartbeat_lost_s


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
def test_load_ends_no_link_and_a_process_that_stands_still_loses_its_own() -> None:
    """The second part shows that the soak sees a link that ends."""
    cluster = LinkedCluster(LINKS)
    with cluster:
        cluster.wait_whole(START_TIMEOUT_S)
        seen = soak(cluster, MINUTES, STREAMS)
        assert seen.tokens > 0
        assert not seen.lost, cluster.logs()
        stopped = cluster.processes["decode-0"]
        stopped.send(signal.SIGSTOP)
        seen = soak(cluster, MINUTES, STREAMS)
        stopped.send(signal.SIGCONT)
        assert len(seen.lost) == LINKS // 2
        assert all(" decode-0-" in line for line in seen.lost)
        cluster.wait_whole(START_TIMEOUT_S)
        end_s = time.monotonic() + START_TIMEOUT_S
        while HELD_UP not in stopped.log():  # the process tells it when it runs again
            assert time.monotonic() < end_s, "it does not tell that it was held up"
            time.sleep(0.1)
        assert soak(cluster, 0.0, 1).held_up_s > HEARTBEAT_LOST_S
