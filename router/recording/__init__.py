"""Recordings of what the router's core was told and what it decided: written by a router, and replayed in another process."""
