"""The question whether the router still answers, asked in a thread of its own, so that no wait for it holds up anything else.

Any answer counts, a refusal too. Clients can fill the port of clients, and operators that of administration, so a router is
silent only if neither answers. A refused connection is no silence: a router that stops has closed its ports and still serves
its streams.
"""

from __future__ import annotations

import socket
import threading
import time

import grpc

from pdserve.client import AdminClient, CallFailed
from pdserve.cluster.router.life import ASK_ADMIN_S, ASK_CLIENTS_S, PROBE_S, RouterSilence

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
