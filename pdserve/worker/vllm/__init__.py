"""A server of vLLM as the engine of a worker: its process, its HTTP interface, and the commands of the roles in its terms.

Only interfaces that vLLM publishes are used: the flags of its server, `/inference/v1/generate`, `/metrics`, `/health`,
`/version` and `/v1/models`. Nothing of vLLM is imported."""

__all__ = ["attached", "client", "engine", "follower", "guard", "kv_events", "metrics", "requests", "server"]
