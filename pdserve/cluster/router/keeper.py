"""One router is kept up: found or started, watched, killed when it hangs, and started again for as long as the cluster lives.

`tick` looks at the router and acts. It never waits for the router, so the supervision of workers goes on while the router is
away, starts, or hangs.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import grpc

import pdserve
from pdserve.client import AdminClient, CallFailed
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.events import Listener, RouterAdopted, RouterBack, RouterLost, RouterReplaced
from pdserve.cluster.record import ClusterRecord, RouterFacts
from pdserve.cluster.router.life import (
    ASK_ADMIN_S,
    ASK_CLIENTS_S,
    PROBE_S,
    Back,
    Kill,
    Lost,
    RouterLife,
    RouterPhase,
    RouterSeen,
    RouterSilence,
    RouterStart,
    Sight,
)
from pdserve.cluster.router.ports import NAMES, HeldPorts, at_ports, hosts_of, ports_of
from pdserve.cluster.router_process import STOP_TIMEOUT_S, Endpoints, RouterProcess
from pdserve.config import RouterConfig, RouterProcessConfig, dump
from pdserve.core.errors import ConfigError

log = logging.getLogger(__name__)
STOPPED_S: Final = 1.0  # a stop of the one that asks is noticed this soon


class RouterKeeper:
    """The router of a cluster. One thread calls it, but for `kill`."""

    def __init__(
        self,
        process: RouterProcess,
        *,
        record: ClusterRecord | None,
        listener: Listener,
        dial: Callable[[str], str],
    ) -> None:
        """record: of a lasting cluster. dial: from an address at which the router listens to one that this machine dials."""
        self.process = process
        self._record = record
        self._listener = listener
        self._dial = dial
        self._token = process.settings.cluster_token
        self._digest = settings_digest(process.settings)
        self._ports = HeldPorts(process.settings.router)
        self._life = RouterLife(RouterPhase.STARTING)
        self._probe: RouterProbe | None = None
        self.endpoints: Endpoints | None = None
        self.adopted = False

    @property
    def doubtful(self) -> bool:
        """Tell whether a call to the router would wait now: it is away, or its last answer is late."""
        return self._probe is None or self._probe.doubtful

    def begin(self, stop: threading.Event, stop_s: float) -> None:
        """Adopt the router that runs, or start one without waiting until it is ready.

        stop_s: the longest time that a router with other settings gets to finish its streams. Raises `ClusterError`, and
        `ConfigError` for settings with which the workers that run would lose their router.
        """
        recorded = self._record.router if self._record is not None else None
        if recorded is not None:
            self.process.use(at_recorded(self.process.settings.router, recorded))
            self._ports = HeldPorts(self.process.settings.router)
        alive = recorded is not None and recorded.process.alive
        answers = alive and recorded is not None and self._answers(recorded, stop)
        choice = choose(recorded, alive=alive, answers=answers, digest=self._digest)
        if choice is not AdoptionChoice.START and recorded is not None:
            addresses = recorded.http, recorded.grpc, recorded.link, recorded.admin
            found = Endpoints(*addresses, recorded.process.pid, recorded.metrics)
            if choice is AdoptionChoice.ADOPT:
                self.process.adopt(recorded.process, found)
                self._serves(found)
                self._life.phase = RouterPhase.SERVING
                self.adopted = True
                self._listener(RouterAdopted(found.pid))
                return
            self._listener(
                RouterReplaced(found.pid, "has other settings" if choice is AdoptionChoice.REPLACE else "does not answer")
            )
            self.process.adopt(recorded.process, None)
            self.process.stop(stop_s if choice is AdoptionChoice.REPLACE else 0.0)
        self.process.use(self._ports.hold())
        self._start()

    def _answers(self, recorded: RouterFacts, stop: threading.Event) -> bool:
        """Ask the recorded router with our secret, for at most `ANSWER_S`."""
        if not recorded.admin:
            return False
        with AdminClient(self._dial(recorded.admin), self._token) as client:
            for _ in range(int(ANSWER_S / STOPPED_S)):
                if answers_admin(client, STOPPED_S):
                    return True
                if not recorded.process.alive or stop.wait(STOPPED_S / 10):
                    break
        return False

    def _start(self) -> None:
        self.process.start()
        self._write(Endpoints("", "", "", "", 0))

    def wait_ready(self, stop: threading.Event) -> Endpoints:
        """Wait until the router that `begin` started serves, and return its addresses. Raises as `RouterProcess.wait_ready`."""
        if self.endpoints is None:
            self._serves(self.process.wait_ready(stop))
            self._life.phase = RouterPhase.SERVING
        assert self.endpoints is not None
        return self.endpoints

    def tick(self, now_s: float) -> None:
        """Look at the router, and do what follows."""
        for effect in self._life.look(self._look(), now_s):
            if isinstance(effect, Kill):
                self.process.kill()
            elif isinstance(effect, RouterStart):
                self.process.forget()
                try:
                    self._start()
                except ClusterError:  # no process can be made now: the next look finds none, and it is tried again
                    log.exception("the router cannot be started")
            elif isinstance(effect, Lost):
                self._away()
                self._listener(RouterLost(effect.detail, effect.delay_s))
            elif isinstance(effect, Back):
                assert self.endpoints is not None
                self._listener(RouterBack(self.endpoints.pid))
        if self._life.phase is RouterPhase.AWAY:
            self._away()

    def _look(self) -> RouterSeen:
        ended = self.process.ended()
        if ended is not None:
            said = self.process.error_line() if self._life.phase is RouterPhase.STARTING else ""
            return RouterSeen(Sight.ENDED, said or ended)
        if self._life.phase is RouterPhase.STARTING:
            try:
                ready = self.process.ready()
            except (ClusterError, ConfigError) as exc:
                return RouterSeen(Sight.ENDED, exc.message) if self.process.ended() else RouterSeen(Sight.SILENT)
            if ready is None:
                return RouterSeen(Sight.STARTS)
            self._serves(ready)
        return RouterSeen(Sight.SILENT if self._probe is not None and self._probe.silent else Sight.SERVES)

    def _serves(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self._ports.learn(self.process.settings.router)
        self._write(endpoints)
        self._probe = RouterProbe(self._dial(endpoints.http), self._dial(endpoints.admin), self._token)
        self._probe.start()

    def _away(self) -> None:
        """Stop asking a router that is gone, and keep its ports from others."""
        if self._probe is not None:
            self._probe.end()
            self._probe = None
        self._ports.hold()

    def _write(self, endpoints: Endpoints) -> None:
        """Record the router, for the next `pdserve up`. One without addresses is not ready yet."""
        if self._record is not None and self.process.process is not None:
            at = (endpoints.http, endpoints.grpc, endpoints.link, endpoints.admin, endpoints.metrics)
            try:
                self._record.write_router(RouterFacts(self.process.process, *at, self._digest))
            except OSError:  # it serves all the same; the next `pdserve up` may not find it
                log.exception("the router cannot be recorded")

    def close(self, stop_s: float = STOP_TIMEOUT_S, *, leave: bool = False) -> None:
        """Stop the router, which gets `stop_s` to finish its streams. `leave`: it goes on. Idempotent."""
        if self._probe is not None:
            self._probe.end()
            self._probe = None
        if not leave:
            self.process.stop(stop_s)
        self._ports.close()

    def kill(self) -> None:
        """End the router now. Any thread may call it."""
        self.process.kill()


# The adoption of the router that an earlier `pdserve up` left, or its replacement. Pure.

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


# The question whether the router still answers, asked in a thread of its own, so that no wait for it holds up anything else.
#
# Any answer counts, a refusal too. Clients can fill the port of clients, and operators that of administration, so a router is
# silent only if neither answers. A refused connection is no silence: a router that stops has closed its ports and still serves
# its streams.

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class RouterProbe:
    """The probes of one router's life. `start` begins them, `end` ends them."""

    def __init__(self, http: str, admin: str, cluster_token: str) -> None:
        """`http` and `admin` are addresses (host:port) that this machine can dial."""
        self._http, self._admin, self._token = http, admin, cluster_token
        self._silence = RouterSilence()
        self._asked_s: float | None = None  # since when an answer is waited for
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._probe, name="router-probe", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def silent(self) -> bool:
        """Tell whether the router counts as one that hangs."""
        return self._silence.lasts

    @property
    def doubtful(self) -> bool:
        """Tell whether the last probe was not answered, or one waits now for longer than an answer takes. Whoever would wait
        for the router in another thread does it later."""
        asked_s = self._asked_s
        return self._silence.count > 0 or (asked_s is not None and time.monotonic() - asked_s > ASK_ADMIN_S / 4)

    def end(self) -> None:
        """End the probes, without waiting for the last one, which ends within its limit. Idempotent."""
        self._over.set()

    def _probe(self) -> None:
        with AdminClient(self._admin, self._token) as client:
            while not self._over.wait(PROBE_S if not self._silence.count else 0.0):
                begun = self._asked_s = time.monotonic()
                answered = answers(self._http) or answers_admin(client)
                self._asked_s = None
                if answered is not None:
                    self._silence.note(answered=answered, took_s=time.monotonic() - begun)
                else:
                    self._over.wait(PROBE_S)


def answers(http: str, wait_s: float = ASK_CLIENTS_S) -> bool:
    """Tell whether anything comes from the port of clients."""
    host, _, port = http.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), wait_s) as connection:
            connection.settimeout(wait_s)
            connection.sendall(REQUEST)
            return bool(connection.recv(1))
    except OSError:
        return False


def answers_admin(client: AdminClient, wait_s: float = ASK_ADMIN_S) -> bool | None:
    """Tell whether the port of administration answers, an error of the router's included. None: it is closed."""
    try:
        client.cluster_state(wait_s)
    except CallFailed as exc:
        if exc.reason is None and exc.status is grpc.StatusCode.UNAVAILABLE:
            return None if _refused(client.address) else False
        return exc.reason is not None or exc.status is not grpc.StatusCode.DEADLINE_EXCEEDED
    return True


def _refused(address: str) -> bool:
    """Tell whether nobody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ASK_ADMIN_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
