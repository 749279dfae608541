"""The shell around the router's core: it tokenises, admits, performs the core's effects and hands out tokens."""

__all__ = ["descriptors", "loop_time", "model", "policies", "service"]
