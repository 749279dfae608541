"""Protocol code: generated stubs (`v1`), codecs between wire and core types, and errors on the wire."""

__all__ = ["beats", "bundle", "channel", "codec", "malformed", "server", "status", "v1", "witness"]
