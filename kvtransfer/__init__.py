"""The data plane: it reads KV blocks from another worker's pool, under leases that say when the KV may be used."""

__all__ = ["api", "backends", "lease_client", "lease_service", "pull", "remote", "routed", "staging", "thread", "ticket"]
