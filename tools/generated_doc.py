"""What every page under docs/ that is made from code shares: write it, or with --check fail when it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(name: str, text: str) -> None:
    """`name` is the file's path under the repository's root."""
    target = ROOT / name
    if "--check" not in sys.argv[1:]:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        raise SystemExit(f"{name} is stale; run `make docs`")
    else:
        print(f"{name} is up to date")
