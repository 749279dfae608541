"""The router's pure core: it decides where requests run, and what follows each event."""

__all__ = [
    "events",
    "live_request",
    "pairs",
    "policy",
    "registry",
    "request_machine",
    "router_core",
    "story",
    "turns",
    "work_machine",
]
