"""Pages of metrics: one rendering a second for all who ask, in another thread, and counters of pools that never fall."""

from __future__ import annotations

import asyncio
import dataclasses
import threading

from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.speculation import NO_COUNTS
from pdserve.core.worker import Role
from pdserve.observe.metrics import Metrics
from pdserve.observe.metrics_pages import MAX_AGE_S, MetricsPages
from pdserve.observe.snapshot import ClusterSnapshot
from tests.observe.test_metrics import EMPTY, HELLO, LOAD, WORKER


class Rendering:
    """Counts what was rendered, and holds it while `gate` is clear."""

    def __init__(self) -> None:
        self.calls: list[bool] = []
        self.threads: set[int] = set()
        self.snapshots = 0
        self.gate = threading.Event()
        self.gate.set()
        self.now_s = 100.0

    def snapshot(self) -> ClusterSnapshot:
        self.snapshots += 1
        return EMPTY

    def render(self, cluster: ClusterSnapshot, per_worker: bool) -> bytes:
        assert self.gate.wait(60)
        self.calls.append(per_worker)
        self.threads.add(threading.get_ident())
        return b"%d" % len(self.calls)


def test_all_who_ask_within_a_second_share_one_page_that_another_thread_renders() -> None:
    async def run() -> None:
        rendering = Rendering()
        pages = MetricsPages(rendering.snapshot, rendering.render, lambda: rendering.now_s)
        rendering.gate.clear()
        asked = [asyncio.create_task(pages.page(per_worker=False)) for _ in range(50)]
        await asyncio.sleep(0)  # all of them have asked
        asked[0].cancel()
        await asyncio.sleep(0)
        rendering.gate.set()  # the loop went on while the page was held
        assert {await one for one in asked[1:]} == {b"1"}, "the caller that left did not end it for the others"
        assert await pages.page(per_worker=False) == b"1"
        rendering.now_s += MAX_AGE_S
        assert await pages.page(per_worker=False) == b"2"
        assert await pages.page(per_worker=True) == b"3", "every worker is another page"
        assert (rendering.calls, rendering.snapshots) == ([False, False, True], 3)
        assert threading.get_ident() not in rendering.threads
        pages.close()

    asyncio.run(run())


def test_a_page_that_could_not_be_rendered_is_tried_again() -> None:
    async def run() -> None:
        bodies = [ZeroDivisionError(), b"page"]

        def render(cluster: ClusterSnapshot, per_worker: bool) -> bytes:
            body = bodies.pop(0)
            if isinstance(body, Exception):
                raise body
            return body

        pages = MetricsPages(lambda: EMPTY, render)
        try:
            await pages.page(per_worker=False)
            raise AssertionError("the bug is told")
        except ZeroDivisionError:
            pass
        assert await pages.page(per_worker=False) == b"page"
        pages.close()

    asyncio.run(run())


def page_of(metrics: Metrics, *workers: object, per_worker: bool = False) -> list[str]:
    cluster = dataclasses.replace(EMPTY, workers=workers)
    return metrics.page(cluster, per_worker=per_worker).decode().splitlines()


def test_a_counter_of_a_pool_does_not_fall_when_a_worker_leaves_or_starts_anew() -> None:
    """Prometheus takes a fall for a restart, and the whole sum after it for new work."""
    metrics = Metrics(lambda: EMPTY)

    def worker(name: str, incarnation: int, drawn: int) -> object:
        hello = dataclasses.replace(HELLO, worker_id=WorkerId(name), incarnation=Incarnation(incarnation))
        return dataclasses.replace(WORKER, hello=hello, load=dataclasses.replace(LOAD, output_tokens=drawn))

    def drawn(*workers: object) -> str:
        (line,) = [x for x in page_of(metrics, *workers) if x.startswith('pdserve_pool_output_tokens_total{role="decode"}')]
        return line.split()[1]

    assert drawn(worker("d", 1, 100), worker("e", 2, 50)) == "150.0"
    assert drawn(worker("d", 1, 130), worker("e", 2, 50)) == "180.0"
    assert drawn(worker("d", 1, 140)) == "190.0", "e has left"
    assert drawn(worker("d", 3, 7)) == "197.0", "d is another process"
    assert drawn() == "197.0"
    assert drawn(worker("d", 1, 150)) == "207.0", "the first d is back, as the same process"
    assert drawn(worker("d", 1, 0)) == "207.0", "it dials again, and has not told anything yet"
    assert drawn(worker("d", 1, 151)) == "208.0"


SLICES = st.lists(st.integers(0, 4), min_size=1, max_size=6)
"""How many of the four drafts of each slice were right."""


@given(
    st.lists(st.tuples(st.sampled_from(["d", "e"]), SLICES, st.sampled_from(["goes on", "starts anew", "leaves"])), max_size=8)
)
def test_drafts_of_a_pool_add_up_over_all_lives_of_its_workers(steps: list[tuple[str, list[int], str]]) -> None:
    """A worker is seen after all that it drafted. Then it may go on, start again as another process, or leave for a while."""
    metrics = Metrics(lambda: EMPTY, "m")
    lives, counts = {"d": 1, "e": 2}, {"d": NO_COUNTS, "e": NO_COUNTS}
    drafted: list[int] = []
    for name, accepted, then in steps:
        drafted += accepted
        for one in accepted:
            counts[name] = counts[name].add(4, one)
        hello = dataclasses.replace(HELLO, worker_id=WorkerId(name), incarnation=Incarnation(lives[name]))
        load = dataclasses.replace(LOAD, speculation=counts[name])
        page = page_of(metrics, dataclasses.replace(WORKER, hello=hello, load=load), per_worker=True)
        found = dict(line.rsplit(" ", 1) for line in page if line.startswith("vllm:"))
        of_pool = '{engine="decode",model_name="m"}'
        assert found[f"vllm:spec_decode_num_drafts_total{of_pool}"] == f"{len(drafted)}.0"
        assert found[f"vllm:spec_decode_num_draft_tokens_total{of_pool}"] == f"{4 * len(drafted)}.0"
        assert found[f"vllm:spec_decode_num_accepted_tokens_total{of_pool}"] == f"{sum(drafted)}.0"
        places = [sum(one > place for one in drafted) for place in range(max(drafted))]
        assert [value for line, value in found.items() if "per_pos_total" in line] == [f"{count}.0" for count in places]
        assert all(f'position="{place}"' in line for place, line in enumerate(x for x in found if "per_pos_total" in x))
        own = f'pdserve_worker_spec_decode_num_drafts_total{{role="decode",worker="{name}"}} {counts[name].num_drafts}.0'
        assert own in page
        if then == "starts anew":
            lives[name], counts[name] = lives[name] + 2, NO_COUNTS
        kept = f"vllm:spec_decode_num_drafts_total{of_pool} {len(drafted)}.0"
        if then == "leaves":
            assert kept in page_of(metrics)
            for told in (None, NO_COUNTS):  # it dials again, and has not told anything yet
                silent = dataclasses.replace(WORKER, hello=hello, load=dataclasses.replace(LOAD, speculation=told))
                assert kept in page_of(metrics, silent)


def test_a_cluster_that_does_not_draft_shows_nothing_of_it() -> None:
    """As in vLLM: a rule over these metrics finds no series, and no zeros that look like bad drafts."""
    assert not [line for line in page_of(Metrics(lambda: EMPTY), WORKER, per_worker=True) if "spec_decode" in line]


def test_a_page_by_pool_does_not_grow_with_the_cluster() -> None:
    workers = [
        dataclasses.replace(
            WORKER,
            hello=dataclasses.replace(
                HELLO, worker_id=WorkerId(f"w{n}"), role=Role.PREFILL if n % 2 else Role.DECODE, incarnation=n
            ),
        )
        for n in range(40)
    ]
    metrics = Metrics(lambda: EMPTY)
    assert len(page_of(metrics, *workers)) == len(page_of(metrics, *workers[:2]))
    assert not any("worker=" in line for line in page_of(metrics, *workers))
    assert sum('worker="w7"' in line for line in page_of(metrics, *workers, per_worker=True)) > 20
    assert 'pdserve_pool_leases_held{role="decode"} 20.0' in page_of(metrics, *workers)
    assert 'pdserve_pool_blocks{role="prefill",state="unaccounted"} 40.0' in page_of(metrics, *workers)
    assert 'pdserve_pool_engine_stalled_seconds{role="decode"} 7.5' in page_of(metrics, *workers)
