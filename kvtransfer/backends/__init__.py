"""The transports: NIXL for production, and an in-memory fake for tests."""
