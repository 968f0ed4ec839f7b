"""Samples a model through the core's own loader and through ours, and compares bit for bit.

Usage: equality.py KEY [plain] [lora] [hooks] [cycles]   (all parts when none is named)
Prints one line a comparison; the exit status is 1 if any of them failed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import bootstrap
import torch

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")

KEY = sys.argv[1]
PARTS = sys.argv[2:] or ["plain", "lora", "hooks", "cycles"]
LORA = {"wan": "wan_lora", "sd3": "sd3_lora"}.get(KEY)
OTHER_SIZE = 24
failures: list[str] = []


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {KEY}: {what}", flush=True)
    if not passed:
        failures.append(what)


def courier(budget: Any) -> Any:
    return loading.load_diffusion_model(bootstrap.model_file(KEY).name, "default", budget)


def plans() -> Iterator[tuple[str, Any]]:
    """(name, budget) of every plan; figures come from the engine's own dry runs."""
    engine = courier(values.Budget()).courier_engine
    full = engine.plan(values.Budget(None, 0)).device_bytes
    try:
        engine.plan(values.Budget(0, 0))
        smallest = 0
    except values.DeviceBudgetError as error:
        smallest = error.smallest_bytes
    slots = engine.plan(values.Budget(full - 1, 0))
    streaming = smallest + slots.slot_bytes
    lockable = engine.plan(values.Budget(streaming, None)).lock_bytes
    copied = engine.snapshot().memory.copied_bytes
    yield "all resident", values.Budget(full, 0)
    yield "all pinned", values.Budget(streaming, lockable + 2**26)
    yield "all mapped", values.Budget(streaming, 0)
    yield "mixed", values.Budget((smallest + full) // 2, lockable // 3 + copied)
    yield "smallest", values.Budget(smallest, 0)


def expect_placement(name: str, model: Any) -> None:
    """The plan really is what its name says, by the status and by the memory itself."""
    layers = [r for r in model.courier_engine.snapshot().layers if not r.name.startswith("(")]
    found = {record.placement.value for record in layers}
    wanted = {
        "all resident": {"resident"},
        "all pinned": {"pinned"},
        "all mapped": {"mapped"},
        "smallest": {"mapped"},
    }.get(name)
    if wanted is None:
        mapped = [r for r in layers if r.placement is values.Placement.MAPPED]
        locked = [r for r in mapped if 0 < r.locked_bytes < r.size_bytes - r.resident_bytes]
        check(f"{name}: {len(locked)} layers are locked in part, {sorted(found)}", bool(locked))
        in_part = [r for r in layers if 0 < r.resident_bytes < r.size_bytes]
        check(f"{name}: {len(in_part)} layers stream in part", bool(in_part))
    elif KEY == "sd15":
        # Its layers are of many sizes: a small one may fit where a large one streams.
        check(f"{name}: {sorted(wanted)} among {sorted(found)}", wanted <= found)
    else:
        check(f"{name}: every layer is {sorted(wanted)}", found == wanted)


def within_budget(name: str, model: Any, budget: Any) -> None:
    memory = model.courier_engine.snapshot().memory
    peak = memory.device_peak_bytes + (memory.activation_peak_bytes or 0)
    # With nothing to spend, what had to be copied is all there is.
    locked = memory.host_bytes - (0 if budget.host_bytes else memory.copied_bytes)
    check(
        f"{name}: peaks within the budget ({peak} of {budget.device_bytes}, "
        f"{locked} of {budget.host_bytes})",
        peak <= budget.device_bytes + slack() and locked <= (budget.host_bytes or 0),
    )


def slack() -> int:
    """On a card the plans below are made for weights alone; the activations come on top."""
    return 2**30 if torch.cuda.is_available() else 0


def ignore_activations(model: Any) -> Any:
    """The plans are given for weights; what the core guesses for activations would shift them."""
    model.attachment.measures_activations = False
    return model


def plain() -> None:
    stock = bootstrap.load_stock(KEY)
    want = bootstrap.sample(stock)
    other = bootstrap.sample(stock, size=OTHER_SIZE)
    check(
        "the core's latents are finite and not constant",
        bool(want.isfinite().all()) and float(want.std()) > 0,
    )
    for name, budget in plans():
        model = ignore_activations(courier(budget))
        first, second = bootstrap.sample(model), bootstrap.sample(model)
        expect_placement(name, model)
        third = bootstrap.sample(model, size=OTHER_SIZE)
        check(f"{name}: first run", torch.equal(first, want))
        check(f"{name}: second run", torch.equal(second, want))
        check(f"{name}: another resolution", torch.equal(third, other))
        within_budget(name, model, budget)


def lora() -> None:
    assert LORA is not None
    stock = bootstrap.load_stock(KEY)
    want = {s: bootstrap.sample(bootstrap.add_lora(stock, LORA, s)) for s in (0, 0.5, 1, -1)}
    clean = bootstrap.sample(stock)
    check("strength 0 changes nothing", torch.equal(want[0], clean))
    check("the LoRA changes the picture", not torch.equal(want[1], clean))
    for name, budget in plans():
        model = ignore_activations(courier(budget))
        for strength, latent in want.items():
            patched = bootstrap.add_lora(model, LORA, strength)
            check(f"{name}: LoRA at {strength}", torch.equal(bootstrap.sample(patched), latent))
            delta_in_every_block(name, patched, strength)
        check(f"{name}: without it again", torch.equal(bootstrap.sample(model), clean))


def delta_in_every_block(name: str, patched: Any, strength: float) -> None:
    """Each block has patched weights, and each patch changes its weight."""
    if strength == 0 or name != "mixed":
        return
    blocks: dict[str, bool] = {}
    for key in patched.patches:
        block = ".".join(key.split(".")[:3])
        weight = patched.model.get_parameter(key).detach()
        moved = patched._patch(key).merged(weight).float() - weight.float()
        blocks[block] = blocks.get(block, True) and bool(moved.abs().max() > 0)
    count = patched.courier_engine.snapshot().streamable_layers
    check(
        f"{name}: LoRA at {strength} moves all {count} blocks",
        len(blocks) >= count and all(blocks.values()),
    )


def hooked_conditioning(model: Any, strength: float) -> Any:
    """The positive conditioning with a LoRA that holds for it alone."""
    import comfy.hooks
    import comfy.utils

    weights = comfy.utils.load_torch_file(str(bootstrap.model_file(LORA)), safe_load=True)
    group = comfy.hooks.create_hook_lora(lora=weights, strength_model=strength, strength_clip=0)
    positive = bootstrap.conditioning(model, 0)
    return [[cond, {**options, "hooks": group}] for cond, options in positive]


def sample_hooked(model: Any, strength: float) -> torch.Tensor:
    import comfy.sample

    shape = bootstrap.latent_shape(model)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return comfy.sample.sample(
        model, noise, 2, 3.0, "euler", "simple", hooked_conditioning(model, strength),
        bootstrap.conditioning(model, 1), torch.zeros(shape), seed=0, disable_pbar=True,
    )  # fmt: skip


def hooks() -> None:
    assert LORA is not None
    stock = bootstrap.load_stock(KEY)
    clean = bootstrap.sample(stock)
    want = {s: sample_hooked(stock, s) for s in (0.5, -1)}
    both = sample_hooked(bootstrap.add_lora(stock, LORA, 0.5), 0.5)
    check("the hook LoRA changes the picture", not torch.equal(want[0.5], sample_hooked(stock, 0)))
    for name, budget in plans():
        model = ignore_activations(courier(budget))
        for strength, latent in want.items():
            check(
                f"{name}: hook LoRA at {strength}",
                torch.equal(sample_hooked(model, strength), latent),
            )
        patched = bootstrap.add_lora(model, LORA, 0.5)
        check(f"{name}: LoRA and hook LoRA", torch.equal(sample_hooked(patched, 0.5), both))
        check(f"{name}: without hooks again", torch.equal(bootstrap.sample(model), clean))
        check(f"{name}: no private weight is left", len(model.attachment.private) == 0)


def hashes(model: Any) -> dict[str, str]:
    return {
        key: hashlib.sha256(value.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()
        for key, value in model.model.diffusion_model.state_dict().items()
        if value.dim()
    }


def cycles() -> None:
    assert LORA is not None
    file = bootstrap.model_file(KEY)
    before_file = hashlib.sha256(file.read_bytes()).hexdigest()
    for name, budget in plans():
        model = ignore_activations(courier(budget))
        before = hashes(model)
        clean = bootstrap.sample(model)
        for cycle in range(10):
            patched = bootstrap.add_lora(model, LORA, 1 - 0.2 * cycle)
            bootstrap.sample(patched, steps=1)
            bootstrap.sample(model, steps=1)
        check(
            f"{name}: the same picture after ten LoRAs", torch.equal(bootstrap.sample(model), clean)
        )
        loaded = hashes(model)
        model.detach()
        check(f"{name}: every weight as it was", before == loaded == hashes(model))
    check("the file is unchanged", hashlib.sha256(file.read_bytes()).hexdigest() == before_file)


for part in PARTS:
    {"plain": plain, "lora": lora, "hooks": hooks, "cycles": cycles}[part]()
sys.exit(1 if failures else 0)
