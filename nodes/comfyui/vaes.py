"""Names of VAEs as ComfyUI's own loader offers them, and the files behind each name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .build.diffusion import open_checkpoint
from .build.vae import VaeFile
from .files import names_in, path_of

FOLDER, SMALL_FOLDER = "vae", "vae_approx"
PIXELS = "pixel_space"
"""Not a model: ComfyUI's name for no VAE at all."""
_METADATA = {"taef2": {"tae_latent_channels": 128}}
"""What ComfyUI's own loader adds for a name."""


def vae_names() -> list[str]:
    """What the core's own loader would offer; where its nodes are not loaded, the files alone."""
    loader = _core_loader()
    return names_in(FOLDER) if loader is None else list(loader.vae_list(loader))


def offered_vae(name: str) -> str | None:
    """The offered name that ``name`` means, whichever separator its workflow was saved with."""
    names = vae_names()
    wanted = name.replace("\\", "/")
    return (
        name
        if name in names
        else next((known for known in names if known.replace("\\", "/") == wanted), None)
    )


def vae_paths(name: str) -> tuple[Path, ...]:
    """The files behind an offered name: one, two of a small one made of two halves, or none."""
    if name == PIXELS:
        return ()
    halves = _halves(name)
    if halves:
        return tuple(path_of(half, SMALL_FOLDER) for half in halves)
    loader = _core_loader()
    videos = () if loader is None else loader.video_taes
    is_small = Path(name).stem in videos
    return (path_of(name, SMALL_FOLDER if is_small else FOLDER),)


def open_vae(name: str, read_limit_bytes: int) -> VaeFile:
    """What ComfyUI makes the VAE of that name of, mapped. Raises: CheckpointError."""
    opened = [open_checkpoint(path, read_limit_bytes) for path in vae_paths(name)]
    metadata: dict[str, Any] = dict(opened[0].metadata) if len(opened) == 1 else {}
    metadata |= _METADATA.get(name, {})
    mappings = tuple(mapping for one in opened for mapping in one.mappings)
    note = "; ".join(filter(None, (one.note for one in opened)))
    if len(opened) == 1:
        return VaeFile(opened[0].name, opened[0].state_dict, metadata, mappings, note)
    loader = _core_loader()
    assert loader is not None, "only it knows of such names"
    # ComfyUI's own constants of that name; the weights beside them are the files' own.
    state_dict = dict(loader.load_taesd(name))
    for prefix, half in zip(("taesd_encoder.", "taesd_decoder."), opened, strict=True):
        state_dict |= {f"{prefix}{key}": value for key, value in half.state_dict.items()}
    return VaeFile(name, state_dict, metadata, mappings, note)


def _halves(name: str) -> tuple[str, ...]:
    loader = _core_loader()
    if loader is None or name not in loader.image_taes:
        return ()
    small = names_in(SMALL_FOLDER)
    return tuple(
        next(one for one in small if one.startswith(f"{name}_{half}."))
        for half in ("encoder", "decoder")
    )


def _core_loader() -> Any:
    nodes = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return nodes.get("VAELoader")
