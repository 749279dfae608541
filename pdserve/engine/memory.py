"""Give memory that was freed back to the operating system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """After loading, glibc keeps what casting and packing freed (127 MiB a worker with SmolLM2) unless told otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)
