"""Recordings of what the router's core was told and what it decided. A router writes them, and another process replays them."""
