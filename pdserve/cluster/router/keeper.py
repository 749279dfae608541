"""One router is kept up: found or started, watched, killed when it hangs, and started again for as long as the cluster lives.

`tick` looks at the router and acts. It never waits for the router, so the supervision of workers goes on while the router is
away, starts, or hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from pdserve.client import AdminClient
from pdserve.cluster.errors import ClusterError
from pdserve.cluster.events import Listener, RouterAdopted, RouterBack, RouterLost, RouterReplaced
from pdserve.cluster.record import ClusterRecord, RouterFacts
from pdserve.cluster.router.adoption import ANSWER_S, AdoptionChoice, at_recorded, choose, settings_digest
from pdserve.cluster.router.life import Back, Kill, Lost, RouterLife, RouterPhase, RouterSeen, RouterStart, Sight
from pdserve.cluster.router.ports import HeldPorts
from pdserve.cluster.router.probe import RouterProbe, answers_admin
from pdserve.cluster.router_process import STOP_TIMEOUT_S, Endpoints, RouterProcess
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
