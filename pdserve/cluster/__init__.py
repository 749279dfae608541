"""The cluster: workers placed by Ray, one router, and the actuator of the sizes. It loads neither torch nor NIXL."""

__all__ = ["errors", "events", "keeping", "launch", "leftovers", "plan", "processes", "record", "scaling"]
