"""The CUDA context of the transfer thread, by the driver alone: neither torch nor the CUDA runtime is asked.

A context is current in one thread only. UCX looks for one in the thread that starts it, and without one it leaves out
cuda_ipc and cuda_copy, so that KV would take the way over the host. `torch.cuda.set_device(0)` makes none current: it does
nothing in a thread whose device is 0 already, as every new thread's is.

NIXL's own progress thread has no context either, and we have no way to give it one. UCX has been reported to crash there
where it uses cuda_copy; whether it does here only a GPU can show.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

from pdserve.core.errors import TransferFailed

_LIBRARY: Final = "libcuda.so.1"


class GpuContext(Protocol):
    """What the transport needs of the GPU that its memory is on. Made and used in the transfer thread."""

    def synchronize(self) -> None:
        """Return once all work that any thread has given to the GPU is done."""
        ...

    def close(self) -> None: ...


class CudaContext:
    """The primary context of a GPU, which is the one that torch uses; current in the thread that makes this."""

    def __init__(self, index: int, driver: Any = None) -> None:
        """`driver`: the loaded library, for tests. Raises `TransferFailed` with the driver's error."""
        self._driver = _load() if driver is None else driver
        self._device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._retained = True
        try:
            self._call("cuCtxSetCurrent", context)
        except TransferFailed:
            self.close()
            raise

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Idempotent."""
        if self._retained:
            self._retained = False
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise TransferFailed(f"{name} of the CUDA driver failed with error {status}")


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as exc:
        raise TransferFailed(f"the CUDA driver cannot be loaded: {exc}") from exc
