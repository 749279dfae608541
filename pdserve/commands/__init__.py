"""The commands of `pdserve`, one module each. A module imports Ray, gRPC and rich only when its command runs."""

__all__ = [
    "capacity",
    "chat",
    "console",
    "demo",
    "down",
    "explain",
    "failures",
    "generate",
    "models",
    "progress",
    "replay",
    "requests",
    "scaling",
    "set_budget",
    "settings",
    "status",
    "stopping",
    "tables",
    "up",
]
