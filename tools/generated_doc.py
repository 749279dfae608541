"""The part that all generated pages of docs/ share: write the page, or with --check fail when it is stale."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(name: str, text: str) -> None:
    """Write `text` to the file `name`, a path under the repository's root. With --check, raise `SystemExit` when the file
    differs.
    """
    target = ROOT / name
    if "--check" not in sys.argv[1:]:
        target.write_text(text)
    elif not target.exists() or target.read_text() != text:
        raise SystemExit(f"{name} is stale; run `make docs`")
    else:
        print(f"{name} is up to date")
