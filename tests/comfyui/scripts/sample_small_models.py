"""Sample the small models with the real core; print one JSON object about what came out."""

from __future__ import annotations

import json
import logging
from typing import Any

import bootstrap
import torch

MODELS = {
    "wan": ("wan_lora", "wan_lora_b"),
    "wan_fp8": ("wan_lora",),
    "sd3": ("sd3_lora",),
    "sd15": (),
}
STEPS = 3


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "finite": bool(tensor.isfinite().all()),
        "spread": float(tensor.std(dim=(-1, -2)).min()),
        "difference": 0.0,
    }


def main() -> None:
    bootstrap.load_comfyui()
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    report: dict[str, Any] = {"models": {}, "loras": {}}
    for key, loras in MODELS.items():
        model = bootstrap.load_stock(key)
        plain = bootstrap.sample(model, steps=STEPS, cfg=2.0)
        report["models"][key] = facts(plain)
        for name in loras:
            patched = bootstrap.sample(bootstrap.add_lora(model, name), steps=STEPS, cfg=2.0)
            entry = facts(patched)
            entry["difference"] = float((patched - plain).abs().mean() / plain.std())
            report["loras"][f"{key} {name}"] = entry
        again = bootstrap.sample(model, steps=STEPS, cfg=2.0)
        report["models"][key]["same_again"] = torch.equal(plain, again)
    report["warnings"] = warnings.texts
    print(json.dumps(report))


if __name__ == "__main__":
    main()
