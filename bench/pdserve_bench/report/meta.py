"""The meta of a result file: what was measured, where and when, so that a result can be judged and repeated.

It adds no name of a user, a host or a folder to what the flags and the workload say.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

import pdserve
from pdserve.core.errors import ConfigError
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve_bench.layout import Slo

GIT_TIMEOUT_S: Final = 5.0


def collect_meta(
    *,
    workload: Mapping[str, Any],
    configuration: Mapping[str, Any],
    seed: int,
    slos: Mapping[str, Slo],
    started: datetime.datetime,
    ended: datetime.datetime,
    cluster: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the meta of a run. It holds JSON's types only.

    workload: the specification of the workload; a `fingerprint` in it, which knows its file, is taken as it is.
    configuration: the flags of the command. slos: the targets of each class, and of all other classes under the empty name.
    started, ended: with a time zone.
    cluster: from `cluster_meta`; None: the cluster was not asked.
    """
    return {
        "pdserve": pdserve.__version__,
        "commit": commit(Path(pdserve.__file__).resolve().parents[1]),
        "hardware": hardware(),
        "python": platform.python_version(),
        "cluster": None if cluster is None else dict(cluster),
        "configuration": dict(configuration),
        "workload": dict(workload),
        "workload_fingerprint": workload.get("fingerprint") or fingerprint(workload),
        "seed": seed,
        "slos": {name: asdict(slo) for name, slo in slos.items()},
        "started": _utc(started),
        "ended": _utc(ended),
    }


def slos_of(meta: Mapping[str, Any]) -> Callable[[str], Slo]:
    """Return the targets that a run was judged by, as a function of the class. Raises `ConfigError` if they are damaged."""
    try:
        slos = msgspec.convert(meta.get("slos", {}), dict[str, Slo])
    except msgspec.ValidationError as exc:
        raise ConfigError(f"meta.slos: {exc}") from exc
    default = slos.get("", Slo())
    return lambda name: slos.get(name, default)


def fingerprint(workload: Mapping[str, Any]) -> str:
    """Return a short name of a workload's content. The order in which its fields are written does not matter."""
    return hashlib.sha256(json.dumps(workload, sort_keys=True, default=str).encode()).hexdigest()[:16]


def hardware() -> dict[str, Any]:
    """Describe the machine of the generator. The load is that of the last minute."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    load = round(os.getloadavg()[0], 2)
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_bytes": memory_bytes,
        "load_average": load,
        "system": platform.system(),
    }


def commit(folder: Path) -> dict[str, Any] | None:
    """Return the commit of a checkout, and whether files differ from it. None: the folder is no checkout, or git is missing."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if not top or Path(top) != folder:
        return None  # an installed package may lie within a checkout of something else
    changes = _git(folder, "status", "--porcelain")
    return {"id": _git(folder, "rev-parse", "HEAD"), "dirty": bool(changes)}


def cluster_meta(
    state: inference_pb2.GetClusterStateResponse, model: inference_pb2.GetModelInfoResponse | None = None
) -> dict[str, Any]:
    """Describe a cluster by the answers of its router: the model, the layout, and every worker."""
    workers = sorted((_worker(one) for one in state.workers), key=lambda one: str(one["worker_id"]))
    roles = [one["role"] for one in workers]
    return {
        "model": None if model is None else {"name": model.model, "dtype": model.dtype, "kv_cache_dtype": model.kv_cache_dtype},
        "hosts": len({one.hello.address.rpartition(":")[0] for one in state.workers}),
        "layout": {"prefill": roles.count("prefill"), "decode": roles.count("decode")},
        "block_size": state.block_size,
        "exact": state.exact,
        "workers": workers,
    }


def _worker(state: inference_pb2.WorkerState) -> dict[str, Any]:
    hello = state.hello
    return {
        "worker_id": hello.worker_id,
        "role": common_pb2.Role.Name(hello.role).removeprefix("ROLE_").lower(),
        "model_fingerprint": hello.model_fingerprint,
        "dtype": hello.dtype,
        "quantization": hello.quantization,
        "num_blocks": hello.num_blocks,
        "max_num_seqs": state.load.max_num_seqs or hello.max_num_seqs,
        "max_num_batched_tokens": state.load.max_num_batched_tokens or hello.max_num_batched_tokens,
        "niceness": hello.niceness,
        "peak_flops_per_s": hello.peak_flops_per_s or None,
        "peak_bytes_per_s": hello.peak_bytes_per_s or None,
    }


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, None)


def _git(folder: Path, *words: str) -> str | None:
    """Return what git prints. None: it failed, is missing, or took longer than `GIT_TIMEOUT_S`."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _utc(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).isoformat(timespec="seconds")
