"""Memory that was freed, and what the C library keeps of it."""

from __future__ import annotations

import ctypes
import sys

import pytest

from offload_core.host import give_back_freed, process_memory

MIB = 1 << 20
PIECE_BYTES = 64 << 10  # far below any threshold from which blocks have pages of their own


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' allocators differ")
def test_pieces_freed_below_one_that_stays_go_back() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(256 * MIB // PIECE_BYTES)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE_BYTES)
    stays = libc.malloc(PIECE_BYTES)
    for piece in pieces:
        libc.free(piece)
    kept = process_memory().rss_anon_bytes
    assert give_back_freed()
    left = process_memory().rss_anon_bytes
    libc.free(stays)
    assert kept is not None
    assert left is not None
    assert kept - left > 200 * MIB
