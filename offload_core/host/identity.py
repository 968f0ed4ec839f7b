"""Which file it is that was opened, and whether the path still leads to that very file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..values import CheckpointChangedError, size_text


@dataclass(frozen=True)
class FileIdentity:
    """What tells one version of a file from another without reading it.

    A rewrite that keeps inode, size and nanosecond mtime goes unseen; only a hash of the whole file
    would see it, and that costs as much as loading.
    """

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, source: int | str | os.PathLike[str]) -> FileIdentity:
        """The identity of an open descriptor, or of the file that a path leads to now.

        Raises: OSError.
        """
        found = os.stat(source)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def file_text(path: str | os.PathLike[str]) -> str:
    """``path`` as people wrote it, whatever the locale.

    Under LC_ALL=C Python holds the bytes of a CJK name as lone surrogates, which no log file, JSON
    or browser accepts; the bytes themselves are UTF-8 nearly always.
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def sizes_text(size_bytes: int) -> str:
    """A file size that is exact and readable: people compare it with a download page."""
    if size_bytes < 1024:
        return f"{size_bytes} bytes"
    return f"{size_bytes} bytes ({size_text(size_bytes)})"


def check_unchanged(path: Path, identity: FileIdentity) -> None:
    """Refuse when ``path`` no longer leads to the file that ``identity`` was taken from.

    Reading a mapping of a truncated file kills the process with SIGBUS, and one of a rewritten file
    gives other numbers without a word, so this runs before each use.

    Raises: CheckpointChangedError, saying what happened to the file.
    """
    try:
        now = FileIdentity.of(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _changed(path, "was deleted, moved or renamed") from None
    except OSError as error:
        raise _changed(path, f"cannot be examined any more ({error.strerror})") from error
    if now != identity:
        raise _changed(path, difference_text(identity, now))


def check_not_rewritten(path: Path, identity: FileIdentity) -> None:
    """Raises: CheckpointChangedError if ``path`` still leads to that file, with other bytes."""
    try:
        now = FileIdentity.of(path)
    except OSError:
        return
    same_file = (now.device, now.inode) == (identity.device, identity.inode)
    if same_file and now != identity:
        raise _changed(path, difference_text(identity, now))


def difference_text(before: FileIdentity, now: FileIdentity) -> str:
    """How two identities taken at one path differ, as the predicate of a sentence."""
    if (now.device, now.inode) != (before.device, before.inode):
        return (
            f"was replaced by another file of {sizes_text(now.size_bytes)} "
            f"(it had {sizes_text(before.size_bytes)})"
        )
    if now.size_bytes < before.size_bytes:
        was = sizes_text(before.size_bytes)
        return f"was truncated to {sizes_text(now.size_bytes)} from {was}"
    if now.size_bytes > before.size_bytes:
        return f"grew to {sizes_text(now.size_bytes)} from {sizes_text(before.size_bytes)}"
    return f"was rewritten in place ({sizes_text(now.size_bytes)} as before, but a later time)"


def _changed(path: Path, what: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{file_text(path)} {what} since it was opened; its weights can no longer be trusted: "
        "load the model again"
    )
