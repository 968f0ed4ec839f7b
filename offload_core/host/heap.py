"""What the C library's allocator keeps of memory that was freed."""

from __future__ import annotations

import ctypes
import sys


def give_back_freed() -> bool:
    """Have the system take back what is free in the heap; whether there is a way to ask for it.

    glibc gives blocks of more than its threshold (up to 32 MiB) back when they are freed and keeps
    all others: of a model that was let go, that may be most of it. Other allocators have ways of
    their own, and are left alone. Takes milliseconds, and some more for each GiB that goes.

    Threads: any; others that allocate meanwhile wait.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)
    return True
