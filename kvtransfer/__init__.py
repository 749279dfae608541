"""The data plane: it reads KV blocks from another worker's pool, under leases that say when the KV may be used."""
