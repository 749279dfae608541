"""The process that compiles grammars of clients first: `python -m pdserve.structured.child DIRECTORY VOCAB_SIZE EOS_ID ...`.

`DIRECTORY` holds the tokenizer. A grammar that uses up time, memory or stack costs this process alone.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import Constraint
from pdserve.killable_child import open_channel
from pdserve.structured.compiler import compile_grammar
from pdserve.structured.state import ConstraintState
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer

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
    """Judge constraints for the router."""
    channel = open_channel("grammar")
    directory, vocab_size, *eos_token_ids = sys.argv[1:]
    tokenizer = Tokenizer.load(Path(directory))
    vocabulary = Vocabulary(tokenizer, int(vocab_size), tuple(map(int, eos_token_ids)))
    os.nice(NICENESS)  # not before: on busy cores the start would take a minute
    limit = int(psutil.Process().memory_info().vms) + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=channel.serve, args=(partial(_answer, vocabulary),)).start()


def _answer(vocabulary: Vocabulary, question: bytes) -> bytes:
    constraint = pickle.loads(question)  # noqa: S301 - from the process that started us
    return json.dumps(judge(vocabulary, constraint)).encode()


if __name__ == "__main__":
    main()
