"""What the pack uses of ComfyUI, beyond its public API: every name, and the arguments that matter.

Only a list, without an import, so that a developer's script can read it too. ``compat`` compares it
with the ComfyUI that runs, ``devtools.comfyui_symbols`` with the files of one that does not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

OLDEST_TRIED = "0.3.75"
NEWEST_TRIED = "0.33.0"


class Part(enum.Enum):
    """What does not work without a symbol, as a sentence begins."""

    LOAD = "Load Diffusion Model (Courier)"
    SLEEP = "sleep, wake and budgets of loaded models"
    QUEUE = "sleep, wake and budgets from outside of a workflow"
    RUNS = "runs over HTTP"
    PAGE = "Courier's routes and the events for the page"


@dataclass(frozen=True)
class Symbol:
    """A name in a module of ComfyUI.

    ``path``: from the module on, "Class.method" too. ``takes``: arguments that it has to have, or
    to take as any keyword. ``is_field``: an attribute that the class sets on its objects.
    """

    module: str
    path: str
    parts: tuple[Part, ...]
    takes: tuple[str, ...] = ()
    is_field: bool = False

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.module}.{self.path}"


def _of(
    module: str, parts: tuple[Part, ...], *paths: str | tuple[str, ...], is_field: bool = False
) -> tuple[Symbol, ...]:
    """``paths``: a path, or a path and the arguments after it."""
    split = [(path,) if isinstance(path, str) else path for path in paths]
    return tuple(Symbol(module, path, parts, takes, is_field) for path, *takes_ in split
                 for takes in (tuple(takes_),))  # fmt: skip


_LOAD, _BOTH = (Part.LOAD,), (Part.LOAD, Part.SLEEP)

SYMBOLS: tuple[Symbol, ...] = (
    *_of("comfy.cli_args", _LOAD, "args"),
    *_of(
        "comfy.model_management", _BOTH,
        "get_torch_device", "VRAMState", "VRAMState.NO_VRAM", "vram_state",
        ("get_free_memory", "dev"), "extra_reserved_memory",
        "throw_exception_if_processing_interrupted",
    ),
    *_of(
        "comfy.model_management", _LOAD,
        "unet_offload_device",
        ("unet_dtype", "device", "model_params", "supported_dtypes", "weight_dtype"),
        ("unet_manual_cast", "weight_dtype", "inference_device", "supported_dtypes"),
    ),
    *_of(
        "comfy.model_management", (Part.SLEEP,),
        "current_loaded_models", "soft_empty_cache", "cleanup_models",
        ("load_models_gpu", "models"),
        "LoadedModel", ("LoadedModel.__init__", "model"), "LoadedModel.model",
        ("LoadedModel.model_unload", "memory_to_free", "unpatch_weights"),
    ),
    *_of(
        "comfy.model_management", (Part.SLEEP,),
        "LoadedModel.model_finalizer", "LoadedModel.real_model", is_field=True,
    ),
    *_of("comfy.model_base", _BOTH, "BaseModel"),
    *_of(
        "comfy.model_detection", _LOAD,
        ("unet_prefix_from_state_dict", "state_dict"), "model_config_from_unet",
    ),
    *_of(
        "comfy.utils", _LOAD,
        ("state_dict_prefix_replace", "filter_keys"), "unet_to_diffusers",
        ("load_torch_file", "return_metadata"), "weight_dtype", "calculate_parameters",
    ),
    *_of("comfy.utils", (Part.SLEEP,), "ProgressBar", "ProgressBar.update_absolute"),
    *_of("comfy.float", _LOAD, ("stochastic_rounding", "dtype", "seed")),
    *_of("comfy.lora", _LOAD, ("calculate_weight", "patches", "weight", "key")),
    *_of("comfy.hooks", _LOAD, "HookGroup"),
    *_of(
        "comfy.patcher_extension", _LOAD,
        "CallbacksMP.ON_LOAD", "WrappersMP.PREPARE_SAMPLING", "WrappersMP.SAMPLER_SAMPLE",
        "WrappersMP.APPLY_MODEL",
    ),
    *_of("comfy.sampler_helpers", _LOAD, ("estimate_memory", "model", "noise_shape", "conds")),
    *_of(
        "comfy.model_patcher", _LOAD,
        "wipe_lowvram_weight", "ModelPatcher",
        ("ModelPatcher.__init__", "model", "load_device", "offload_device"),
        ("ModelPatcher.load", "device_to", "lowvram_model_memory", "force_patch_weights",
         "full_load"),
        ("ModelPatcher.partially_load", "device_to", "extra_memory", "force_patch_weights"),
        ("ModelPatcher.partially_unload", "device_to", "memory_to_free"),
        ("ModelPatcher.patch_model", "load_weights"),
        ("ModelPatcher.unpatch_model", "device_to", "unpatch_weights"),
        ("ModelPatcher.get_key_patches", "filter_prefix"),
        ("ModelPatcher.use_ejected", "skip_and_inject_on_exit_only"),
        ("ModelPatcher.apply_hooks", "hooks", "force_apply"),
        ("ModelPatcher.patch_hook_weight_to_device", "hooks", "combined_patches", "key"),
        ("ModelPatcher.patch_cached_hook_weights", "cached_weights", "key"),
        ("ModelPatcher.unpatch_hooks", "whitelist_keys_set"),
        "ModelPatcher.model_size", "ModelPatcher.loaded_size", "ModelPatcher.eject_model",
        "ModelPatcher.detach", ("ModelPatcher.get_all_callbacks", "call_type"),
        ("ModelPatcher.add_wrapper_with_key", "wrapper_type", "key", "wrapper"),
    ),
    *_of(
        "comfy.model_patcher", _LOAD,
        "ModelPatcher.patches", "ModelPatcher.patches_uuid", "ModelPatcher.forced_hooks",
        "ModelPatcher.hook_backup", "ModelPatcher.force_cast_weights",
        "ModelPatcher.weight_wrapper_patches", is_field=True,
    ),
    *_of("folder_paths", _LOAD, "get_filename_list", "get_full_path_or_raise"),
    *_of("folder_paths", (Part.PAGE,), "get_user_directory"),
    *_of(
        "execution", (Part.QUEUE, Part.RUNS),
        "PromptQueue.mutex", "PromptQueue.not_empty", "PromptQueue.queue",
        "PromptQueue.currently_running", is_field=True,
    ),
    *_of("execution", (Part.QUEUE,), "PromptQueue.task_counter", is_field=True),
    *_of("execution", (Part.RUNS,), "PromptQueue.history", is_field=True),
    *_of(
        "execution", (Part.RUNS,),
        ("validate_prompt", "prompt_id", "prompt", "partial_execution_list"),
        ("PromptQueue.put", "item"), ("PromptQueue.delete_queue_item", "function"),
    ),
    *_of("comfy_execution.progress", (Part.RUNS,), "get_progress_state", "NodeState.Running",
         "NodeState.Finished"),
    *_of("nodes", (Part.RUNS,), "interrupt_processing"),
    *_of("server", (Part.RUNS,), ("PromptServer.trigger_on_prompt", "json_data")),
    *_of("server", (Part.RUNS,), "PromptServer.number", is_field=True),
    *_of(
        "server", (Part.PAGE,),
        "PromptServer.add_on_prompt_handler", ("PromptServer.send_sync", "event", "data", "sid"),
    ),
    *_of(
        "server", (Part.PAGE,),
        "PromptServer.routes", "PromptServer.sockets", "PromptServer.on_prompt_handlers",
        "PromptServer.prompt_queue", is_field=True,
    ),
)  # fmt: skip
