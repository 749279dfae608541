"""A network namespace beside ours, joined to it by links that can be slowed, made lossy, cut and healed.

Needs root, `ip` and `tc`; `why_not` says what is missing. Loss needs `nft`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from types import TracebackType
from typing import Final

COMMAND_TIMEOUT_S: Final = 20.0
RATE_BURST: Final = "32kb"  # a bucket holds at least one packet of veth's largest size after segmentation
QUEUE: Final = "400ms"  # what waits longer is dropped, as by a router's full buffer


def run(*command: str) -> None:
    """Raises subprocess.CalledProcessError, with the command's own words in its output."""
    subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def why_not() -> str | None:
    """Why no namespace can be made here; None when one can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "not root"
    name = f"pdprobe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
    except subprocess.SubprocessError as exc:
        return f"no network namespaces: {exc}"
    return None


@dataclass(frozen=True, slots=True)
class Wire:
    """One veth pair: `here` in our namespace at `our_ip`, `there` in the other at `their_ip`."""

    namespace: str
    here: str
    there: str
    our_ip: str
    their_ip: str

    def lay(self) -> None:
        run("ip", "link", "add", self.here, "type", "veth", "peer", "name", self.there, "netns", self.namespace)
        run("ip", "addr", "add", f"{self.our_ip}/30", "dev", self.here)
        run("ip", "-n", self.namespace, "addr", "add", f"{self.their_ip}/30", "dev", self.there)
        run("ip", "link", "set", self.here, "up")
        self.heal()

    def cut(self) -> None:
        """Nothing passes, in either direction, and nobody is told."""
        run("ip", "-n", self.namespace, "link", "set", self.there, "down")

    def heal(self) -> None:
        run("ip", "-n", self.namespace, "link", "set", self.there, "up")

    def shape(self, rate: str) -> None:
        """What the other side sends is limited to `rate`, as `tc` writes it: "8mbit"."""
        tbf = ("tbf", "rate", rate, "burst", RATE_BURST, "latency", QUEUE)
        run("tc", "-n", self.namespace, "qdisc", "replace", "dev", self.there, "root", *tbf)

    def unshape(self) -> None:
        run("tc", "-n", self.namespace, "qdisc", "del", "dev", self.there, "root")

    def lose(self, percent: int) -> None:
        """So many of a hundred packets that reach the other side are lost there. Needs `nft`."""
        nft = ("ip", "netns", "exec", self.namespace, "nft")
        run(*nft, "add", "table", "inet", "loss")
        run(*nft, "add", "chain", "inet", "loss", "in", "{ type filter hook input priority 0; }")
        run(
            *nft,
            "add",
            "rule",
            "inet",
            "loss",
            "in",
            "iifname",
            self.there,
            "numgen",
            "random",
            "mod",
            "100",
            "<",
            str(percent),
            "drop",
        )

    def lose_nothing(self) -> None:
        run("ip", "netns", "exec", self.namespace, "nft", "delete", "table", "inet", "loss")


class Neighbour:
    """A namespace with two wires to ours: `control` for the router, `data` for KV. Use as a context manager."""

    def __init__(self) -> None:
        number = os.getpid() % 100_000
        self.name = f"pd{number}"
        self.control = Wire(self.name, f"pdc{number}", f"pdC{number}", "10.213.77.1", "10.213.77.2")
        self.data = Wire(self.name, f"pdd{number}", f"pdD{number}", "10.213.78.1", "10.213.78.2")

    def __enter__(self) -> Neighbour:
        run("ip", "netns", "add", self.name)
        try:
            run("ip", "-n", self.name, "link", "set", "lo", "up")
            self.control.lay()
            self.data.lay()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        """Deleting our ends deletes the others; a namespace alone would outlive what still runs in it."""
        for wire in (self.control, self.data):
            subprocess.run(("ip", "link", "del", wire.here), check=False, timeout=COMMAND_TIMEOUT_S, stderr=subprocess.DEVNULL)
        run("ip", "netns", "del", self.name)

    @property
    def command(self) -> tuple[str, ...]:
        """Stands before what is to run there, and becomes it."""
        return ("ip", "netns", "exec", self.name)
