"""The process that parses large requests: `python -m router.parsing.child MAX_BODY_BYTES`."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pickle
import resource
import sys
from array import array
from typing import Any, Final

from pdserve.core.errors import InvalidRequest
from pdserve.killable_child import open_channel
from router.parsing.parse import Job, Parsed, parse

NICENESS: Final = 10  # tokens of running requests go first
BASE_BYTES: Final = 512 << 20
BYTES_PER_BYTE: Final = 64
"""The address space for each byte of the largest body, over twice what was measured. The worst bodies are a prompt of many
lists of one token id as JSON (27.5 with msgspec 0.22), and a chat of empty messages as protobuf (28). The limit must not become
tight: msgspec does not survive every allocation that fails, so the process may end instead of refusing the body."""

Verdict = Parsed | tuple[type[InvalidRequest], str, str]
"""The request, or the class, the message and the field of its refusal."""


def memory_bytes(max_body_bytes: int) -> int:
    """Return the address space that the process may have. No answer is larger."""
    return BASE_BYTES + BYTES_PER_BYTE * max_body_bytes


class _Pickler(pickle.Pickler):
    """Pickles token ids as arrays: these are sent and read a hundred times as fast as tuples."""

    def persistent_id(self, obj: Any) -> array[int] | None:
        """Return what stands for the object. None: it is pickled as ever."""
        if type(obj) is tuple and obj and type(obj[0]) is int:
            with contextlib.suppress(TypeError, OverflowError):  # these are no token ids
                return array("I", obj)
        return None


class _Unpickler(pickle.Unpickler):
    """Makes tuples of token ids again, one prompt after the other. Another thread may run between two of them."""

    def persistent_load(self, pid: array[int]) -> tuple[int, ...]:
        """Return the object for which the array stands."""
        return tuple(pid)


def pack(verdict: Verdict) -> bytes:
    """Return a verdict as bytes."""
    packed = io.BytesIO()
    _Pickler(packed, protocol=5).dump(verdict)
    return packed.getvalue()


def unpack(packed: bytes) -> Verdict:
    """Return the verdict that was packed. It must come from a child of ours."""
    verdict: Verdict = _Unpickler(io.BytesIO(packed)).load()
    return verdict


def verdict_of(job: Job) -> Verdict:
    """Parse a request."""
    try:
        return parse(job)
    except InvalidRequest as exc:
        return type(exc), exc.message, exc.field
    except MemoryError:
        return InvalidRequest, "body: takes too much memory to be read", "body"


def main() -> None:
    """Parse requests for the router."""
    channel = open_channel("parse")
    os.nice(NICENESS)
    limit = memory_bytes(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.disable()  # what is decoded has no cycles, and looking for them in millions of lists doubles the time
    channel.serve(_answer)


def _answer(question: bytes) -> bytes:
    answer = pack(verdict_of(pickle.loads(question)))  # noqa: S301 - from the router, which started us
    gc.collect(0)  # frees the cycles that exceptions make
    return answer


if __name__ == "__main__":
    main()
