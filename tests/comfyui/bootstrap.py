"""For scripts that a test runs in a fresh process: ComfyUI importable, the pack loaded as it does.

A script is started by the fixture ``run_in_comfyui``, which also sets the environment variables
read here. It begins with::

    import bootstrap

    pack = bootstrap.load_pack()                  # the pack's own module
    model = bootstrap.load_stock("wan")           # a core ModelPatcher of a small model
    latent = bootstrap.sample(model, steps=2)     # float32 latent

Importing this module starts nothing. ``load_comfyui`` sets ComfyUI's arguments before anything of
it is imported; with a CPU-only torch, ``comfy.model_management`` raises without ``cpu``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

COMFYUI_VARIABLE = "COURIER_TEST_COMFYUI"
BASE_VARIABLE = "COURIER_TEST_BASE"
PACK_VARIABLE = "COURIER_TEST_PACK"


def comfyui_path() -> Path:
    return Path(os.environ[COMFYUI_VARIABLE])


def base_path() -> Path:
    return Path(os.environ[BASE_VARIABLE])


def pack_path() -> Path:
    """The pack's folder, at its place among ComfyUI's custom nodes."""
    return Path(os.environ[PACK_VARIABLE])


def load_comfyui(**arguments: Any) -> ModuleType:
    """Make ComfyUI importable, as ``main.py --base-directory BASE [--cpu]`` would run it.

    Args:
        arguments: further values for ``comfy.cli_args.args``, such as ``fp32_unet=True``.
    Returns: ``comfy.cli_args.args``.
    """
    folder = str(comfyui_path())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from comfy.cli_args import args

    args.cpu = not torch.cuda.is_available()
    args.base_directory = str(base_path())
    for name, value in arguments.items():
        if not hasattr(args, name):
            raise AttributeError(f"ComfyUI has no argument {name}")
        setattr(args, name, value)
    import folder_paths

    # main.py takes "utils" before "nodes" puts comfy's own folder, with another utils, on the path.
    import utils.extra_config  # noqa: F401

    folder_paths.set_temp_directory(str(base_path() / "temp"))
    return args


def load_pack(folder: Path | None = None) -> ModuleType:
    """Import the pack under the name that ComfyUI gives it; submodules hang below that name."""
    load_comfyui()
    folder = folder or pack_path()
    name = str(folder).replace(".", "_x_")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def submodule(pack: ModuleType, name: str) -> ModuleType:
    """A module of the pack's own copy, such as ``submodule(pack, "offload_core.plan")``."""
    return importlib.import_module(f"{pack.__name__}.{name}")


def model_file(key: str) -> Path:
    """A small model's path by its key, such as ``wan``, ``sd3``, ``wan_lora``."""
    from devtools.small_models import small_model_set

    models = base_path() / "models"
    files = {small.key: models / small.file for small in small_model_set(models)}
    return files[key]


def load_stock(key: str, **model_options: Any) -> Any:
    """A small diffusion model through the core's own loader: a ModelPatcher."""
    load_comfyui()
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(model_file(key)), model_options=model_options)


def add_lora(model: Any, key: str, strength: float = 1.0) -> Any:
    """A clone with a LoRA on it, as LoraLoaderModelOnly makes it."""
    import comfy.sd
    import comfy.utils

    lora = comfy.utils.load_torch_file(str(model_file(key)), safe_load=True)
    return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]


def conditioning(model: Any, seed: int = 0, tokens: int = 24) -> list[Any]:
    """Seeded conditioning of the width that the model asks for."""
    config = model.model.model_config.unet_config
    width = config.get("context_dim") or 4096
    generator = torch.Generator().manual_seed(1000 + seed)
    options: dict[str, Any] = {}
    if config.get("adm_in_channels"):
        options["pooled_output"] = torch.randn((1, config["adm_in_channels"]), generator=generator)
    return [[torch.randn((1, tokens, width), generator=generator), options]]


def latent_shape(model: Any, size: int = 16, frames: int = 3) -> tuple[int, ...]:
    latent_format = model.model.latent_format
    time = (frames,) if latent_format.latent_dimensions == 3 else ()
    return (1, latent_format.latent_channels, *time, size, size)


def sample(
    model: Any, steps: int = 2, seed: int = 0, cfg: float = 1.0, **latent: int
) -> torch.Tensor:
    """Sample with the core's own sampler: euler, simple, seeded noise and conditioning.

    Args:
        latent: ``size`` and ``frames`` of the latent.
    Returns: the latent, float32, on the CPU.
    """
    import comfy.sample

    shape = latent_shape(model, **latent)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    positive, negative = conditioning(model, 0), conditioning(model, 1)
    empty = torch.zeros(shape)
    return comfy.sample.sample(
        model, noise, steps, cfg, "euler", "simple", positive, negative, empty, seed=seed,
        disable_pbar=True,
    )  # fmt: skip
