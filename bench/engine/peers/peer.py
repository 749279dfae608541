"""Other engines, each in a separate process, which computes only while it is asked.

One engine is asked at a time. The others sleep: their OpenMP threads stop spinning after a millisecond (`QUIET`).
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.engine.peers.cases import Case
from bench.engine.peers.gguf_files import gguf_file
from bench.engine.peers.install import NotInstalled, environment
from bench.engine.peers.openvino_files import openvino_folder
from pdserve.checkpoint.cache import default_cache_dir
from pdserve.checkpoint.card import ModelCard

START_LIMIT_S: Final = 900.0  # vLLM compiles a model at its first load, which takes minutes
CASE_LIMIT_S: Final = 300.0  # the first turn of a case also computes the cached tokens of its sequences
QUIET: Final = {"KMP_BLOCKTIME": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
VLLM: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, for the longest case
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ROOT: Final = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine and setting to compare with.

    gguf: the format of the GGUF file that it reads. openvino: the format of the weights of the OpenVINO model that it reads.
    If both are None, it reads the checkpoint.
    """

    name: str
    engine: str
    module: str
    bf16: bool
    gguf: str | None = None
    openvino: str | None = None

    @property
    def weights(self) -> str | None:
        """The format to which its weights are rounded; None means bfloat16."""
        return self.gguf if self.openvino is None else f"openvino {self.openvino}"

    def files(self, directory: Path, card: ModelCard, python: Path) -> Path:
        """Return the file or folder that it reads, converted now if necessary. Raises `NotInstalled` when that fails."""
        if self.openvino is not None:
            return openvino_folder(directory, self.openvino, python)
        return directory if self.gguf is None else gguf_file(directory, card, self.gguf)


# Q4_1 is llama.cpp's 4-bit format that stores a least value for each group, as ours does. Q4_0 is faster, but agrees with
# bfloat16 on only two tokens of three.
CONTENDERS: Final = (
    Contender("vLLM bf16", "vllm", "vllm_server", True),
    Contender("llama.cpp bf16", "llama.cpp", "llama_cpp_server", True, "BF16"),
    Contender("llama.cpp Q8_0", "llama.cpp", "llama_cpp_server", False, "Q8_0"),
    Contender("llama.cpp Q4_1", "llama.cpp", "llama_cpp_server", False, "Q4_1"),
    Contender("transformers bf16", "transformers", "transformers_server", True),
    Contender("OpenVINO bf16", "openvino", "openvino_server", True, openvino="fp32"),
    Contender("OpenVINO int8", "openvino", "openvino_server", False, openvino="int8"),
)
ENGINES: Final = tuple(dict.fromkeys(one.engine for one in CONTENDERS))


class PeerFailed(Exception):
    """An engine gave no figure. The message gives the reason in one line."""


class Peer:
    """The process of one engine. `started` makes it and ends the process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._read = b""
        self.version = str(self._answer(START_LIMIT_S)["ready"])

    def seconds(self, case: Case) -> float:
        """Return the mean seconds of the case's step. Raises `PeerFailed` when the engine fails, ends or does not answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"case": asdict(case)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as exc:
            raise PeerFailed(f"its process ended early: {last_line(self._log)}") from exc
        answer = self._answer(CASE_LIMIT_S)
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return float(answer["seconds"])

    def _answer(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ends_s = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, ends_s - time.monotonic())):
                    raise PeerFailed(f"it gave no answer in {limit_s:.0f} s")
                more = os.read(self._process.stdout.fileno(), 65536)
                if not more:
                    raise PeerFailed(f"its process ended early: {last_line(self._log)}")
                self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def started(one: Contender, directory: Path, card: ModelCard, threads: int, say: Callable[[str], None]) -> Iterator[Peer]:
    """Run an engine's process, and install the engine before if necessary. Raises `PeerFailed` or `NotInstalled`."""
    python = environment(one.engine, say)
    model = one.files(directory, card, python)
    say(f"starting {one.name}")
    log = default_cache_dir() / "peers" / f"{one.name}.log"
    command = (str(python), "-m", f"bench.engine.peers.{one.module}", str(model), str(threads))
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    settings = {**os.environ, **QUIET, **VLLM, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": cores}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )  # fmt: skip
    try:
        yield Peer(process, log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # an unread request may still lie in the pipe
                pipe.close()


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"


def chosen(engines: Sequence[str]) -> tuple[Contender, ...]:
    """Return the contenders of the named engines."""
    return tuple(one for one in CONTENDERS if one.engine in engines)


__all__ = ["CONTENDERS", "ENGINES", "Contender", "NotInstalled", "Peer", "PeerFailed", "chosen", "started"]
