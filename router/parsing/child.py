"""The process that parses large requests: `python -m router.parsing.child MAX_BODY_BYTES`."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import sys
from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.killable_child import open_channel
from router.parsing.parser import Job, Verdict, memory_bytes, pack, parse

NICENESS: Final = 10  # tokens of running requests go first


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
