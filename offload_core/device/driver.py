"""Kernels of our own, loaded and launched through the NVIDIA driver's C interface.

There is nothing to build or to install. Names nothing of torch, and nothing that needs a device
before ``load_kernel`` is called.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# One calling convention on every 64-bit system.
_open = ctypes.CDLL
_SUCCESS = 0


class DriverError(Exception):
    """The driver or its compiler cannot be reached, or refused; the text says which call."""


@dataclass(frozen=True)
class Kernel:
    """One kernel in one device's context. It stays there as long as the process."""

    _library: ctypes.CDLL
    _function: ctypes.c_void_p

    def launch(self, blocks: int, threads: int, stream: int, arguments: Sequence[Any]) -> None:
        """Start ``blocks`` times ``threads`` threads.

        Args:
            stream: the driver's handle; the context of its device is current on this thread.
            arguments: ctypes values, of the types that the kernel takes. The driver copies them.
        Raises: DriverError.
        """
        pointers = (ctypes.c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in arguments)
        )
        shape = (blocks, 1, 1, threads, 1, 1, 0)
        code = self._library.cuLaunchKernel(
            self._function, *shape, ctypes.c_void_p(stream), pointers, None
        )
        _check(code, "cuLaunchKernel")


def load_kernel(image: bytes, entry: str) -> Kernel:
    """``entry`` of an image (PTX text or machine code) in the context that is current on this
    thread. Raises: DriverError."""
    library = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(library.cuModuleLoadData(ctypes.byref(module), image), "cuModuleLoadData")
    name = entry.encode("ascii")
    _check(library.cuModuleGetFunction(ctypes.byref(function), module, name), "cuModuleGetFunction")
    return Kernel(library, function)


def _driver() -> ctypes.CDLL:
    try:
        library = _open(_LIBRARY)
    except OSError as error:
        raise DriverError(f"the driver's library cannot be opened: {error}") from error
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    try:
        library.cuModuleLoadData.argtypes = (pointer, ctypes.c_char_p)
        library.cuModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
        library.cuLaunchKernel.argtypes = (pointer, *(unsigned,) * 7, pointer, pointer, pointer)
    except AttributeError as error:
        raise DriverError(f"the driver's library is of another kind: {error}") from error
    return library


def _check(code: int, call: str) -> None:
    if code != _SUCCESS:
        raise DriverError(f"{call} answered {code}")
