"""The adoption of the router that an earlier `pdserve up` left, or its replacement. Pure."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Final

import pdserve
from pdserve.cluster.record import RouterFacts
from pdserve.cluster.router.ports import NAMES, at_ports, hosts_of, ports_of
from pdserve.config import RouterConfig, RouterProcessConfig, dump
from pdserve.core.errors import ConfigError

ANSWER_S: Final = 10.0  # a router on a loaded machine; it is asked again until then


class AdoptionChoice(Enum):
    """The ways to get a router that serves with the settings of now."""

    START = "start"  # none runs
    ADOPT = "adopt"
    REPLACE = "replace"  # it serves with other settings: its streams end first, then another one starts
    KILL = "kill"  # it runs and does not answer


def settings_digest(settings: RouterProcessConfig) -> str:
    """Return the digest of a router's settings as they were given, the secret left out, and of the version of its code."""
    text = "\n".join((pdserve.__version__, dump(settings.router), dump(settings.engine)))
    return hashlib.sha256(text.encode()).hexdigest()


def choose(recorded: RouterFacts | None, *, alive: bool, answers: bool, digest: str) -> AdoptionChoice:
    """Choose from what is recorded, whether that process runs, whether it answers with our secret, and our settings' digest."""
    if recorded is None or not alive:
        return AdoptionChoice.START
    if not answers:
        return AdoptionChoice.KILL
    return AdoptionChoice.ADOPT if recorded.settings_digest == digest else AdoptionChoice.REPLACE


def at_recorded(router: RouterConfig, recorded: RouterFacts) -> RouterConfig:
    """Return the settings with the recorded ports where any free port was asked for, so that clients find what they know.

    The workers that run dial the recorded address of the link, so another one is refused. Raises `ConfigError`.
    """
    if not recorded.link:  # it never became ready, so nobody knows its addresses
        return router
    known = {name: getattr(recorded, name).rpartition(":") for name in NAMES}
    ports = {name: port or int(known[name][2]) for name, port in ports_of(router).items()}
    made = at_ports(router, ports)
    link = f"{made.advertise_host or hosts_of(made)['link']}:{made.link_port}"
    if link != recorded.link:
        raise ConfigError(
            f"router.link_port: the workers of this cluster dial {recorded.link}, and these settings give {link}; keep the "
            "address, or stop the cluster first with `pdserve down`"
        )
    return made
