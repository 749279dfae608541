"""The CUDA context of the transfer thread. It comes from the driver alone, without torch or the CUDA runtime.

A context is current in one thread only. UCX looks for one in the thread that starts it. Without one it leaves out cuda_ipc
and cuda_copy, so that KV would go through host memory. `torch.cuda.set_device(0)` makes no context current: it does nothing
in a thread whose device is 0 already, and the device of every new thread is 0.

NIXL's own progress thread has no context either, and we cannot give it one. There are reports that UCX crashes in such a
thread when it uses cuda_copy. Only a GPU can show whether it does so here.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

from pdserve.core.errors import TransferFailed

_LIBRARY: Final = "libcuda.so.1"


class GpuContext(Protocol):
    """The calls that the transport makes on the GPU of its memory. The transfer thread makes and uses it."""

    def synchronize(self) -> None:
        """Return once all work that any thread has given to the GPU is done."""
        ...

    def close(self) -> None:
        """Give the context back. Idempotent."""
        ...


class CudaContext:
    """The primary context of a GPU, which torch uses too. It is current in the thread that makes this object."""

    def __init__(self, index: int, driver: Any = None) -> None:
        """Retain the context of GPU `index` and make it current. `driver` is the loaded library, for tests.

        Raises `TransferFailed` with the driver's error.
        """
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
        """Return once all work that any thread has given to the GPU is done. Raises `TransferFailed`."""
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        """Give the context back to the driver. Idempotent."""
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
