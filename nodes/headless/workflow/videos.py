"""The workflow that ComfyUI writes into videos: MP4 and MOV, WEBM and MKV. No frame is decoded.

ComfyUI hands "prompt" and "workflow" to its muxer as metadata. In an MP4 these are entries of the
box moov/udta/meta or moov/meta (keys, and a list of values by the number of their key); in a WEBM,
tags of the segment. Where there are no such keys, a comment with both in one JSON is read, as packs
write it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import NoReturn

from ..errors import WorkflowFileError

KEYS = ("prompt", "workflow")
MAX_TEXT_BYTES = 64 << 20
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT, _TAGS, _TAG, _SIMPLE = 0x18538067, 0x1254C367, 0x7373, 0x67C8
_NAME, _STRING = 0x45A3, 0x4487
_PARENTS = frozenset((_SEGMENT, _TAGS, _TAG))
_DEEPEST = 8


def video_kind(data: bytes) -> str | None:
    """None: it is no video of a kind that is known."""
    if data[4:8] == b"ftyp":
        return "MP4"
    return "WEBM" if data.startswith(_EBML) else None


def video_metadata(data: bytes, file_name: str) -> dict[str, bytes]:
    """ "prompt" and "workflow", as far as they are there, as the bytes of JSON in UTF-8.

    Raises: WorkflowFileError where the video is damaged before its metadata.
    """
    texts = _mp4_texts(data) if video_kind(data) == "MP4" else _webm_texts(data)
    found: dict[str, bytes] = {}
    try:
        for name, text in texts:
            key = name.rpartition(".")[2].lower()  # some muxers write "com.something.prompt"
            if key in KEYS:
                found.setdefault(key, text)
            elif key in ("comment", "©cmt"):
                for inner, value in _both_in_one(text):
                    found.setdefault(inner, value)
    except (struct.error, IndexError, RecursionError):
        if not found:
            _refuse(file_name)
    return found


def _both_in_one(text: bytes) -> Iterator[tuple[str, bytes]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    for key in KEYS if isinstance(value, dict) else ():
        inner = value.get(key)
        if isinstance(inner, (dict, str)):
            yield key, inner.encode() if isinstance(inner, str) else json.dumps(inner).encode()


# MP4: ISO/IEC 14496-12, and QuickTime's metadata.


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, begin, end) of the content of each box."""
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        head = 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start + 8)
            head = 16
        stop = end if size == 0 else start + size
        if size and size < head:
            return
        yield kind, start + head, min(stop, end)
        start = stop


def _mp4_texts(data: bytes, start: int = 0, end: int | None = None) -> Iterator[tuple[str, bytes]]:
    for kind, begin, stop in _boxes(data, start, len(data) if end is None else end):
        if kind in (b"moov", b"udta"):
            yield from _mp4_texts(data, begin, stop)
        elif kind == b"meta":
            # ISO's has a version of four bytes before its boxes, QuickTime's has none.
            is_full = data[begin + 4 : begin + 8] not in (b"hdlr", b"keys", b"ilst")
            yield from _meta_texts(data, begin + 4 if is_full else begin, stop)


def _meta_texts(data: bytes, start: int, end: int) -> Iterator[tuple[str, bytes]]:
    names: list[str] = []
    for kind, begin, stop in _boxes(data, start, end):
        if kind == b"keys":
            found = _boxes(data, begin + 8, stop)
            names = [data[a:b].decode("utf-8", "replace") for _, a, b in found]
        elif kind == b"ilst":
            for item, a, b in _boxes(data, begin, stop):
                number = int.from_bytes(item, "big")
                known = 0 < number <= len(names)
                name = names[number - 1] if known else item.decode("latin-1")
                for inner, c, d in _boxes(data, a, b):
                    if inner == b"data" and d - c <= MAX_TEXT_BYTES:
                        yield name, data[c + 8 : d]


# WEBM: RFC 8794 (EBML), and Matroska's tags.


def _webm_texts(data: bytes) -> Iterator[tuple[str, bytes]]:
    for name, text in _tags(data, 0, len(data), 0):
        yield name.decode("utf-8", "replace"), text


def _tags(data: bytes, start: int, end: int, depth: int) -> Iterator[tuple[bytes, bytes]]:
    for element, begin, stop in _elements(data, start, end):
        if element == _SIMPLE:
            parts = {e: data[a:b] for e, a, b in _elements(data, begin, stop)}
            yield parts.get(_NAME, b""), parts.get(_STRING, b"")[:MAX_TEXT_BYTES]
        elif element in _PARENTS and depth < _DEEPEST:
            yield from _tags(data, begin, stop, depth + 1)


def _elements(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(id, begin, end) of the content of each. One without a size goes on to its parent's end."""
    while start < end:
        element, start = _number(data, start, keeps_mark=True)
        size, start = _number(data, start, keeps_mark=False)
        stop = end if size < 0 else start + size
        yield element, start, min(stop, end)
        start = stop


def _number(data: bytes, start: int, keeps_mark: bool) -> tuple[int, int]:
    """A number of one to eight bytes; -1: it says "unknown"."""
    first = data[start]
    length = 9 - first.bit_length()
    if not first or start + length > len(data):
        raise IndexError(start)
    value = int.from_bytes(data[start : start + length], "big")
    if not keeps_mark:
        value &= (1 << 7 * length) - 1
        if value == (1 << 7 * length) - 1:
            value = -1
    return value, start + length


def _refuse(file_name: str) -> NoReturn:
    raise WorkflowFileError(f"{file_name} is a damaged video; download or copy it again")
