"""Where the bytes of a large model really are, as the kernel counts them.

Usage: memory.py FILE LORA   (FILE: of models/diffusion_models, 1 GB or more; LORA: on FILE)
Prints "ok PART: what" or "FAIL PART: what", one line a comparison.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import sys
from pathlib import Path
from typing import Any

import bootstrap
import torch

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")
host = bootstrap.submodule(pack, "offload_core.host")

import comfy.model_management as management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402

FILE, LORA = Path(sys.argv[1]), Path(sys.argv[2])
MIB = 2**20
# Threads, imports at first use, and what a heap does not give back.
NOISE_BYTES = 24 * MIB
MODEL_SHARE = 0.05
failures: list[str] = []


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {what}", flush=True)
    if not passed:
        failures.append(what)


def courier(budget: Any, file: Path = FILE) -> Any:
    folder = bootstrap.base_path() / "models" / "diffusion_models"
    name = str(file.relative_to(folder))
    model = loading.load_diffusion_model(name, "default", budget)
    model.attachment.measures_activations = False
    return model


class Peak:
    """A sampling callback that keeps the most RssAnon held at the end of a step.

    ``heap_bytes`` has in it what the C heap keeps of the step's own intermediate results: on a CPU
    every weight is widened to float32 when it is used, whoever loaded it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.heap_bytes = 0

    def __call__(self, *args: Any) -> None:
        self.heap_bytes = max(self.heap_bytes, anonymous_bytes(trim=False))
        self.bytes = max(self.bytes, anonymous_bytes())


def sample(model: Any, steps: int, callback: Any = None) -> torch.Tensor:
    shape = bootstrap.latent_shape(model, size=8, frames=1)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    positive, negative = bootstrap.conditioning(model, 0, 8), bootstrap.conditioning(model, 1, 8)
    return comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", positive, negative, torch.zeros(shape),
        seed=5, disable_pbar=True, callback=callback,
    )  # fmt: skip


def anonymous_bytes(trim: bool = True) -> int:
    if trim:
        gc.collect()
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if give_back is not None:
            give_back(0)
    return host.process_memory().rss_anon_bytes


def locked_bytes() -> int:
    return host.process_memory().locked_bytes


def digest() -> str:
    with FILE.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def warm_up() -> None:
    """Library start-up is not the model's: the same calls once, with a small one."""
    small = bootstrap.model_file("wan")
    for _ in range(2):
        model = courier(values.Budget(), small)
        sample(model, 2, Peak())
        sample(bootstrap.add_lora(model, "wan_lora"), 1)
        management.unload_all_models()


def plans() -> dict[str, Any]:
    engine = courier(values.Budget()).courier_engine
    full = engine.plan(values.Budget(None, 0)).device_bytes
    try:
        engine.plan(values.Budget(0, 0))
        raise AssertionError("nothing at all was enough")
    except values.DeviceBudgetError as error:
        smallest = error.smallest_bytes
    streaming = smallest + engine.plan(values.Budget(full - 1, 0)).slot_bytes
    return {
        "mapped": values.Budget(streaming, 0),
        "smallest": values.Budget(smallest, 0),
        "pinned": values.Budget(streaming, 2 * full),
        "mixed": values.Budget((smallest + full) // 2, full // 4),
        "resident": values.Budget(full, 0),
    }


def streaming_takes_little(budget: Any) -> None:
    model_bytes = FILE.stat().st_size
    check(f"size: the model has {model_bytes} bytes", model_bytes >= 10**9)
    before, peak = anonymous_bytes(), Peak()
    model = courier(budget)
    loaded = anonymous_bytes()
    sample(model, 10, peak)
    memory = model.courier_engine.snapshot().memory
    allowed = int(MODEL_SHARE * model_bytes) + memory.slot_bytes + memory.staging_bytes
    check(f"stream: loading took {(loaded - before) / MIB:.1f} MiB", loaded - before < NOISE_BYTES)
    check(
        f"stream: ten steps took {(peak.bytes - before) / MIB:.1f} MiB of RssAnon, "
        f"{allowed / MIB:.1f} allowed, for a model of {model_bytes / MIB:.1f} "
        f"({(peak.heap_bytes - before) / MIB:.1f} with the heap's leftovers)",
        0 < peak.bytes - before < allowed,
    )
    layers = model.courier_engine.snapshot().streamable_layers
    shipped = model.courier_engine.snapshot().traffic.layers_shipped
    check(f"stream: {shipped} layers were shipped", shipped >= 10 * layers)


def placement(name: str, budget: Any, want: torch.Tensor) -> None:
    """The status against the kernel's own view, layer by layer and in sum."""
    anonymous, locked = anonymous_bytes(), locked_bytes()
    model = courier(budget)
    got = sample(model, 1)
    check(f"placement {name}: exact", torch.equal(got, want))
    snapshot = model.courier_engine.snapshot()
    records = {r.name: r for r in snapshot.layers if not r.name.startswith("(")}
    lines = host.maps_lines()
    wrong = [n for n, r in records.items() if not lies_where_told(model, n, r, lines)]
    found = sorted({record.placement.value for record in records.values()})
    check(f"placement {name}: all {len(records)} layers lie where told {wrong[:2]}", not wrong)
    wanted = {
        "resident": ["resident"],
        "pinned": ["pinned"],
        "mapped": ["mapped"],
        "smallest": ["mapped"],
    }
    check(f"placement {name}: {found}", found == wanted.get(name, ["mapped"]))
    locked_in_part = sum(
        r.placement.value == "mapped" and r.locked_bytes > 0 for r in records.values()
    )
    wants_part = name == "mixed"
    check(f"placement {name}: {locked_in_part} locked in part", bool(locked_in_part) == wants_part)
    in_part = sum(0 < r.resident_bytes < r.size_bytes for r in records.values())
    if name not in ("pinned", "mapped"):
        check(f"placement {name}: {in_part} in part", bool(in_part) == (name == "mixed"))
    grown = locked_bytes() - locked
    told = snapshot.memory.locked_bytes
    check(f"placement {name}: VmLck grew by {grown}, told {told}", grown == told)
    of_layers = sum(r.locked_bytes for r in records.values())
    check(f"placement {name}: the layers tell {of_layers} of it", of_layers == told)
    grown, told = anonymous_bytes() - anonymous, snapshot.memory.device_bytes
    check(
        f"placement {name}: RssAnon grew by {grown / MIB:.1f} MiB, "
        f"told {told / MIB:.1f} on the device",
        abs(grown - told) < NOISE_BYTES + told // 50,
    )
    model.detach()
    check(f"placement {name}: nothing is locked afterwards", locked_bytes() == locked)
    left = anonymous_bytes() - anonymous
    check(f"placement {name}: {left / MIB:.1f} MiB are left afterwards", left < NOISE_BYTES)


def lies_where_told(model: Any, name: str, record: Any, lines: list[Any]) -> bool:
    on_device = 0
    for parameter in model.model.get_submodule(name).parameters():
        pointer = parameter.data_ptr()
        line = next(line for line in lines if line.start <= pointer < line.end)
        if not line.inode and "w" in line.perms:
            on_device += parameter.nelement() * parameter.element_size()
        elif not line.path.endswith(FILE.name) or line.perms != "r--s":
            return False
    whole = record.placement.value == "resident"
    if whole != (on_device == record.size_bytes):
        return False
    return on_device == record.resident_bytes and bool(record.reason)


def loras_cost_nothing(budget: Any) -> None:
    """Three LoRAs on and off; another model of the same file never notices."""
    before_file = digest()
    model, twin = courier(budget), courier(budget)
    clean = sample(model, 1)
    lora = comfy.utils.load_torch_file(str(LORA), safe_load=True)
    # Once before measuring: the tables of keys stay.
    comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)
    before = anonymous_bytes()
    changed, on, off = [], [], []
    for strength in (0.5, 1.0, -1.0):
        patched = comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]
        changed.append(not torch.equal(sample(patched, 1), clean))
        on.append(anonymous_bytes() - before)
        del patched
        check(f"lora {strength}: without it again", torch.equal(sample(model, 1), clean))
        off.append(anonymous_bytes() - before)
    check("lora: each shows", all(changed))
    text = f"{[x // MIB for x in on]} MiB with, {[x // MIB for x in off]} MiB without"
    check(
        f"lora: RssAnon stays flat: {text}",
        max(on + off) < NOISE_BYTES and off[2] - off[0] < 4 * MIB,
    )
    check("lora: the other model is as before", torch.equal(sample(twin, 1), clean))
    check("lora: the file is unchanged", digest() == before_file)


def main() -> int:
    with torch.inference_mode():
        warm_up()
        budgets = plans()
        management.unload_all_models()
        streaming_takes_little(budgets["mapped"])
        management.unload_all_models()
        want = sample(courier(budgets["smallest"]), 1)
        management.unload_all_models()
        for name, budget in budgets.items():
            placement(name, budget, want)
            management.unload_all_models()
        loras_cost_nothing(budgets["mapped"])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
