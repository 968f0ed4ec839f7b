"""Text from and to a terminal, whatever the system says that its encoding is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO


def text_of(argument: str) -> str:
    """An argument as it was typed: under LC_ALL=C Python keeps each byte of UTF-8 as a surrogate.

    For text only. A path stays as Python gave it, or the system does not find the file.
    """
    try:
        return argument.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return argument.encode("utf-8", "replace").decode()


def make_writable() -> None:
    """Have standard output and error take any character: what they cannot show, they spell out."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIO) or hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def one_line(text: str) -> str:
    """``text`` without what would break a line, or hide on it."""
    return "".join(c if c.isprintable() else " " for c in text)


def plain(text: str) -> str:
    """Lines without what a terminal would obey: ids, classes and files may be called anything."""
    return "\n".join(one_line(line) for line in text.split("\n"))


def some_of(names: Sequence[str], most: int = 8) -> str:
    """The first of them in a line, and how many more there are."""
    more = len(names) - most
    shown = ", ".join(names[:most]) or "none"
    return f"{shown} and {more} more" if more > 0 else shown


def table(rows: Sequence[tuple[str, ...]], right: frozenset[int] = frozenset()) -> list[str]:
    """Columns, as wide as they have to be. ``right``: those that are figures."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
