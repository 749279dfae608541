"""The files from which a gateway in front makes the model's tokenizer, as one zip archive."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from functools import partial
from pathlib import Path
from typing import Final

from pdserve.core.errors import Unavailable
from router.api.router_api import Archive
from router.service.loop_time import SerialThread

TEMPLATE: Final = "chat_template.jinja"
FILES: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json", TEMPLATE,
)  # fmt: skip
"""The names of what belongs to a tokenizer in a folder of Hugging Face. All but the first may be missing."""
MAX_WAITING: Final = 64
"""At most this many calls wait for the archive. It is made once, in about a second for a tokenizer.json of 30 MB."""


class TokenizerFiles:
    """Makes the archive when it is first asked for, and keeps it. It owns a thread; `close` it."""

    def __init__(self, directory: Path | None, chat_template: str | None) -> None:
        """`directory` holds the model's tokenizer; None: a simulation, which has none. `chat_template` is the file that is
        served in place of the model's own template."""
        self._directory = directory
        self._chat_template = chat_template
        self._thread = SerialThread("tokenizer files", MAX_WAITING)
        self._turn = asyncio.Lock()
        self._archive: Archive | None = None

    async def archive(self) -> Archive:
        """Return the archive. Routers of one model and template have the same bytes. Raises `Unavailable` when there are no
        files, and after `close`."""
        async with self._turn:
            if self._archive is None:
                if self._directory is None:
                    raise Unavailable("the router has no files of a tokenizer")
                self._archive = await self._thread.run(partial(_zipped, self._directory, self._chat_template))
            return self._archive

    def close(self) -> None:
        """Stop the thread without waiting."""
        self._thread.close()


def _zipped(directory: Path, chat_template: str | None) -> Archive:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in FILES:
            path = Path(chat_template) if name == TEMPLATE and chat_template is not None else directory / name
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise Unavailable(f"cannot read {name} of the tokenizer: {exc.strerror}") from exc
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)  # no time of a file is in the archive
    data = packed.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())
