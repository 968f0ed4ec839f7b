"""ComfyUI in this process, as its main.py would set it up. For contenders; nothing of it is copied.

Needs the environment variables of tests/comfyui/bootstrap.py and its folder on PYTHONPATH.
"""

from __future__ import annotations

import inspect
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

AIMDO = "comfy_aimdo"


class ProgramError(Exception):
    """This ComfyUI cannot do what was asked of it."""


def start(comfyui_args: str = "", dynamic: bool = False) -> ModuleType:
    """Make ComfyUI importable, with its arguments set. Returns: the bootstrap module.

    Call it before torch is imported where ``dynamic`` is asked for: comfy-aimdo puts itself
    between torch and the driver.

    Raises: ProgramError without comfy-aimdo, or on a card that it does not drive.
    """
    if dynamic:
        _prepare_dynamic()
    import bootstrap

    sys.path.insert(0, str(bootstrap.comfyui_path()))
    if comfyui_args.strip():
        # Its parser reads the command line of whoever imports it, if it is told to.
        sys.argv = ["main.py", *shlex.split(comfyui_args)]
        import comfy.options

        comfy.options.enable_args_parsing()
    bootstrap.load_comfyui()
    if dynamic:
        _enable_dynamic()
    # A ComfyUI that has started has these long since: their import belongs to no load.
    import comfy.sample
    import comfy.sd

    return bootstrap


def _prepare_dynamic() -> None:
    if "torch" in sys.modules:
        raise ProgramError("torch was imported before dynamic VRAM could be prepared")
    try:
        import comfy_aimdo.control as control
    except ImportError as error:
        raise ProgramError(f"dynamic VRAM needs comfy-aimdo ({error})") from None
    # Releases differ in what init takes; main.py asks for NVML's figures where it can.
    takes_nvml = "nvml_pressure" in inspect.signature(control.init).parameters
    if control.init(**({"nvml_pressure": True} if takes_nvml else {})) is False:
        raise ProgramError("comfy-aimdo could not be loaded on this system")


def _enable_dynamic() -> None:
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control as control

    device = comfy.model_management.get_torch_device()
    if device.type != "cuda" or not control.init_devices([device.index or 0]):
        raise ProgramError(f"comfy-aimdo does not drive {device}")
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


@contextmanager
def node() -> Iterator[None]:
    """What surrounds a node in ComfyUI's executor: inference mode, and a clean-up after it."""
    import torch

    try:
        with torch.inference_mode():
            yield
    finally:
        management = sys.modules.get("comfy.memory_management")
        if management is not None and getattr(management, "aimdo_enabled", False):
            _clean_up_dynamic()


def _clean_up_dynamic() -> None:
    import comfy.model_management
    import comfy.model_prefetch
    import comfy_aimdo.model_vbar

    comfy.model_management.reset_cast_buffers()
    comfy.model_prefetch.cleanup_prefetch_queues()
    comfy_aimdo.model_vbar.vbars_reset_watermark_limits()


def touch_device() -> None:
    """Make the CUDA context, so that it is counted to nobody."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def versions() -> dict[str, str]:
    """What this process consists of."""
    import comfyui_version
    import torch

    found = {
        "comfyui": comfyui_version.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "native",
    }
    if AIMDO in sys.modules:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found["comfy-aimdo"] = version("comfy-aimdo")
        except PackageNotFoundError:
            found["comfy-aimdo"] = "unknown"
    return found


def load_core(path: Path) -> Any:
    """The model by the core's own loader node."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options={})


def let_go() -> None:
    """Unload every model; what nobody holds is freed with it."""
    import gc

    import comfy.model_management

    gc.collect()
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


@dataclass(frozen=True)
class Pack:
    """The modules of the pack's own copy that benchmarks use."""

    loading: ModuleType
    values: ModuleType
    service: ModuleType
    wire: ModuleType
    run: ModuleType
    device: ModuleType
    host: ModuleType
    events: ModuleType
    event_source: ModuleType
    control: ModuleType
    orders: ModuleType


def load_pack() -> Pack:
    """The pack as ComfyUI imports it. Quick when it was done before."""
    import bootstrap

    pack = bootstrap.load_pack()
    names = (
        "nodes.comfyui.loading",
        "offload_core.values",
        "nodes.models.registry",
        "nodes.models.status_json",
    )
    core = ("offload_core.run", "offload_core.device", "offload_core.host")
    events = ("nodes.models.events", "nodes.comfyui.events")
    orders = ("nodes.requests.records", "nodes.comfyui.orders")
    return Pack(*(bootstrap.submodule(pack, name) for name in (*names, *core, *events, *orders)))


def load_courier(path: Path, device_bytes: int | None, host_bytes: int | None) -> Any:
    """The model by the pack's loader. ComfyUI searches the file's whole folder for it."""
    import folder_paths

    pack = load_pack()
    folder_paths.add_model_folder_path("diffusion_models", str(path.parent.absolute()))
    budget = pack.values.Budget(device_bytes, host_bytes)
    return pack.loading.load_diffusion_model(path.name, "default", budget)
