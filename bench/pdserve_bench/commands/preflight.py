"""The checks of `pdserve bench run` before its first request: a run of an hour must not fail at its end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import CALL_TIMEOUT_S, OPTIONS, InferenceClient
from pdserve.core.errors import ConfigError, Unavailable
from pdserve_bench.load.limits import RunLimits

MOST_OF_MEMORY: Final = 0.5
"""The share of the machine's memory that the rows of a run may take. Writing them takes about as much again."""
ROW_BYTES: Final = 2_000
ARRIVAL_BYTES: Final = 96
"""The memory of one message with tokens: a pair, its time and its place in the row."""


def ask_router(address: str) -> tuple[int, int]:
    """Return the size of the vocabulary and the longest context of the model that is served.

    Raises `CallFailed`, and `Unavailable` when the router says that it cannot serve.
    """
    with InferenceClient(address) as client:
        model = client.model_info()
    if not _is_ready(address):
        raise Unavailable(
            f"the router at {address} is not ready: it has no worker for each step of a request. Start workers, or wait; "
            "`pdserve status` shows which ones it has"
        )
    return model.vocab_size, model.max_model_len


def _is_ready(address: str) -> bool:
    """Ask the router's health service. A router without one counts as ready."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return True
    return bool(answer.status != health_pb2.HealthCheckResponse.NOT_SERVING)


def check_text(flags: Mapping[str, Any]) -> None:
    """Refuse texts that no file of a run can hold. Raises `ConfigError` that names the flag."""
    for name, value in flags.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any("\ud800" <= char <= "\udfff" for char in text):
                raise ConfigError(f"--{name.replace('_', '-')}: {text!r} is not UTF-8 text")


def check_files(flags: Mapping[str, Any]) -> None:
    """Check that the files of the run can be written. Raises `ConfigError` that names the flag."""
    result, parquet = flags["result_file"], flags["parquet"]
    if parquet is not None and parquet.suffix != ".parquet":
        raise ConfigError(f"--parquet: the name {parquet.name} does not end with .parquet; choose one that does")
    if result is not None and parquet is not None and result.resolve() == parquet.resolve():
        raise ConfigError(f"--parquet: {parquet} is the file of --result-file; choose two files")
    for flag, path in (("--result-file", result), ("--parquet", parquet)):
        if path is not None:
            _check_file(flag, path)


def _check_file(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a folder; name a file in it")
    try:
        with tempfile.NamedTemporaryFile(prefix=".pdserve-", dir=path.parent) as file:
            file.write(bytes(4096))
    except OSError as exc:
        raise ConfigError(f"{flag}: the folder {path.parent} cannot be written: {exc.strerror or exc}") from exc
    if path.suffix == ".parquet":
        from pdserve_bench.report.parquet import check_installed

        check_installed()


def check_memory(limits: RunLimits, mean_output_tokens: float) -> None:
    """Refuse a number of requests whose rows do not fit into the memory. Raises `ConfigError`.

    A run that also has a duration is not refused, since the duration most likely ends it.
    """
    if limits.num_requests is None or limits.duration_s is not None:
        return
    row_bytes = ROW_BYTES + ARRIVAL_BYTES * mean_output_tokens
    most_bytes = MOST_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limits.num_requests * row_bytes > most_bytes:
        raise ConfigError(
            f"--num-prompts: the rows of {limits.num_requests:,} requests take {limits.num_requests * row_bytes / 2**30:,.1f} "
            f"GiB, and at most {most_bytes / 2**30:,.1f} GiB are used; take at most {int(most_bytes / row_bytes):,}, or set "
            "--duration"
        )
