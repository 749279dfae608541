"""The recorder of a running router: a bounded queue, and a thread that writes.

The loop never waits for the file. Recording stops when the queue is full, because the disk is slower than the router, and when
the file has `MAX_BYTES`. The log and the last line then say why. A recording with a hole could not be replayed.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.core import events as ev
from router.recording.redact import KEY_BYTES
from router.recording.transcript import Outcome, Transcript

logger = logging.getLogger(__name__)

MAX_QUEUED: Final = 8192
"""The most events that wait for the thread. A busy router makes this number of events in a few seconds."""
MAX_BYTES: Final = 64 << 20
"""A recording stops at this size, so that one which nobody stops fills no disk."""
END_BYTES: Final = 256
"""The bytes of `MAX_BYTES` that are kept for the last line."""
MAX_FILES: Final = 1000  # a router that restarts more often has filled the disk with something else
CLOSE_S: Final = 5.0  # after this time the router no longer waits for a disk that writes nothing

_Item = tuple[float, ev.Event, Outcome]


class Recorder:
    """Records the events of one core. The owner calls `close` at the end."""

    def __init__(self, config: RouterConfig, model_fingerprint: str, seed: int = 0) -> None:
        """Open the file and start the thread. `seed` is the core's. Raises `ConfigError` naming router.record_file."""
        assert config.record_file is not None
        self._transcript = Transcript(config, model_fingerprint, seed=seed, key=secrets.token_bytes(KEY_BYTES))
        self._max_bytes = MAX_BYTES
        self._queue: queue.Queue[_Item | None] = queue.Queue(MAX_QUEUED)
        self._end = ""
        """The reason why the recorder takes no more events. Empty: it records."""
        self._file = _open(config.record_file)
        self.path = self._file.name
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()
        logger.info("recording what happens to requests in %s", self.path)

    def note(self, now_s: float, event: ev.Event, outcome: Outcome) -> None:
        """Take one event. Implements `Notes.note`."""
        if not self._end:
            try:
                self._queue.put_nowait((now_s, event, outcome))
            except queue.Full:
                self._stop(f"{MAX_QUEUED} events waited to be written")

    def close(self) -> None:
        """Write what waits, and close the file, within `CLOSE_S`. Idempotent."""
        self._end = self._end or "the router stopped"
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread ends once it has written what waits
        self._thread.join(CLOSE_S)

    def _stop(self, why: str) -> None:
        self._end = why
        logger.warning("recording in %s has stopped: %s", self.path, why)

    def _run(self) -> None:
        try:
            with self._file as file:
                written = file.write(self._transcript.header())
                for line in self._lines():
                    if written + len(line) + END_BYTES > self._max_bytes:
                        self._stop(f"the file has {self._max_bytes} bytes, as many as a recording may have")
                        break
                    written += file.write(line)
                    if self._queue.empty():
                        file.flush()
                file.write(Transcript.end(self._end))
        except Exception as exc:  # a full disk, or a bug of ours, must not cost a request
            logger.exception("recording in %s failed", self.path)
            self._end = self._end or repr(exc)

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of what is queued, until recording has ended and nothing waits."""
        while not (self._end and self._queue.empty()):
            item = self._queue.get()
            if item is not None:
                yield self._transcript.line(*item)


def _open(name: str) -> BinaryIO:
    """Create a file that only its owner reads. A file that exists is kept, and the name gets a number: a router that starts
    again must not overwrite the recording of an earlier router."""
    if not name or Path(name).is_dir():
        raise ConfigError(f"router.record_file: must name a file, got {name!r}, which is a folder or nothing")
    for number in range(1, MAX_FILES):
        path = Path(name if number == 1 else f"{name}.{number}")
        try:
            return open(path, "xb", opener=lambda file, flags: os.open(file, flags, 0o600))
        except FileExistsError:
            continue
        except OSError as exc:
            raise ConfigError(f"router.record_file: cannot create {path}: {exc.strerror}") from exc
        except ValueError as exc:  # a name with a NUL
            raise ConfigError(f"router.record_file: cannot create {name!r}: {exc}") from exc
    raise ConfigError(f"router.record_file: {name} and {MAX_FILES - 2} more files with a number exist already")
