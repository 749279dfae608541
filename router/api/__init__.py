"""The router as a front end sees it: requests, answers and callers. A front end of one's own needs this room alone."""

__all__ = ["answer", "explanation", "identity", "request", "router_api"]
