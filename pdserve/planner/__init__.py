"""The planner: how many workers each pool should have. Pure; it knows no cluster, no clock and no wire format."""

__all__ = ["limits", "observations", "observe", "planner", "policy", "reasons", "resizing", "settings"]
