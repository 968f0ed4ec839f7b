"""The workflow that ComfyUI writes into pictures. No pixel is decoded."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NoReturn

from ..errors import WorkflowFileError

KEYS = ("prompt", "workflow")
MAX_TEXT_BYTES = 64 << 20
_PNG = b"\x89PNG\r\n\x1a\n"
_EXIF_HEAD = b"Exif\0\0"
_ASCII = 2
_RAW_KEYS = frozenset(key.encode() for key in KEYS)
_LONGEST_KEY = max(len(key) for key in KEYS) + 1


def is_picture(data: bytes) -> bool:
    """Whether it is a picture of a kind that people keep workflows in, or might think so."""
    return _kind(data) is not None


def metadata_of(data: bytes, file_name: str) -> dict[str, bytes]:
    """ "prompt" and "workflow", as far as they are there, as the bytes of JSON in UTF-8.

    Raises: WorkflowFileError where the picture is damaged, or of a kind that holds none.
    """
    kind = _kind(data)
    if kind == "PNG":
        texts = _png_texts(data, file_name)
    elif kind == "WEBP":
        texts = _webp_texts(data, file_name)
    else:
        raise WorkflowFileError(
            f"{file_name} is a {kind}, which holds no workflow: PNG and WEBP do"
        )
    found: dict[str, bytes] = {}
    for key, text in texts:
        if key.lower() in KEYS:
            found.setdefault(key.lower(), text)
    return found


def _kind(data: bytes) -> str | None:
    if data.startswith(_PNG):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "GIF" if data.startswith((b"GIF87a", b"GIF89a")) else None


def _png_texts(data: bytes, file_name: str) -> Iterator[tuple[str, bytes]]:
    offset = len(_PNG)
    while offset < len(data):
        if offset + 12 > len(data):
            _refuse(file_name)
        size, name = struct.unpack_from(">I4s", data, offset)
        body = data[offset + 8 : offset + 8 + size]
        if len(body) < size or offset + 12 + size > len(data):
            _refuse(file_name)
        (checksum,) = struct.unpack_from(">I", data, offset + 8 + size)
        if name in (b"tEXt", b"zTXt", b"iTXt", b"comf"):  # the last: ComfyUI's, in animations
            if zlib.crc32(name + body) != checksum:
                _refuse(file_name)
            # Before it is unpacked: others may be large, and many.
            if body.partition(b"\0")[0].lower() in _RAW_KEYS:
                yield _png_text(name, body, file_name)
        elif name == b"IEND":
            return
        offset += 12 + size


def _png_text(name: bytes, body: bytes, file_name: str) -> tuple[str, bytes]:
    """Source: the PNG specification, textual information."""
    key, _, rest = body.partition(b"\0")
    keyword = key.decode("latin-1")
    if name in (b"tEXt", b"comf"):
        # Latin-1 by the book. What ComfyUI writes is ASCII; others write UTF-8.
        return keyword, rest if _is_utf8(rest) else rest.decode("latin-1").encode()
    if name == b"zTXt":
        return keyword, _inflated(rest[1:], file_name).decode("latin-1").encode()
    is_packed = rest[:1] == b"\x01"
    text = rest[2:].split(b"\0", 2)[-1]
    return keyword, _inflated(text, file_name) if is_packed else text


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _inflated(packed: bytes, file_name: str) -> bytes:
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(packed, MAX_TEXT_BYTES)
    except zlib.error:
        _refuse(file_name)
    if unpack.unconsumed_tail:
        _refuse(file_name)
    return text


def _webp_texts(data: bytes, file_name: str) -> Iterator[tuple[str, bytes]]:
    offset = 12
    while offset + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, offset)
        body = data[offset + 8 : offset + 8 + size]
        if len(body) < size:
            _refuse(file_name)
        if name == b"EXIF":
            yield from _exif_texts(body.removeprefix(_EXIF_HEAD), file_name)
        offset += 8 + size + size % 2


def _exif_texts(exif: bytes, file_name: str) -> Iterator[tuple[str, bytes]]:
    """Of each text in the first directory, "key:value": ComfyUI takes whichever tags are free.

    Source: TIFF 6.0, section 2.
    """
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        _refuse(file_name)
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, start)
        seen: set[bytes] = set()
        for index in range(count):
            _, kind, size, where = struct.unpack_from(f"{order}HHII", exif, start + 2 + 12 * index)
            if kind != _ASCII or size <= 4:
                continue
            key = exif[where : where + _LONGEST_KEY].partition(b":")[0].lower()
            if key in _RAW_KEYS and key not in seen:  # thousands of entries may name one text
                seen.add(key)
                text = exif[where : where + size].rstrip(b"\0")
                yield key.decode("latin-1"), text.partition(b":")[2]
    except struct.error:
        _refuse(file_name)


def _refuse(file_name: str) -> NoReturn:
    raise WorkflowFileError(f"{file_name} is a damaged picture; download or copy it again")
