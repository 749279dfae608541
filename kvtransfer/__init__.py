"""The data plane: KV blocks read from another worker's pool, and the leases that make what was read usable."""
