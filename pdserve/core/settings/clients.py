"""The settings of what clients may ask for, and of what counts as one client.

This file does without `from __future__ import annotations`: the checks read the types, which that import turns into text.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from msgspec import Meta

from pdserve.core.errors import ConfigError
from pdserve.core.settings.chats import ChatConfig
from pdserve.core.settings.types import NonNegativeInt
from pdserve.core.slo import SloClass, classes_of

_ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/@]+")  # a scheme, a host and perhaps a port; no path
_HOST: Final = re.compile(r"\*|[a-z0-9_.-]+")
_HEADER: Final = re.compile(r"header:[A-Za-z0-9][A-Za-z0-9_-]{0,63}")  # a name that HTTP and gRPC both carry


@dataclass(frozen=True, slots=True)
class ClientConfig(ChatConfig):
    """The part of the router's settings that bounds what one client can do to others."""

    # Web pages of these origins, such as https://chat.example, may use the HTTP ports from a browser. "*" allows all pages, and
    # "null" those without an origin, such as files. Clients that are no browsers send no origin, and are not concerned.
    allowed_origins: tuple[str, ...] = ()
    # Where HTTP listens on loopback, a request must name an IP address, localhost or one of these as its host, without a port.
    # "*" allows all names. If set, this holds for other addresses as well.
    allowed_hosts: tuple[str, ...] = ()
    # Classes of requests by name, such as {chat: {ttft_s: 0.4, priority: 10}}. A class has `ttft_s`, `tpot_s`, `priority`,
    # `queue_share`, `urgent`, `client` and `max_deadline_s`. Built-in are default, voice, code, chat and batch; what is
    # not set here stays as it is.
    slo_classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    # A request that names no class belongs to this one.
    default_class: str = "default"
    # Turns are fair between clients. What one client is: an "address" (of IPv6 its /64), a "connection", the "api_key" that it
    # sends in Authorization, or the value of a header, such as "header:x-tenant". Who sends none is told by the address.
    fairness_key: str = "address"
    # The waiting requests of one client may fill this share of the queue. A full queue lets the one give way that has most.
    client_queue_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    # A request may ask for a priority of at most this (over HTTP: of at least its negative, since there a lower number goes
    # first, as in vLLM). Each level is a head start of 3 s before the requests of other clients.
    max_client_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    # A request may ask to be computed on its decode worker if its prompt has at most so many tokens. None sets no limit.
    max_client_colocated_tokens: NonNegativeInt | None = 2048

    def classes(self) -> dict[str, SloClass]:
        """Return the classes of requests by name."""
        return classes_of(self.slo_classes, "router.slo_classes")

    def check_clients(self) -> None:
        """Check the settings that have more than a type. Raises `ConfigError`."""
        for name, form, example in (
            ("allowed_origins", _ORIGIN, "*, null, or a scheme and a host without a path, such as https://chat.example"),
            ("allowed_hosts", _HOST, "* or a name without a port, such as llm.example"),
        ):
            for value in getattr(self, name):
                if not form.fullmatch(value.lower()):
                    raise ConfigError(f"router.{name}: each entry must be {example}, got {value!r:.100}")
        if self.default_class not in self.classes():
            raise ConfigError(f"router.default_class {self.default_class!r} is none of {', '.join(self.classes())}")
        if self.fairness_key not in ("address", "connection", "api_key") and not _HEADER.fullmatch(self.fairness_key):
            raise ConfigError(
                f"router.fairness_key must be address, connection, api_key, or header:NAME, got {self.fairness_key!r:.100}"
            )
