"""The errors of starting a cluster and keeping it up. The message of each is one line for the operator."""

from __future__ import annotations

from pdserve.core.errors import PdserveError, Unavailable


class ClusterError(Unavailable):
    """The cluster could not be started, or can no longer be kept up. The message says where to look for the cause."""


class Interrupted(PdserveError):
    """The operator asked to stop while the cluster was starting."""

    def __init__(self) -> None:
        super().__init__("stopped while starting")


class WorkerDied(ClusterError):
    """The process of a worker has ended, or answers no more."""


class StartFailed(ClusterError):
    """A worker could not start. The message has the kind of its own error and its text."""
