"""Files of models as ComfyUI's own loaders offer them, folder by folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import folder_paths

from ...offload_core.host import FileIdentity, resolve_shards
from ...offload_core.values import CourierError


def names_in(folder: str) -> list[str]:
    """The files that the core's own loader would offer out of a folder such as ``vae``."""
    return folder_paths.get_filename_list(folder)


def offered_name(name: str, folder: str = "diffusion_models") -> str | None:
    """The offered file that ``name`` means; None if there is none.

    A workflow saved on Windows says ``sub\\model.safetensors`` and one saved elsewhere
    ``sub/model.safetensors``. Only ever an entry of the list, so no name leads out of the folders.
    """
    names = names_in(folder)
    if name in names:
        return name
    wanted = name.replace("\\", "/")
    return next((known for known in names if known.replace("\\", "/") == wanted), None)


def path_of(name: str, folder: str = "diffusion_models") -> Path:
    """Where an offered file is. Raises: FileNotFoundError, ComfyUI's own."""
    return Path(folder_paths.get_full_path_or_raise(folder, offered_name(name, folder) or name))


def fingerprint_of(names: Iterable[str], folder: str = "diffusion_models") -> str:
    """What changes when a file of the model does: ComfyUI then runs the loader node again."""
    return fingerprint_of_paths(path_of(name, folder) for name in names)


def fingerprint_of_paths(paths: Iterable[Path]) -> str:
    """The same of files."""
    return " ".join(_identity_text(file) for path in paths for file in _shards(path))


def _shards(path: Path) -> tuple[Path, ...]:
    try:
        return tuple(resolve_shards(path))
    except CourierError:
        return (path,)  # the loader itself will say what is wrong with it


def _identity_text(file: Path) -> str:
    try:
        identity = FileIdentity.of(file)
    except OSError:
        return "unreadable"
    return f"{identity.device}:{identity.inode}:{identity.size_bytes}:{identity.mtime_ns}"
