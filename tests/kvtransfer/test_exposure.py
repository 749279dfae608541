"""What the transport opens to the network: the interface of the worker's host, and nothing public unless it is allowed."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from transfer_testing import Pool, new_incarnation

from kvtransfer.backends.exposure import NET_DEVICES, Exposure, exposure_of
from kvtransfer.backends.nixl import NixlTransport
from pdserve.core.errors import ConfigError
from pdserve.core.ids import WorkerId

INTERFACES = {
    "lo": [ip_address("127.0.0.1"), ip_address("::1")],
    "eth0": [ip_address("203.0.113.5"), ip_address("10.0.0.5")],
    "ib0": [ip_address("10.1.0.5"), ip_address("fe80::5")],
}
NOWHERE = Path("/nonexistent")


def devices(host: str, *, allow: bool = False, user: str | None = None, rdma: Path = NOWHERE) -> str | None:
    environ = {} if user is None else {NET_DEVICES: user}
    return exposure_of(host, allow_public=allow, environ=environ, interfaces=INTERFACES, rdma_devices=rdma).devices


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.77", "localhost", "::1", "[::1]", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("allow", [False, True])
def test_a_loopback_host_opens_the_loopback_interface(host: str, allow: bool) -> None:
    assert devices(host, allow=allow) == "lo"


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.5", "eth0"), ("203.0.113.5", "eth0"), ("10.1.0.5", "ib0"), ("0.0.0.0", None)]
)
def test_a_public_host_opens_its_own_interface_where_that_is_allowed(host: str, expected: str | None) -> None:
    assert devices(host, allow=True) == expected


@pytest.mark.parametrize("host", ["10.0.0.5", "203.0.113.5", "0.0.0.0", "::", "", "fe80::5"])
def test_a_public_host_is_refused_unless_it_is_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"host {re.escape(host)} is not.*allow_public_bind: true"):
        devices(host)


@pytest.mark.parametrize("user", ["eth0", "lo,eth0", "all", "^eth0", "^lo", "mlx5_0:1", ""])
def test_what_the_user_has_set_is_under_the_same_rule(user: str) -> None:
    with pytest.raises(ConfigError, match=r"UCX_NET_DEVICES=.*allow_public_bind: true"):
        devices("127.0.0.1", user=user)
    assert devices("127.0.0.1", user=user, allow=True) == user


def test_a_loopback_host_stays_private_where_a_public_one_would_be_allowed() -> None:
    for allow in (False, True):
        assert not exposure_of("127.0.0.1", allow_public=allow, environ={}, interfaces=INTERFACES).public
    assert exposure_of("127.0.0.1", allow_public=True, environ={NET_DEVICES: "eth0"}, interfaces=INTERFACES).public
    assert exposure_of("10.0.0.5", allow_public=True, environ={}, interfaces=INTERFACES, rdma_devices=NOWHERE).public


def test_what_the_user_has_set_stays_where_it_is_loopback() -> None:
    assert devices("127.0.0.1", user="lo") == "lo"
    assert devices("10.0.0.5", user="lo", allow=True) == "lo"


@pytest.mark.parametrize("host", ["10.0.0.6", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host {host}"):
        devices(host, allow=True)


def test_an_address_with_a_label_is_its_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SimpleNamespace(family=socket.AF_INET, address="10.0.0.5")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [], "eth0:1": [row]})
    assert exposure_of("10.0.0.5", allow_public=True, environ={}, rdma_devices=NOWHERE).devices == "eth0"


def make_rdma(root: Path, name: str, *, net: Sequence[str] = (), gids: Sequence[str] = ()) -> None:
    for interface in net:
        (root / name / "device" / "net" / interface).mkdir(parents=True)
    names = root / name / "ports" / "1" / "gid_attrs" / "ndevs"
    names.mkdir(parents=True)
    for index, interface in enumerate(gids):
        (names / str(index)).write_text(interface + "\n")


def test_rdma_devices_of_the_interface_are_used_and_others_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The files are as Linux shows them; no RDMA device has been met."""
    make_rdma(tmp_path, "mlx5_0", net=["ib0"])
    make_rdma(tmp_path, "mlx5_1", net=["eth1"], gids=["eth0", "eth0"])
    make_rdma(tmp_path, "mlx5_2", net=["eth2"])
    assert devices("10.1.0.5", allow=True, rdma=tmp_path) == "ib0,mlx5_0:1"
    assert devices("10.0.0.5", allow=True, rdma=tmp_path) == "eth0,mlx5_1:1"
    assert "mlx5_2" in caplog.text
    assert devices("127.0.0.1", rdma=tmp_path) == "lo"


def public_address() -> str:
    """Of this machine, IPv4, on an interface that is up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    rows = [
        row.address for name, own in psutil.net_if_addrs().items() if name in up for row in own if row.family == socket.AF_INET
    ]
    found = [address for address in rows if not ip_address(address).is_loopback]
    if not found:
        pytest.skip("this machine has no address but loopback")
    return found[0]


def listening() -> set[tuple[str, int]]:
    rows = psutil.Process().net_connections("tcp")
    return {(row.laddr.ip, row.laddr.port) for row in rows if row.status == psutil.CONN_LISTEN}


def opened_by(exposure: Exposure | None) -> set[str]:
    """Addresses at which this process listens because of a transport."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    before = listening()
    transport = NixlTransport(WorkerId("w"), new_incarnation(), [Pool().region], exposure=exposure)
    try:
        return {ip for ip, _ in listening() - before}
    finally:
        transport.close()


@pytest.mark.parametrize("transports", [None, "tcp,self"], ids=["cma", "tcp"])
def test_nixl_opens_no_port_on_other_interfaces(monkeypatch: pytest.MonkeyPatch, transports: str | None) -> None:
    if transports is not None:
        monkeypatch.setenv("UCX_TLS", transports)
    monkeypatch.delenv(NET_DEVICES, raising=False)
    assert opened_by(None) == {"127.0.0.1"}
    assert NET_DEVICES not in os.environ, "what is set here is the user's"


def test_nixl_listens_at_the_host_and_nowhere_else() -> None:
    host = public_address()
    assert opened_by(exposure_of(host, allow_public=True)) == {host}


def test_a_transport_that_listens_elsewhere_all_the_same_does_not_start() -> None:
    """As another version of UCX, or a configuration file of its own, may have it: what counts is where it listens."""
    public_address()
    before = listening()
    with pytest.raises(ConfigError, match=r"the transport listens at .* although host 127"):
        opened_by(Exposure("127.0.0.1", frozenset({ip_address("127.0.0.1")}), None, public=False))
    assert listening() == before, "and it is closed"


def test_an_address_that_ucx_does_not_take_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """UCX listens at the first address of an interface, which need not be the host's."""
    name = public_address()
    exposure = exposure_of(name, allow_public=True)
    opened_by(Exposure("10.9.9.9", frozenset({ip_address("10.9.9.9")}), exposure.devices, public=True))
    assert f"listens at {name}, which is not host 10.9.9.9" in caplog.text
