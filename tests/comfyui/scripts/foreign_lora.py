"""A LoRA that was made for another model: as few errors in the log as with the core's own loader.

Prints ``ok   PART: ...`` and ``FAIL PART: ...``.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.model_management as management  # noqa: E402
import comfy.weight_adapter  # noqa: E402
import folder_paths  # noqa: E402

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")
LINES: list[str] = []
LOADS: list[str] = []


class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "courier":
            LOADS.append(record.getMessage())
        elif record.levelno >= logging.WARNING:
            LINES.append(record.getMessage())


def say(part: str, text: str, is_so: bool) -> None:
    print(f"{'ok  ' if is_so else 'FAIL'} {part}: {text}", flush=True)


def adapter(rows: int, columns: int, seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)
    up = torch.randn(rows, 4, generator=random) * 0.05
    down = torch.randn(4, columns, generator=random) * 0.05
    return comfy.weight_adapter.LoRAAdapter(set(), (up, down, 4.0, None, None, None))


def patched(model: Any, kind: str) -> Any:
    """Every matrix of the blocks with a patch: one that fits, one that does not, or both."""
    weights = {
        key: weight
        for key, weight in model.model.named_parameters()
        if ".blocks." in key and weight.dim() == 2 and key.endswith(".weight")
    }
    for number, (key, weight) in enumerate(weights.items()):
        rows, columns = weight.shape
        if kind in ("fits", "both"):
            model.add_patches({key: adapter(rows, columns, number)}, 1.0)
        if kind in ("foreign", "both"):
            model.add_patches({key: adapter(rows + 3, columns, number)}, 1.0)
        if kind == "diffs":
            model.add_patches({key: ("diff", (torch.ones(rows + 1, columns),))}, 1.0)
    return model, len(weights)


def ours() -> Any:
    name = bootstrap.model_file("wan").name
    return loading.load_diffusion_model(name, "default", values.Budget(device_bytes=3 << 20))


def main() -> int:
    logging.getLogger().addHandler(Keep())
    logging.getLogger("courier").setLevel(logging.INFO)
    assert folder_paths.get_filename_list("diffusion_models")
    for kind in ("fits", "foreign", "both", "diffs"):
        counts, pictures = [], []
        for make in (lambda: bootstrap.load_stock("wan"), ours):
            LINES.clear()
            LOADS.clear()
            with torch.inference_mode():
                model, weights = patched(make(), kind)
                pictures.append(bootstrap.sample(model, steps=4))
            counts.append(len([line for line in LINES if "ERROR" in line or "MISMATCH" in line]))
            if make is ours:
                with torch.inference_mode():
                    bootstrap.sample(model, steps=2)
                told = [line for line in LOADS if "resident" in line]
                say(kind, f"one line for each load that is another ({told})",
                    1 <= len(told) <= 3 and len(set(told)) == len(told))  # fmt: skip
                say(kind, f"it names the patches ({told[-1:]})", "patched at use" in told[-1])
            management.unload_all_models()
            del model
        want = 0 if kind == "fits" else weights
        say(kind, f"the core logs {counts[0]} of {weights}", counts[0] == want)
        say(kind, f"ours logs {counts[1]}", counts[1] == want)
        say(kind, "exact", torch.equal(*pictures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
