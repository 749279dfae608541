"""Protocol code: generated stubs (`v1`), codecs between wire and core types, and errors on the wire."""
