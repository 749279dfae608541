"""Role flips of real processes under load: every output is the one of an undisturbed run, and no request fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from real_service import BOUND_S, GREEDY, QUICK_BEATS, tiny

from pdserve.cli import main
from pdserve.client import AdminClient, CallFailed
from pdserve.core.worker import Role
from pdserve.rpc.v1 import common_pb2
from pdserve_bench.layout import Layout
from pdserve_bench.search.reshape import homes_of
from pdserve_bench.search.shaper import AdminPort, Shaper
from testkit.client import Answer, generate_all, request
from testkit.load import Load
from testkit.processes import ProcessCluster
from testkit.told_worker import Hold

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
REQUESTS = 12
ROUNDS = 8  # as many as take longer than two flips
HELD = 160  # tokens: every request passes it, in its prompt or in its output

pytestmark = pytest.mark.cluster


class Service:
    """Two pairs of processes, and the answers of an undisturbed run."""

    def __init__(self, cluster: ProcessCluster) -> None:
        rng = random.Random(38)
        self.cluster = cluster
        prompts = [[rng.randrange(250) for _ in range(rng.randrange(20, 300))] for _ in range(REQUESTS)]
        sampling = [GREEDY, {"temperature": 1.0, "seed": 5, "ignore_eos": True}]
        self.messages = [request(prompt, max_tokens=150, **sampling[n % 2]) for n, prompt in enumerate(prompts)]
        self.expected: list[Answer] = generate_all(cluster.grpc, self.messages)

    def hello(self, worker_id: str) -> common_pb2.WorkerHello:
        (found,) = [w.hello for w in self.cluster.state().workers if w.hello.worker_id == worker_id]
        return found

    def streaming(self) -> Load:
        return Load(self.cluster.grpc, self.messages * ROUNDS, concurrency=8)

    def under_way(self, load: Load, done: int = 2) -> None:
        """Some requests have ended, and others stream."""
        load.until(lambda outcomes: sum(o.done for o in outcomes) >= done)

    def busy(self, worker_id: str) -> None:
        """It has a request, which cannot end while the hold is set."""
        self.cluster.wait_state(
            lambda state: any(w.hello.worker_id == worker_id and w.requests_placed for w in state.workers), BOUND_S
        )

    def all_equal(self, load: Load) -> None:
        outcomes = load.finish()
        assert [outcome.reason or outcome.status for outcome in outcomes if not outcome.ok] == []
        assert [o.answer.ids for o in outcomes] == [answer.ids for answer in self.expected] * ROUNDS

    def ready(self, worker_id: str, role: common_pb2.Role) -> None:
        self.cluster.wait_state(
            lambda state: any(w.ready and (w.hello.worker_id, w.hello.role) == (worker_id, role) for w in state.workers),
            BOUND_S,
        )

    def flip(self, *arguments: str) -> Result:
        return CliRunner().invoke(main, ["flip", *arguments, "--address", self.cluster.admin], catch_exceptions=False)


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="module")
def shared(hold: Hold) -> Iterator[Service]:
    engine = tiny(dtype="bfloat16", max_num_batched_tokens=32, enable_prefix_caching=True, max_model_len=512)
    places = hold.places("prefill-0", "prefill-1", "decode-0", "decode-1")
    with ProcessCluster(engine, prefill=2, decode=2, worker=QUICK_BEATS, places=places) as cluster:
        yield Service(cluster)


@pytest.fixture
def service(shared: Service) -> Service:
    shared.cluster.heal()
    return shared


def test_a_worker_changes_its_pool_and_back_under_load(service: Service) -> None:
    """(1) A prefill worker becomes a decode worker and (2) again a prefill worker, while requests stream. (3) The command shows
    the same process, and all outputs are right."""
    before = service.hello("prefill-0")
    with service.streaming() as load:
        service.under_way(load)
        there = service.flip("prefill-0", "--to", "decode")
        service.ready("prefill-0", DECODE)
        middle = service.hello("prefill-0")
        back = service.flip("prefill-0")
        service.all_equal(load)
    after = service.hello("prefill-0")
    assert (before.role, middle.role, after.role) == (PREFILL, DECODE, PREFILL)
    assert (there.exit_code, back.exit_code) == (0, 0), (there.output, back.output)
    proof = f"prefill-0 is a decode worker now: same process (pid {before.pid}), incarnation {before.incarnation:016x}"[:-8]
    assert there.stdout.splitlines()[-1].startswith(proof)
    assert there.stdout.rstrip().endswith(f"weights kept (flip {before.flips + 1} of this process)")
    assert back.stdout.rstrip().endswith(f"weights kept (flip {before.flips + 2} of this process)")
    assert service.cluster.processes["prefill-0"].popen.pid == after.pid


@pytest.mark.slow
def test_a_decode_worker_with_streams_changes_its_pool(service: Service) -> None:
    with service.streaming() as load:
        service.under_way(load)
        assert service.flip("decode-0").exit_code == 0
        service.ready("decode-0", PREFILL)
        again = generate_all(service.cluster.grpc, service.messages[:4])
        assert [answer.ids for answer in again] == [answer.ids for answer in service.expected[:4]]
        service.all_equal(load)
    assert service.flip("decode-0").exit_code == 0
    service.ready("decode-0", DECODE)


@pytest.mark.slow
def test_a_worker_that_is_killed_in_its_flip_comes_back_in_its_first_role(service: Service, hold: Hold) -> None:
    """(1) A decode worker drains for its flip. (2) SIGKILL. (3) Its streams go on elsewhere, and the flip is told as a loss."""
    with AdminClient(service.cluster.admin) as client, hold.at(HELD), service.streaming() as load:
        service.busy("decode-1")
        said = iter(client.flip("decode-1", PREFILL, timeout_s=BOUND_S))
        next(said)
        service.cluster.processes["decode-1"].kill()
        hold.release()
        service.cluster.start_worker("decode-1")
        with pytest.raises(CallFailed, match="it was started anew"):
            for _ in said:
                pass
        service.all_equal(load)
    service.ready("decode-1", DECODE)


@pytest.mark.slow
def test_a_search_reshapes_the_cluster_and_brings_it_back(service: Service) -> None:
    """(1) All workers become colocated, with fewer sequences. (2) Their outputs are right. (3) Three prefill workers and one
    decode worker serve as well. (4) Roles and limits come back."""

    async def story() -> None:
        with AdminClient(service.cluster.admin) as client:
            port = AdminPort(client)
            shaper, homes = Shaper(port, timeout_s=BOUND_S), homes_of(await port.look())
            try:
                for layout in (Layout(0, 4, 32, 3), Layout(3, 1, 32, 8)):
                    await shaper.shape(layout)
                    now = homes_of(await port.look()).values()
                    assert sum(one.role is Role.PREFILL for one in now) == layout.prefill
                    assert {one.max_num_seqs for one in now if one.role is Role.DECODE} == {layout.max_num_seqs}
                    answers = await asyncio.to_thread(generate_all, service.cluster.grpc, service.messages)
                    assert [answer.ids for answer in answers] == [answer.ids for answer in service.expected]
            finally:
                await shaper.restore()
            assert homes_of(await port.look()) == homes

    asyncio.run(story())


@pytest.mark.slow  # a short test of the router has the same of a scripted cluster: tests/router/test_flips.py
def test_flips_that_cannot_be_are_refused_by_name(service: Service, hold: Hold) -> None:
    """(1) The same role, (2) a second flip, and (3) a flip of a draining worker are refused, and (4) a drain ends a flip."""
    cluster = service.cluster
    assert "has this role already" in service.flip("decode-0", "--to", "decode").stderr
    assert "is not linked to this router" in service.flip("moon").stderr
    with AdminClient(cluster.admin) as client, hold.at(HELD), service.streaming() as load:
        service.busy("decode-0")
        first = client.flip("decode-0", PREFILL)
        next(iter(first))
        with pytest.raises(CallFailed, match="drains already"):
            next(iter(client.flip("decode-0", PREFILL)))
        with pytest.raises(CallFailed, match="the last decode worker"):
            next(iter(client.flip("decode-1", PREFILL)))
        draining = iter(client.drain("decode-0", force=True))
        next(draining)
        hold.release()
        assert list(draining)[-1].done
        assert cluster.processes["decode-0"].popen.wait(BOUND_S) == 0
        first.cancel()
        service.all_equal(load)


@pytest.mark.slow
def test_a_router_that_restarts_in_a_flip_meets_the_worker_in_one_of_its_lives(service: Service) -> None:
    """(1) A worker drains for its flip. (2) The router is killed and started again. (3) The worker joins in its new role."""
    cluster = service.cluster
    with AdminClient(cluster.admin) as client, service.streaming() as load:
        service.under_way(load)
        next(iter(client.flip("prefill-1", DECODE)))
        cluster.wait_state(lambda _: "prefill-1 changes its role" in cluster.processes["prefill-1"].log(), BOUND_S)
        cluster.processes["router"].kill()
        cluster.start_router()
        load.until(lambda outcomes: all(outcome.done for outcome in outcomes))
    service.ready("prefill-1", DECODE)
    again = generate_all(cluster.grpc, service.messages[:4])
    assert [answer.ids for answer in again] == [answer.ids for answer in service.expected[:4]]
