"""Refuse a commit message whose subject is too long: Git calls this with the file that holds the message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

LIMIT: Final = 72
"""A subject has fewer characters than this, so that `git log --oneline` fits on a terminal that is 80 characters wide."""


def subject_of(message: str) -> str:
    """Return the first line of `message` that is neither empty nor one of Git's own comments; "" if there is none."""
    lines = (line.strip() for line in message.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def main(path: str) -> None:
    """Read the message from the file `path`. Raise `SystemExit` with the reason if its subject reaches the limit."""
    subject = subject_of(Path(path).read_text(encoding="utf-8"))
    if len(subject) >= LIMIT:
        raise SystemExit(f"the subject has {len(subject)} characters and must have fewer than {LIMIT}: {subject}")


if __name__ == "__main__":
    main(sys.argv[1])
