"""The prefill role: it computes prompts and lends their KV blocks under leases."""

__all__ = ["main", "role"]
