"""The pure core. It uses the standard library only: no I/O, no clock, no threads, no randomness of its own."""
