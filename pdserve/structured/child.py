"""The process that compiles grammars of clients first. Constraints come on standard input; verdicts leave on standard output.

It may be ended at any time, and its memory is bounded: a grammar that uses up time, memory or stack costs this process alone.
`python -m pdserve.structured.child DIRECTORY VOCAB_SIZE EOS_ID ...` starts it, with the tokenizer's directory. It ends when its
input ends, so it ends with its owner.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import sys
import threading
from pathlib import Path
from typing import BinaryIO, Final

import psutil

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import Constraint
from pdserve.observe.title import set_title
from pdserve.structured.compiler import compile_grammar
from pdserve.structured.state import ConstraintState
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer

LENGTH: Final = struct.Struct(">Q")  # stands before each message, in both directions
READY: Final = b"ready\n"
NICENESS: Final = 10  # tokens of running requests go first
MEMORY_BYTES: Final = 512 << 20
"""The address space beyond that of the loaded vocabulary. The limits of a grammar allow it about a tenth."""
STACK_BYTES: Final = 2 << 20
"""A quarter of the stack that the threads of a worker have: what passes here does not run out of stack there."""

Verdict = tuple[str, str | None]
"""The message and the field of a refusal; an empty message: the constraint compiles."""


def judge(vocabulary: Vocabulary, constraint: Constraint) -> Verdict:
    """Compile a constraint, and compute its first mask. Return the refusal, or an empty message."""
    field = f"structured_outputs.{constraint.kind.value}"
    try:
        state = ConstraintState(compile_grammar(vocabulary, constraint))
    except InvalidRequest as exc:
        return exc.message, exc.field
    except MemoryError:
        return f"{field}: cannot be compiled: it takes too much memory", field
    if state.mask() is None:
        return f"{field}: cannot be compiled: {state.failure}", field
    return "", None


def main() -> None:
    """Judge constraints until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles a terminal's Ctrl-C
    set_title("grammar")
    directory, vocab_size, *eos_token_ids = sys.argv[1:]
    tokenizer = Tokenizer.load(Path(directory))
    vocabulary = Vocabulary(tokenizer, int(vocab_size), tuple(map(int, eos_token_ids)))
    os.nice(NICENESS)  # not before: on busy cores the start would take a minute
    limit = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(STACK_BYTES)
    judges = threading.Thread(target=_serve, args=(vocabulary, sys.stdin.buffer, sys.stdout.buffer))
    judges.start()
    judges.join()


def _serve(vocabulary: Vocabulary, source: BinaryIO, sink: BinaryIO) -> None:
    sink.write(READY)
    sink.flush()
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        constraint = pickle.loads(source.read(*LENGTH.unpack(head)))  # noqa: S301 - from the process that started us
        reply = json.dumps(judge(vocabulary, constraint)).encode()
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()


def _address_space() -> int:
    """Return the bytes of address space that this process has now."""
    return int(psutil.Process().memory_info().vms)


if __name__ == "__main__":
    main()
