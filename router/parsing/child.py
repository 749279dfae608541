"""The process that parses large requests. Jobs come on standard input and results leave on standard output, one at a time.

It ends when its input ends, so it ends with the router. `python -m router.parsing.child MAX_BODY_BYTES` starts it.
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
from router.openai.responses.request import ResponsesCall
from router.parsing.generate import Batch, GenerateCall, Refused
from router.parsing.parse import Job, parse

LENGTH: Final = struct.Struct(">Q")  # stands before each pickle, in both directions
NICENESS: Final = 10  # tokens of running requests go first
BASE_BYTES: Final = 512 << 20
BYTES_PER_BYTE: Final = 64
"""The address space for each byte of the largest body, over twice what was measured. The worst bodies are a prompt of many
lists of one token id as JSON (27.5 with msgspec 0.22), and a chat of empty messages as protobuf (28). The limit must not become
tight: msgspec does not survive every allocation that fails, so the process may end instead of refusing the body."""


def pack(result: Any) -> Any:
    """Replace token ids by arrays. They are sent and unpacked a hundred times as fast as tuples."""
    if isinstance(result, Call):
        return replace(result, inputs=tuple(pack(one) for one in result.inputs))
    if isinstance(result, ResponsesCall):  # a chat has no token ids
        return result
    if isinstance(result, Batch):
        return replace(result, calls=tuple(pack(one) for one in result.calls))
    if isinstance(result, GenerateCall):
        return replace(result, input=pack(result.input))
    if isinstance(result, Refused):
        return result
    prompt = getattr(result, "prompt", None)
    if isinstance(prompt, tuple) and prompt and isinstance(prompt[0], int):
        return replace(result, prompt=array("I", prompt))
    return result


def answer(job: Job) -> tuple[str, Any]:
    """Return ("parsed", result) or ("refused", (class, message, field))."""
    try:
        return "parsed", pack(parse(job))
    except InvalidRequest as exc:
        return "refused", (type(exc), exc.message, exc.field)
    except MemoryError:
        return "refused", (InvalidRequest, "body: takes too much memory to be read", "body")


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read one job. None: the stream has ended."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


def main() -> None:
    """Parse jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles a terminal's Ctrl-C
    set_title("parse")
    os.nice(NICENESS)
    limit = BASE_BYTES + BYTES_PER_BYTE * int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    gc.disable()  # what is decoded has no cycles, and looking for them in millions of lists doubles the time
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (frame := read_frame(source)) is not None:
        reply = pickle.dumps(answer(pickle.loads(frame)), protocol=5)  # noqa: S301 - from the router, which started us
        del frame
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()
        gc.collect(0)  # frees the cycles that exceptions make


if __name__ == "__main__":
    main()
