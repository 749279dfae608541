"""The safetensors files of a checkpoint in Hugging Face layout. Their headers are checked before any number is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.checkpoint.layout import weight_files
from pdserve.core.errors import ConfigError
from pdserve.engine.loading.digest import TensorDigests
from pdserve.engine.loading.source import Copy, Shape

FLOATS: Final = ("BF16", "F16", "F32", "F64")
"""The dtypes that are read, as safetensors names them. Numbers of all other dtypes mean nothing without their scales."""
_MOST_PROBLEMS: Final = 8
_MOST_NAMES: Final = 4


@dataclass(frozen=True, slots=True)
class _Header:
    """The facts about one tensor."""

    path: Path
    shape: Shape
    dtype: str


class CheckpointFiles:
    """The weights in one directory. Files are mapped only while they are read."""

    def __init__(
        self,
        directory: Path,
        expected: Mapping[str, Shape],
        *,
        unread: tuple[str, ...] = (),
        ignores: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Read the headers of all files and check them.

        expected: the shape of each tensor that will be read. unread: tensors that may be there and are not read. ignores:
        returns True for the name of such a tensor. Raises `ConfigError` naming missing, unexpected and misshapen tensors,
        tensors in two files, tensors whose dtype is not read, or the file that cannot be read or is cut off.
        """
        self._headers: dict[str, _Header] = {}
        self._expected = tuple(expected)
        self._digests = TensorDigests()
        problems = []
        for path in weight_files(directory):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - the file is no mapping
                    if name in self._headers:
                        problems.append(
                            f"{name} is in {self._headers[name].path.name} and in {path.name}: keep one of the files"
                        )
                    header = file.get_slice(name)
                    self._headers[name] = _Header(path, tuple(header.get_shape()), str(header.get_dtype()))
        present = [name for name in self._headers if name not in unread and not ignores(name)]
        problems += _listed("missing", [name for name in expected if name not in self._headers])
        problems += _listed("unexpected", [name for name in present if name not in expected])
        for name in sorted(set(present) & set(expected)):
            problems += _misfits(name, self._headers[name], expected[name])
        if problems:
            shown = "; ".join(problems[:_MOST_PROBLEMS])
            raise ConfigError(f"the weights in {directory} do not fit config.json: {shown}")

    @contextmanager
    def opened(self) -> Iterator[Copy]:
        """Return the function that copies tensors out of the files, which are closed at the end of the context. Copied tensors
        are digested at the same time, and the end of the context waits for that."""
        with self._reading() as read:

            def copy(name: str, into: Tensor) -> None:
                into.copy_(read(name))

            yield copy

    def digest(self) -> str:
        """Return the digest of all expected tensors. Tensors that were not copied yet are read now."""
        with self._reading() as read:
            for name in self._expected:
                if name not in self._digests:
                    read(name)
        return self._digests.hexdigest()

    @contextmanager
    def _reading(self) -> Iterator[Callable[[str], Tensor]]:
        """Return the function that maps a tensor's bytes, and digests them from there."""
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            adding = stack.enter_context(self._digests.adding())

            def read(name: str) -> Tensor:
                path = self._headers[name].path
                if path not in files:
                    files[path] = stack.enter_context(_open(path))
                tensor: Tensor = files[path].get_tensor(name)
                adding.add(name, tensor)
                return tensor

            yield read


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        opened = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"cannot read the weights in {path}: {exc}; is the file complete?") from exc
    with opened as file:
        yield file


def _misfits(name: str, header: _Header, shape: Shape) -> list[str]:
    found = []
    if header.shape != shape:
        found.append(f"{name} has shape {list(header.shape)}, not {list(shape)}")
    if header.dtype not in FLOATS:
        found.append(f"{name} has dtype {header.dtype}, not one of {', '.join(FLOATS)}: quantised checkpoints are not read")
    return found


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return [f"{what}: {shown}{more}"]
