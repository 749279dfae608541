"""Who may administer: whoever is on the router's machine; from elsewhere, who has the cluster's token."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from click.testing import CliRunner

from pdserve.cli import main
from pdserve.client import AdminClient, CallFailed
from pdserve.config import RouterConfig, RouterProcessConfig
from pdserve.core.errors import ConfigError
from pdserve.core.settings.types import is_loopback
from pdserve.core.worker import LINK_VERSIONS
from pdserve.rpc.v1 import admin_pb2, common_pb2, inference_pb2, story_pb2
from router.grpc import admin as grpc_admin
from router.grpc.admin import AdminServer
from testkit.fake_worker import DECODE

from .local_cluster import TOKEN, local_cluster


def test_a_stranger_on_the_clients_port_can_neither_drain_nor_look_at_the_cluster() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            asks = {
                "Drain": inference_pb2.DrainRequest(worker_id="decode-0"),
                "GetClusterState": inference_pb2.GetClusterStateRequest(),
                "SetBudget": admin_pb2.SetBudgetRequest(worker_ids=["decode-0"], max_num_batched_tokens=64),
                "ExplainRequest": story_pb2.ExplainRequestRequest(request_id="any"),
            }
            for service in ("Inference", "Admin"):
                for method, request in asks.items():
                    call = cluster.channel.unary_unary(
                        f"/pdserve.rpc.v1.{service}/{method}", request_serializer=type(request).SerializeToString
                    )
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call(request)
                    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert not any(worker.draining for worker in cluster.service.snapshot().workers)

    asyncio.run(story())


def test_off_loopback_each_call_needs_the_clusters_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is bound to loopback here all the same: a test is no reason to listen for others."""
    monkeypatch.setattr(grpc_admin, "is_loopback", lambda host: False)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            server = AdminServer(cluster.service, TOKEN, 32)
            await server.start("127.0.0.1", 0)
            try:
                await asyncio.to_thread(_ask, f"127.0.0.1:{server.port}")
                assert not any(worker.budget for worker in cluster.workers)
                await cluster.decode.wait_for(lambda: cluster.decode.draining)
            finally:
                await server.close()

    asyncio.run(story())


def _ask(address: str) -> None:
    for token in ("", "wrong"):
        with AdminClient(address, token) as stranger:
            for ask in (
                stranger.cluster_state,
                lambda: list(stranger.drain("prefill-0")),
                lambda: stranger.explain("any"),
                lambda: stranger.set_budget((), common_pb2.ROLE_DECODE, 64),
            ):
                with pytest.raises(CallFailed) as caught:
                    ask()
                assert caught.value.status is grpc.StatusCode.UNAUTHENTICATED
                assert "set PDSERVE_CLUSTER_TOKEN" in str(caught.value)  # "does not match" named nothing that one could change
    with AdminClient(address, TOKEN) as operator:
        assert not any(worker.draining for worker in operator.cluster_state().workers)
        with pytest.raises(CallFailed, match=r"decode-0 is the last decode worker that serves: .* --force"):
            next(iter(operator.drain("decode-0")))
        assert not any(worker.draining for worker in operator.cluster_state().workers)
        call = operator.drain("decode-0", force=True)
        next(iter(call))
        call.cancel()


def test_a_budget_goes_to_workers_or_pools_and_to_all_of_them_or_none() -> None:
    async def story() -> None:
        newest = {"link_version": LINK_VERSIONS.newest}
        async with asyncio.timeout(60), local_cluster(worker=lambda: newest) as cluster:
            more = cluster.worker(DECODE, max_num_batched_tokens=128)
            await more.start()
            await asyncio.to_thread(_set_budgets, f"127.0.0.1:{cluster.admin_port}")
            await cluster.decode.wait_for(lambda: cluster.decode.budget == 100)
            await more.wait_for(lambda: more.budget == 100)
            await cluster.prefill.wait_for(lambda: cluster.prefill.budget == 500)
            assert sum(worker.commands.count("set_budget") for worker in cluster.workers) == 5
            await cluster.prefill.wait_for(lambda: cluster.prefill.seqs == 3)
            assert cluster.prefill.budget == 500

    asyncio.run(story())


def _set_budgets(address: str) -> None:
    decode, neither = common_pb2.ROLE_DECODE, common_pb2.ROLE_UNSPECIFIED
    refusals = {
        ((), decode, 200): "max_num_batched_tokens: 200 is out of range; worker 'decode-1' takes from .* to 128",
        ((), decode, 1): "max_num_batched_tokens: 1 is out of range",
        (("decode-0", "moon"), neither, 100): "worker_id: worker 'moon' is not linked",
        ((), neither, 100): "give either worker_ids or role",
        (("decode-0",), decode, 100): "give either worker_ids or role",
    }
    with AdminClient(address) as operator:
        for (worker_ids, role, tokens), said in refusals.items():
            with pytest.raises(CallFailed, match=said):
                operator.set_budget(worker_ids, role, tokens)
        assert sorted(operator.set_budget((), decode, 100)) == ["decode-0", "decode-1"]
        assert operator.set_budget(("prefill-0", "prefill-0"), neither, 500) == ["prefill-0"]
    told = CliRunner().invoke(main, ["set-budget", "100", "--worker", "decode-0", "--address", address])
    assert (told.exit_code, told.stdout) == (0, "decode-0: at most 100 tokens a step until the next restart\n")
    refused = CliRunner().invoke(main, ["set-budget", "999", "--pool", "prefill", "--address", address])
    assert refused.exit_code == 1
    assert "max_num_batched_tokens: 999 is out of range; worker 'prefill-0'" in refused.stderr
    for arguments in (
        ("100",),
        ("100", "--worker", "decode-0", "--pool", "decode"),
        ("--pool", "decode"),
        ("0", "--pool", "decode"),
    ):
        assert CliRunner().invoke(main, ["set-budget", *arguments]).exit_code == 2
    fewer = CliRunner().invoke(main, ["set-budget", "--max-num-seqs", "3", "--pool", "prefill", "--address", address])
    assert (fewer.exit_code, fewer.stdout) == (0, "prefill-0: at most 3 sequences until the next restart\n")
    both = CliRunner().invoke(
        main, ["set-budget", "400", "--max-num-seqs", "65", "--worker", "prefill-0", "--address", address]
    )
    assert both.exit_code == 1
    assert "max_num_seqs: 65 is out of range; worker 'prefill-0' takes from 1 to 64" in both.stderr


def test_an_admin_port_for_others_needs_a_token_and_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"router\.admin_host .* cluster_token"):
        RouterProcessConfig(RouterConfig(admin_host="0.0.0.0"))
    RouterProcessConfig(RouterConfig(admin_host="0.0.0.0"), cluster_token="t")
    with pytest.raises(ConfigError, match=r"router\.grpc_port and router\.admin_port are both 50051"):
        RouterConfig(admin_port=50051)
    assert RouterConfig(grpc_port=0).admin_port_or_default == 0
    assert RouterConfig().admin_port_or_default == 50053


@pytest.mark.parametrize(
    ("host", "only_here"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("node-7", False)],
)  # fmt: skip
def test_which_hosts_only_this_machine_reaches(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here
