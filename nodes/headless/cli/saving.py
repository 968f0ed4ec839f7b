"""What a run wrote, brought here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..client.blocking import CourierClient
from ..client.records import Run
from ..errors import HeadlessError, UsageError
from ..text import text_of

_UNSAFE = re.compile(r'[\x00-\x1f<>:"/\\|?*]')


def save_files(client: CourierClient, run: Run, folder: Path) -> list[Path]:
    """Every file of the run into ``folder``, which is made; no file that is there is replaced.

    Raises: UsageError where the folder cannot be made; HeadlessError where a file cannot be
        written, which leaves nothing of it; RefusedError where a file is gone.
    """
    make_folder(folder)
    return [
        _saved(folder / safe_name(file.filename), client.download(file)) for file in run.files()
    ]


def make_folder(folder: Path) -> None:
    """Raises: UsageError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--save {text_of(str(folder))}: {error.strerror}") from None


def _saved(path: Path, data: bytes) -> Path:
    try:
        return _write_new(path.parent, path.name, data)
    except OSError as error:
        raise HeadlessError(
            f"--save {text_of(str(path))}: {error.strerror}; the run is done, and the server has "
            "what it wrote"
        ) from None


def safe_name(name: str) -> str:
    """A file's name that stays in its folder, on every system."""
    last = re.split(r"[\\/]", name)[-1]
    # As bytes of UTF-8: under LC_ALL=C a name that is not ASCII could not be written otherwise.
    return os.fsdecode(_UNSAFE.sub("_", last).strip(". ").encode("utf-8", "replace")) or "file"


def _write_new(folder: Path, name: str, data: bytes) -> Path:
    stem, dot, ending = name.rpartition(".")
    number = 0
    while True:
        tried = name if not number else f"{stem or name} ({number}){dot}{ending if dot else ''}"
        path = folder / tried
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            number += 1
        except OSError:
            path.unlink(missing_ok=True)
            raise
        else:
            return path
