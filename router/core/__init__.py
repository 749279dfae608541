"""The router's pure core: it decides where requests run, and what follows each event."""

__all__ = [
    "events",
    "health",
    "live_request",
    "policy",
    "registry",
    "request_machine",
    "router_core",
    "turns",
    "work_machine",
]
