"""A worker as a process of its own, and its keeper in Ray."""

__all__ = ["ending", "guard", "order"]
