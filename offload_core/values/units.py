"""Bytes as people read them. GiB exists only in text; everything else counts bytes."""

from __future__ import annotations

import math

from .errors import ConfigError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def size_text(size_bytes: int) -> str:
    """``size_bytes`` for people: the largest unit that leaves a number of at least one."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} B"


def shortened(text: str, characters: int) -> str:
    """``text``, cut to so many characters; that it was cut shows."""
    return text if len(text) <= characters else f"{text[: characters - 3]}..."


def gib_to_bytes(value: object, name: str) -> int:
    """Bytes of a GiB figure that a user typed.

    Args:
        value: int or float, finite, >= 0. Text is refused even when it reads as a number: a
            budget of "2GB" that silently means something else is worse than an error.
        name: what to call the field in an error.
    Raises: ConfigError.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number of GiB, not {value!r}; write 12 for 12 GiB")
    if not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} must be a finite number of GiB, 0 or more, not {value!r}")
    return int(value * GIB)


def gib_text(size_bytes: int) -> str:
    """``size_bytes`` as a GiB figure to type, rounded up to thousandths so that it suffices."""
    return f"{math.ceil(size_bytes * 1000 / GIB) / 1000:g}"


def align_up(offset: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is not below ``offset``."""
    return -(-offset // alignment) * alignment


def whole_pages(start: int, end: int, page_bytes: int) -> tuple[int, int]:
    """Start and length of the whole pages between two addresses; the length may be 0."""
    first, last = align_up(start, page_bytes), align_down(end, page_bytes)
    return first, max(0, last - first)


def align_down(offset: int, alignment: int) -> int:
    """The largest multiple of ``alignment`` that is not above ``offset``."""
    return offset // alignment * alignment
