"""The transport of a pool on a GPU, by a stand-in for the CUDA driver and through the real transfer thread.

NIXL is the real one and told that the pool is host memory, which it is here; what it is asked, and in which thread, is
written down beside what the driver is asked. Whether UCX then takes cuda_ipc only a GPU can show.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transfer_testing import NixlPeer, Pool, new_incarnation

from kvtransfer.api import Region, TransferDevice
from kvtransfer.backends import nixl as backend
from kvtransfer.backends.cuda import CudaContext
from kvtransfer.backends.nixl import NixlTransport, load_wheel
from kvtransfer.thread import TransferThread
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.ids import WorkerId

CONTEXT = 0xC0DE
GPU = 3
Asked = list[tuple[str, str]]
"""The name of each call, and of the thread that made it."""


@pytest.fixture(autouse=True)
def no_variable_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport on a GPU sets variables of UCX for its process. Where there is none, UCX
    would complain of them in this process and its children."""
    monkeypatch.setattr(backend, "_GPU_ENVIRONMENT", {})


class Driver:
    """libcuda as far as it is used. A context is current in the thread that made it so, and in no other."""

    def __init__(self, asked: Asked, failing: str = "") -> None:
        self._asked = asked
        self._failing = failing
        self.current = threading.local()
        self.retained = 0

    def _note(self, name: str) -> int:
        self._asked.append((name, threading.current_thread().name))
        return 999 if name == self._failing else 0

    def cuInit(self, flags: int) -> int:
        return self._note("cuInit")

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 100 + index
        return self._note("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        assert device.value == 100 + GPU
        context._obj.value = CONTEXT
        status = self._note("cuDevicePrimaryCtxRetain")
        self.retained += status == 0
        return status

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.current.value = context.value
        return self._note("cuCtxSetCurrent")

    def cuCtxSynchronize(self) -> int:
        return self._note("cuCtxSynchronize")

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:
        assert device.value == 100 + GPU
        self.retained -= 1
        return self._note("cuDevicePrimaryCtxRelease_v2")


class Noting:
    """NIXL's module, or its agent, which notes what it is asked to make and to register."""

    def __init__(self, inner: Any, asked: Asked, driver: Driver) -> None:
        self._inner = inner
        self._asked = asked
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def nixlAgent(self, *arguments: Any) -> Noting:
        assert self._driver.current.value == CONTEXT, "UCX would find no context here"
        self._asked.append(("nixlAgent", threading.current_thread().name))
        return Noting(self._inner.nixlAgent(*arguments), self._asked, self._driver)

    def registerMem(self, *arguments: Any) -> Any:
        self._asked.append(("registerMem", threading.current_thread().name))
        return self._inner.registerMem(*arguments)

    @property
    def VRAM_SEG(self) -> Any:
        return self._inner.DRAM_SEG


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    return []


def on_gpu(region: Region) -> Region:
    return replace(region, device=TransferDevice("cuda", GPU))


def start(asked: Asked, driver: Driver, pool: Pool, patch: pytest.MonkeyPatch) -> TransferThread:
    real = load_wheel(None)
    patch.setattr(backend, "load_wheel", lambda cuda: Noting(real, asked, driver))

    def context(index: int) -> CudaContext:
        assert index == GPU
        return CudaContext(index, driver)

    region = on_gpu(pool.region)
    return TransferThread(lambda: NixlTransport(WorkerId("w"), new_incarnation(), [region], gpu_context=context))


def test_the_gpus_context_is_current_in_the_transfer_thread_before_ucx_starts(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(1) The context, then the agent, all in the one thread; (2) the GPU has done its work before each region is
    registered, the pool and then staging; (3) KV arrives; (4) the context is given back."""
    driver, pool, staging, peer = Driver(asked), Pool(), Pool(num_blocks=4), NixlPeer()

    async def test() -> None:
        thread = start(asked, driver, pool, monkeypatch)
        try:
            await thread.start()
            await thread.connect(peer.incarnation, peer.metadata)
            for into in (on_gpu(pool.region), on_gpu(staging.region), on_gpu(staging.region)):
                read = thread.read(peer.incarnation, peer.region, [1, 2], [3, 0], deadline_s=30, into=into)
                await read.result
        finally:
            await thread.close()

    try:
        asyncio.run(asyncio.wait_for(test(), 60))
        expected = peer.digest([1, 2])
    finally:
        peer.kill()
    made_current = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    registered = ["cuCtxSynchronize", "registerMem"]
    assert [name for name, _ in asked] == [
        *made_current, "nixlAgent", *registered, *registered, "cuDevicePrimaryCtxRelease_v2",
    ]  # fmt: skip
    assert {thread for _, thread in asked} == {"pdserve-transfer"}
    assert not hasattr(driver.current, "value"), "the loop's thread has none"
    assert driver.retained == 0
    assert pool.digest([3, 0]) == staging.digest([3, 0]) == expected


@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxSynchronize"])
def test_a_driver_that_fails_ends_the_start_and_keeps_nothing(asked: Asked, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    driver = Driver(asked, failing=call)

    async def test() -> None:
        thread = start(asked, driver, Pool(), monkeypatch)
        with pytest.raises(TransferFailed, match=f"{call} of the CUDA driver failed with error 999"):
            await thread.start()
        await thread.close()

    asyncio.run(asyncio.wait_for(test(), 60))
    assert driver.retained == 0


def test_host_memory_asks_no_driver(asked: Asked) -> None:
    def never(index: int) -> CudaContext:
        raise AssertionError("no GPU is used")

    NixlTransport(WorkerId("w"), new_incarnation(), [Pool().region], gpu_context=never).close()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of stand-ins for installed wheels, instead of the real ones."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    taken = [name for name in sys.modules if name.partition(".")[0] in ("nixl_cu12", "nixl_cu13")]
    for name in taken:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("nixl_cu12", "nixl_cu13")]:
        del sys.modules[name]


def install(folder: Path, wheel: str, code: str = "") -> None:
    (folder / wheel).mkdir()
    (folder / wheel / "__init__.py").write_text(code)
    (folder / wheel / "_bindings.py").write_text(f"wheel = {wheel!r}")


@pytest.mark.parametrize(("cuda", "wheel"), [("12.9", "nixl_cu12"), ("13.0", "nixl_cu13"), (None, "nixl_cu12")])
def test_the_wheel_is_the_one_of_torchs_cuda(wheels: Path, cuda: str | None, wheel: str) -> None:
    install(wheels, "nixl_cu12")
    install(wheels, "nixl_cu13")
    assert load_wheel(cuda).wheel == wheel


def test_host_memory_takes_any_wheel(wheels: Path) -> None:
    install(wheels, "nixl_cu13")
    assert load_wheel(None).wheel == "nixl_cu13"


@pytest.mark.parametrize(("cuda", "other"), [("12.9", "nixl_cu13"), ("13.0", "nixl_cu12")])
def test_a_wheel_of_another_cuda_is_not_taken_for_a_gpu(wheels: Path, cuda: str, other: str) -> None:
    install(wheels, other)
    wanted = f"nixl-cu{cuda[:2]}"
    with pytest.raises(ConfigError, match=rf"{wanted} is not installed: torch was built for CUDA {cuda}.*pip install"):
        load_wheel(cuda)


def test_a_wheel_that_is_broken_says_so_itself(wheels: Path) -> None:
    install(wheels, "nixl_cu13", "import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_wheel("13.0")
