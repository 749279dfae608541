"""The exposure of the transport to the network: the interfaces that it opens, and the addresses at which it then listens.

UCX authenticates nobody: whoever reaches its TCP port can end the process with one message, and can write into registered
memory. By default UCX listens on every interface. So the transport opens only the interface of the worker's `host`, and it
opens an interface that is not loopback only if the configuration allows it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from pdserve.core.errors import ConfigError

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Interfaces = Mapping[str, Collection[Address]]
"""The addresses of each network interface, by its name."""

NET_DEVICES: Final = "UCX_NET_DEVICES"
LOOPBACK_HOST: Final = "127.0.0.1"
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
_ADVICE: Final = (
    "whoever reaches it can end this worker and write into its KV. Set allow_public_bind: true only where a firewall or a "
    "network policy lets nobody in but the cluster's own workers (docs/threat-model.md)"
)


@dataclass(frozen=True, slots=True)
class Exposure:
    """The interfaces that the transport of one worker opens. `devices` is the value of UCX_NET_DEVICES; None: every interface.

    `public` True: the transport may listen at an address that is not loopback.
    """

    host: str
    addresses: frozenset[Address]
    devices: str | None
    public: bool

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Make UCX open these interfaces and no others, when it starts inside this context.

        Raises `ConfigError` at the end when this process has begun to listen elsewhere.
        """
        before = _listening()
        with _environment(NET_DEVICES, self.devices):
            yield
        self._check({address for address, _ in _listening() - before})

    def _check(self, opened: Collection[Address]) -> None:
        logger.info("the transport listens at %s", ", ".join(sorted(map(str, opened))) or "no TCP port")
        outside = sorted(str(address) for address in opened if not address.is_loopback)
        if outside and not self.public:
            raise ConfigError(f"the transport listens at {', '.join(outside)} although host {self.host} is loopback: {_ADVICE}")
        if outside and not self.addresses.intersection(opened) and not any(a.is_unspecified for a in self.addresses):
            logger.warning("the transport listens at %s, which is not host %s", ", ".join(outside), self.host)


def exposure_of(
    host: str,
    *,
    allow_public: bool,
    environ: Mapping[str, str] = os.environ,
    interfaces: Interfaces | None = None,
    rdma_devices: Path = _RDMA_DEVICES,
) -> Exposure:
    """Return the exposure of the transport of a worker that binds `host`.

    UCX_NET_DEVICES keeps the value that the user has set; the same rule holds for that value.

    Raises `ConfigError` when an interface is not loopback and `allow_public` is False, or when no interface has the address
    of `host`.
    """
    interfaces = _interfaces() if interfaces is None else interfaces
    addresses = _resolve(host)
    public = not all(address.is_loopback for address in addresses)
    if public and not allow_public:
        raise ConfigError(f"host {host} is not a loopback address: {_ADVICE}")
    chosen = environ.get(NET_DEVICES)
    if chosen is not None:
        wider = not _only_loopback(chosen, interfaces)
        if wider and not allow_public:
            raise ConfigError(f"{NET_DEVICES}={chosen} names more than the loopback interface: {_ADVICE}")
        return Exposure(host, addresses, chosen, public or wider)
    if any(address.is_unspecified for address in addresses):
        return Exposure(host, addresses, None, public)
    names = _carrying(addresses, interfaces)
    if not names:
        raise ConfigError(f"no network interface has the address of host {host}: set host to an address of this machine")
    if not _only_loopback(",".join(names), interfaces):
        names += _rdma_of(names, rdma_devices)
    return Exposure(host, addresses, ",".join(names), public)


def _resolve(host: str) -> frozenset[Address]:
    """Return the addresses of a host. An empty host stands for every interface, as for gRPC. Raises `ConfigError`."""
    try:
        found = socket.getaddrinfo(host.strip("[]") or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(f"host {host} cannot be resolved: {exc.strerror}") from exc
    return frozenset(_address(str(row[4][0])) for row in found)


def _address(text: str) -> Address:
    """Parse an address, without the interface of an IPv6 link-local one. An IPv4 address written as IPv6 becomes IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _carrying(addresses: Collection[Address], interfaces: Interfaces) -> list[str]:
    """Return the interfaces that have one of the addresses. The loopback interface has all of 127.0.0.0/8 but lists one."""
    return [
        name
        for name, own in interfaces.items()
        if any(address in own or (address.is_loopback and _is_loopback(own)) for address in addresses)
    ]


def _only_loopback(devices: str, interfaces: Interfaces) -> bool:
    """Tell whether a value of UCX_NET_DEVICES names only loopback. The value "all" does not, and neither does a value that
    begins with ^ and names the interfaces to leave out."""
    return all(_is_loopback(interfaces.get(name.strip(), ())) for name in devices.split(","))


def _is_loopback(addresses: Collection[Address]) -> bool:
    return any(address.is_loopback for address in addresses)


def _rdma_of(names: Collection[str], root: Path) -> list[str]:
    """Return the RDMA devices of these interfaces, with the names that UCX uses. Without them KV would go over TCP."""
    devices = {name: _net_interfaces(root / name) for name in _entries(root)}
    beside = [name for name, own in devices.items() if not own.intersection(names)]
    if beside:
        logger.warning("RDMA devices %s belong to other interfaces and stay unused: %s names them", beside, NET_DEVICES)
    ours = [name for name in devices if name not in beside]
    return [f"{name}:{port}" for name in ours for port in _entries(root / name / "ports")]


def _net_interfaces(device: Path) -> set[str]:
    """Return the network interfaces of an RDMA device: those of its hardware, and those that its GIDs name, since a bond or a
    VLAN has an interface of its own."""
    found = set(_entries(device / "device" / "net"))
    for file in device.glob("ports/*/gid_attrs/ndevs/*"):
        try:
            found.add(file.read_text().strip())
        except OSError:
            continue  # a GID that is not in use
    return found


def _entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _interfaces() -> Interfaces:
    """Return the addresses of each interface. A label of an address, such as eth0:1, is no interface of its own."""
    found: dict[str, list[Address]] = {}
    for label, rows in psutil.net_if_addrs().items():
        own = found.setdefault(label.partition(":")[0], [])
        own += [_address(row.address) for row in rows if row.family in (socket.AF_INET, socket.AF_INET6)]
    return found


def _listening() -> set[tuple[Address, int]]:
    """Addresses and ports at which this process accepts TCP connections."""
    rows = psutil.Process().net_connections("tcp")
    return {(_address(row.laddr.ip), row.laddr.port) for row in rows if row.status == psutil.CONN_LISTEN}


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for a while. UCX reads its settings when it starts; then the user's value comes back."""
    before = os.environ.get(name)
    try:
        _set(name, value)
        yield
    finally:
        _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
