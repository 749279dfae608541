"""Recordings of the events that the router's core got and of the effects that it returned. A router writes them, and another
process replays them."""

__all__ = ["recorder", "replay", "transcript"]
