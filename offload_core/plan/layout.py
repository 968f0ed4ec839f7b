"""How one layer's tensors lie in a flat device buffer. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..values.units import align_up

ALIGNMENT = 256
"""Every tensor starts on such a boundary: what CUDA's own allocator gives, and more than the 32
bytes that fp8 kernels ask for."""


@dataclass(frozen=True)
class Extent:
    """The host bytes of one tensor: ``size_bytes`` bytes from ``address`` on."""

    address: int
    size_bytes: int


@dataclass(frozen=True)
class Piece:
    """One contiguous copy: ``size_bytes`` from host ``address`` to ``offset`` in the buffer."""

    address: int
    size_bytes: int
    offset: int


@dataclass(frozen=True)
class BufferLayout:
    """Offsets of tensors in a buffer and the fewest copies that fill it.

    ``offsets`` is in the order of the extents given; ``pieces`` in the order of host addresses.
    """

    offsets: tuple[int, ...]
    pieces: tuple[Piece, ...]
    size_bytes: int


def lay_out(extents: Sequence[Extent], alignment: int = ALIGNMENT) -> BufferLayout:
    """Pack ``extents`` into one buffer, keeping neighbours in the file neighbours in the buffer.

    Tensors that follow each other in host memory share one piece as long as each still starts on
    an aligned offset; where one would not, it opens a piece of its own after a gap.
    """
    offsets = [0] * len(extents)
    pieces: list[Piece] = []
    end = 0
    for index in sorted(range(len(extents)), key=lambda i: extents[i].address):
        extent = extents[index]
        if extent.size_bytes == 0:
            continue
        last = pieces[-1] if pieces else None
        follows = last is not None and last.address + last.size_bytes == extent.address
        if last is not None and follows and end % alignment == 0:
            offsets[index] = end
            pieces[-1] = Piece(last.address, last.size_bytes + extent.size_bytes, last.offset)
        else:
            offsets[index] = align_up(end, alignment)
            pieces.append(Piece(extent.address, extent.size_bytes, offsets[index]))
        end = offsets[index] + extent.size_bytes
    return BufferLayout(tuple(offsets), tuple(pieces), align_up(end, alignment))
