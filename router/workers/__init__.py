"""The router's links to its workers, which a thread of their own serves."""

__all__ = ["link", "wire"]
