"""The fields that all requests of a run share. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields that all requests of a run share."""

    model: str = ""
    """The name of the model. Empty: the gRPC server takes any; an HTTP server is asked for it."""
    ignore_eos: bool = True
    """The answer has exactly `max_tokens` tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token always, as other load generators do."""
    cache_salt: str = ""
    """KV of equal prompts is shared only with requests of the same salt. Empty: none is sent."""
    placement: str = ""
    """"auto", "disaggregated" or "colocated". Empty: the cluster's own."""
