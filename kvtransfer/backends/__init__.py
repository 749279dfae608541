"""Transports: NIXL for use, an in-memory fake for tests."""
