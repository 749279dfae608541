"""The decode role: reserves room, pulls KV blocks from prefill workers, and streams tokens."""
