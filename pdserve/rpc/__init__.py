"""Protocol code: generated stubs (`v1`), codecs between wire and core types, and the one error table."""
