"""The archive of the tokenizer's files: what is in it, and that it is the same everywhere."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from pdserve.core.errors import Unavailable
from router.service.tokenizer_files import TokenizerFiles


def archive_of(directory: Path | None, template: str | None = None) -> bytes:
    async def make() -> bytes:
        files = TokenizerFiles(directory, template)
        try:
            first, again = await asyncio.gather(files.archive(), files.archive())
            assert first is again
            assert first.sha256 == hashlib.sha256(first.data).hexdigest()
            return first.data
        finally:
            files.close()

    return asyncio.run(make())


def read(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        return {name: files.read(name) for name in files.namelist()}


def folder(path: Path) -> Path:
    path.mkdir()
    for name, text in (("tokenizer.json", "{}"), ("chat_template.jinja", "own"), ("model.safetensors", "weights")):
        (path / name).write_text(text)
    return path


def test_it_has_the_files_of_the_tokenizer_and_no_others(tmp_path: Path) -> None:
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other")
    assert read(archive_of(one)) == {"tokenizer.json": b"{}", "chat_template.jinja": b"own"}
    assert archive_of(one) == archive_of(other)


def test_the_template_of_the_settings_is_in_place_of_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert read(archive_of(folder(tmp_path / "one"), str(tmp_path / "mine")))["chat_template.jinja"] == b"mine"


def test_without_files_it_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no files"):
        archive_of(None)
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(Unavailable, match="cannot read tokenizer"):
        archive_of(tmp_path)


def test_nobody_waits_for_a_router_that_closes(tmp_path: Path) -> None:
    async def closed() -> None:
        files = TokenizerFiles(folder(tmp_path / "one"), None)
        files.close()
        await files.archive()

    with pytest.raises(Unavailable, match="closing"):
        asyncio.run(closed())
