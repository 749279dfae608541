"""The process that reads large requests: jobs come on standard input, results leave on standard output, one at a time.

It ends with its input, so with the router. `python -m router.parse_child MAX_BODY_BYTES`.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import struct
import sys
from array import array
from dataclasses import replace
from typing import Any, BinaryIO, Final

from pdserve.core.errors import InvalidRequest
from pdserve.observe.title import set_title
from router.openai.request import Call
from router.parse import Job, parse

LENGTH: Final = struct.Struct(">Q")  # before each pickle, both ways
NICENESS: Final = 10  # tokens of running requests go first
BASE_BYTES: Final = 512 << 20
BYTES_PER_BYTE: Final = 64  # of address space; measured at most 30 a byte of JSON, for a list of empty lists


def pack(result: Any) -> Any:
    """Token ids as arrays: they cross, and are taken apart, a hundred times as fast as tuples."""
    if isinstance(result, Call):
        return replace(result, inputs=tuple(pack(one) for one in result.inputs))
    prompt = result.prompt
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], int):
        return replace(result, prompt=array("I", prompt))
    return result


def answer(job: Job) -> tuple[str, Any]:
    """Returns ("parsed", result) or ("refused", (message, field))."""
    try:
        return "parsed", pack(parse(job))
    except InvalidRequest as exc:
        return "refused", (exc.message, exc.field)
    except MemoryError:
        return "refused", ("body: takes too much memory to be read", "body")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read one job; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the router
    set_title("parse")
    os.nice(NICENESS)
    limit = BASE_BYTES + BYTES_PER_BYTE * int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.disable()  # JSON has no cycles, and looking for them in millions of lists doubles the time
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (frame := read_frame(source)) is not None:
        reply = pickle.dumps(answer(pickle.loads(frame)), protocol=5)  # noqa: S301 - from the router, which started us
        del frame
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()
        gc.collect(0)  # what exceptions tied together


if __name__ == "__main__":
    main()
