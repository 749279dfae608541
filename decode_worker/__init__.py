"""The decode role: it reserves blocks, pulls KV from prefill workers, and streams tokens."""

__all__ = ["main", "role"]
