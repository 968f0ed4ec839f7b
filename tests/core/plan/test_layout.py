"""How tensors lie in a buffer: aligned, in one piece where the file allows it."""

from __future__ import annotations

import random

from offload_core.plan import ALIGNMENT, BufferLayout, Extent, Piece, lay_out


def test_neighbours_in_the_file_travel_in_one_piece() -> None:
    layout = lay_out([Extent(4096, 512), Extent(4608, 256), Extent(4864, 100)])
    assert layout == BufferLayout((0, 512, 768), (Piece(4096, 868, 0),), 1024)


def test_a_neighbour_that_would_not_be_aligned_opens_a_piece_of_its_own() -> None:
    layout = lay_out([Extent(0x1000, 3), Extent(0x1003, 10)])
    assert layout == BufferLayout((0, 256), (Piece(0x1000, 3, 0), Piece(0x1003, 10, 256)), 512)


def test_a_gap_in_the_file_is_not_copied() -> None:
    layout = lay_out([Extent(0x1000, 256), Extent(0x2000, 256)])
    assert layout.pieces == (Piece(0x1000, 256, 0), Piece(0x2000, 256, 256))
    assert layout.size_bytes == 512


def test_the_order_of_the_extents_is_kept_in_the_offsets() -> None:
    layout = lay_out([Extent(0x2000, 256), Extent(0x1000, 256)])
    assert layout.offsets == (256, 0)
    assert [piece.address for piece in layout.pieces] == [0x1000, 0x2000]


def test_empty_tensors_take_no_room_and_break_no_piece() -> None:
    layout = lay_out([Extent(0, 0), Extent(0x1000, 256), Extent(0x1100, 0), Extent(0x1100, 256)])
    assert layout.pieces == (Piece(0x1000, 512, 0),)
    assert lay_out([Extent(0, 0)]) == BufferLayout((0,), (), 0)
    assert lay_out([]) == BufferLayout((), (), 0)


def test_two_views_of_one_storage_each_get_their_bytes() -> None:
    layout = lay_out([Extent(0x1000, 256), Extent(0x1000, 256)])
    assert sorted(layout.offsets) == [0, 256]
    assert layout.size_bytes == 512


def test_any_extents_are_aligned_disjoint_and_complete() -> None:
    chance = random.Random(0)
    for _ in range(300):
        address, extents = 0x10000, []
        for _ in range(chance.randrange(12)):
            address += chance.choice([0, 0, 0, 1, 64, 5000])
            size = chance.choice([0, 1, 3, 255, 256, 512, 1000, 4096])
            extents.append(Extent(address, size))
            address += size
        chance.shuffle(extents)
        layout = lay_out(extents)
        memory = bytearray(layout.size_bytes)
        for piece in layout.pieces:
            assert 0 <= piece.offset <= layout.size_bytes - piece.size_bytes
            assert not any(memory[piece.offset : piece.offset + piece.size_bytes])
            for byte in range(piece.size_bytes):
                memory[piece.offset + byte] = (piece.address + byte) % 251 + 1
        assert layout.size_bytes % ALIGNMENT == 0
        for extent, offset in zip(extents, layout.offsets, strict=True):
            assert offset % ALIGNMENT == 0
            got = memory[offset : offset + extent.size_bytes]
            want = bytes((extent.address + i) % 251 + 1 for i in range(extent.size_bytes))
            assert got == want
