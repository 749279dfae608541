"""What can go wrong while a cluster is brought up or held up. Each is one line for the operator."""

from __future__ import annotations

from pdserve.core.errors import PdserveError, Unavailable


class ClusterError(Unavailable):
    """The cluster could not be started, or can no longer be kept up; the message says what to look at."""


class Interrupted(PdserveError):
    """The operator asked to stop while the cluster was starting."""

    def __init__(self) -> None:
        super().__init__("stopped while starting")
