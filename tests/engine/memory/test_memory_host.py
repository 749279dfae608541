"""What this machine has left, read from files as kernels write them; and a worker that asks for more."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.memory import host
from pdserve.engine.runner import ModelRunner
from pdserve.engine.warm_up import check_before_loading, settle

GIB = 1 << 30


def machine(root: Path, groups: str = "0::/\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:  16777216 kB\nMemAvailable:    8388608 kB\nHugePages_Total:       0\n")
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/status").write_text("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\nThreads:\t3\n")
    return root


def group(folder: Path, limit: str, usage: int, stat: str, names: tuple[str, str] = ("memory.max", "memory.current")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_without_limits_it_is_what_the_machine_has(tmp_path):
    root = machine(tmp_path)
    assert host.available_bytes(root) == 8 * GIB
    assert host.resident_bytes(root) == MIB
    assert host.peak_bytes(root) == 2 * MIB


def test_the_tightest_group_above_us_counts_and_cached_files_are_free(tmp_path):
    root = machine(tmp_path, "0::/pod/container\n")
    stat = f"anon 5\nfile 999\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n"
    group(tmp_path / "sys/fs/cgroup/pod/container", "max", 3 * GIB, stat)
    group(tmp_path / "sys/fs/cgroup/pod", str(4 * GIB), 3 * GIB, stat)
    assert host.available_bytes(root) == GIB + GIB // 2 + GIB // 4


def test_an_older_kernel_and_a_container_that_sees_only_its_own_group(tmp_path):
    root = machine(tmp_path, "9:cpu,cpuacct:/x\n4:memory:/not/visible/here\n0::/\n")
    stat = f"inactive_file 7\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}\n"
    group(tmp_path / "sys/fs/cgroup/memory", str(GIB), GIB // 2, stat, V1)
    assert host.available_bytes(root) == GIB // 2 + 2 * MIB


def test_a_kernel_without_groups(tmp_path):
    root = machine(tmp_path)
    (tmp_path / "proc/self/cgroup").unlink()
    assert host.available_bytes(root) == 8 * GIB


def test_this_machine_can_be_read():
    assert 0 < host.resident_bytes() <= host.peak_bytes()
    assert host.available_bytes() > 0


def test_touched_memory_is_resident():
    import mmap
    from ctypes import addressof, c_char

    memory = mmap.mmap(-1, 32 * MIB)
    before = host.resident_bytes()
    host.touch(addressof(c_char.from_buffer(memory)), 32 * MIB)
    assert host.resident_bytes() - before >= 31 * MIB


def test_a_pool_larger_than_the_machine_is_refused_before_anything_is_loaded(tiny_dir):
    """It was promised lazily, and the worker killed under load."""
    config = EngineConfig(model="tiny", kv_cache_memory=1 << 50, device="cpu")
    with pytest.raises(ConfigError, match="lower kv_cache_memory"):
        check_before_loading(ModelCard.load(tiny_dir), config)
    check_before_loading(ModelCard.load(tiny_dir), EngineConfig(model="tiny", kv_cache_memory=MIB, device="cpu"))


def test_settling_takes_the_whole_pool_at_once_or_refuses(tiny_dir):
    config = EngineConfig(model="tiny", kv_cache_memory=64 * MIB, device="cpu", max_model_len=512)
    runner = ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), config)
    with pytest.raises(ConfigError, match="KV pool 64 MiB"):
        settle(runner, config, available=lambda: 64 * MIB)
    before = host.resident_bytes()
    settle(runner, config)
    assert host.resident_bytes() - before > 60 * MIB
    assert not runner.kv.caches[0].blocks.any(), "what the largest steps wrote is gone"
