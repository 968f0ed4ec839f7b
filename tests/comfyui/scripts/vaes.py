"""VAEs through ComfyUI's own loader and through ours, compared bit for bit.

Usage: vaes.py [PART ...]   (all parts when none is named)
Prints "ok PART: what" or "FAIL PART: what", one line a comparison.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
import safetensors.torch  # noqa: E402

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
orders = bootstrap.submodule(pack, "nodes.comfyui.orders")
records = bootstrap.submodule(pack, "nodes.requests.records")
registry = bootstrap.submodule(pack, "nodes.models.registry")
values = bootstrap.submodule(pack, "offload_core.values")
host = bootstrap.submodule(pack, "offload_core.host")

MIB = 2**20
failures: list[str] = []
part = ""


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(f"{part}: {what}")


def courier(file: Path, budget: Any = None) -> Any:
    return loading.load_vae(file.name, budget or values.Budget())


def stock(file: Path) -> Any:
    state_dict, metadata = comfy.utils.load_torch_file(str(file), return_metadata=True)
    return comfy.sd.VAE(sd=state_dict, metadata=metadata)


def plans(file: Path) -> dict[str, Any]:
    """Budgets that hold the whole VAE, half of it, and as little of it as works."""
    engine = courier(file).patcher.courier_engine
    full = engine.plan(values.Budget(None, 0)).device_bytes
    try:
        engine.plan(values.Budget(0, 0))
        raise AssertionError("nothing at all was enough")
    except values.DeviceBudgetError as error:
        smallest = error.smallest_bytes
    return {
        "whole": values.Budget(full, 0),
        "half": values.Budget((smallest + full) // 2, 0),
        "locked": values.Budget((smallest + full) // 2, full),
        "smallest": values.Budget(smallest, 0),
    }


@contextmanager
def vae_file(name: str, tensors: dict[str, torch.Tensor]) -> Iterator[Path]:
    file = bootstrap.base_path() / "models" / "vae" / name
    safetensors.torch.save_file(tensors, file)
    folder_paths.filename_list_cache.clear()
    try:
        yield file
    finally:
        file.unlink()
        folder_paths.filename_list_cache.clear()


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(vae: Any, latent: torch.Tensor, tiled: dict[str, int]) -> dict[str, torch.Tensor]:
    picture = vae.decode(latent)
    pixels = seeded(*picture.shape, seed=1).sigmoid()
    while pixels.ndim > 4:
        pixels = pixels[0]
    return {
        "decode": picture,
        "encode": vae.encode(pixels),
        "decode_tiled": vae.decode_tiled(latent, **tiled),
    }


def compared(file: Path, latent: torch.Tensor, tiled: dict[str, int]) -> None:
    theirs = stock(file)
    want = results(theirs, latent, tiled)
    del theirs
    check(
        "the core's own is finite and not constant",
        all(bool(one.isfinite().all()) and float(one.std()) > 0 for one in want.values()),
    )
    for name, budget in plans(file).items():
        vae = courier(file, budget)
        for what, got in results(vae, latent, tiled).items():
            check(f"{name}: {what}", torch.equal(got, want[what]))
        snapshot = vae.patcher.courier_engine.snapshot()
        shipped = snapshot.traffic.shipped_bytes
        check(f"{name}: {shipped} bytes streamed", (shipped > 0) == (name != "whole"))
        check(
            f"{name}: within its budget",
            snapshot.memory.device_peak_bytes <= budget.device_bytes,
        )
    remarks = vae.patcher.attachment.remarks
    check(f"the status says what streams: {remarks}", any("for each tile" in r for r in remarks))


def wan_tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = comfy.utils.load_torch_file(str(bootstrap.model_file("vae")), safe_load=True)
    return {key: value.to(dtype) for key, value in found.items()}


def wan() -> None:
    tiled = {"tile_x": 4, "tile_y": 4, "overlap": 1, "tile_t": 4, "overlap_t": 1}
    latent = seeded(1, 16, 2, 8, 8)
    compared(bootstrap.model_file("vae"), latent, tiled)
    with vae_file("wan_bf16.safetensors", wan_tensors(torch.bfloat16)) as file:
        compared(file, latent, tiled)


def goes_at_once(file: Path) -> None:
    """Without a garbage collection: ComfyUI warns of a model that stays after its last user."""
    gc.collect()
    gc.disable()
    try:
        vae = courier(file)
        vae.decode(seeded(1, 4, 8, 8))
        inner = weakref.ref(vae.first_stage_model)
        del vae
        check("it goes with its last user", inner() is None)
    finally:
        gc.enable()


def taesd() -> None:
    import comfy.taesd.taesd

    shapes = comfy.taesd.taesd.TAESD().state_dict()
    constants = {"vae_scale": torch.tensor(0.18215), "vae_shift": torch.tensor(0.0)}
    tensors = random_like({k: v for k, v in shapes.items() if k not in constants}) | constants
    with vae_file("taesd_both.safetensors", tensors) as file:
        compared(file, seeded(1, 4, 16, 16), {"tile_x": 8, "tile_y": 8, "overlap": 2})
        goes_at_once(file)


def kl_tensors() -> dict[str, torch.Tensor]:
    import comfy.ldm.models.autoencoder

    config = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3,
        "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [],
        "dropout": 0.0,
    }  # fmt: skip
    model = comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=config, embed_dim=4)
    return random_like(model.state_dict())


def random_like(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float16 values that keep a signal's size about the same; the core's own are no values."""
    tensors = {}
    for number, (key, value) in enumerate(shapes.items()):
        made = seeded(*value.shape, seed=number)
        scale = value.numel() / value.shape[0] if value.ndim > 1 else 400
        made = made / scale**0.5 + (1 if "norm" in key and key.endswith("weight") else 0)
        tensors[key] = made.half()
    return tensors


def kl() -> None:
    with vae_file("kl_fp16.safetensors", kl_tensors()) as file:
        compared(file, seeded(1, 4, 8, 8), {"tile_x": 4, "tile_y": 4, "overlap": 1})
        goes_at_once(file)


def rounded() -> None:
    """As on a card: ComfyUI keeps VAEs as bfloat16. A file of that width is rounded as it arrives,
    a wider one is copied."""
    arguments = bootstrap.load_comfyui()
    arguments.bf16_vae = True
    try:
        with vae_file("kl_rounded.safetensors", kl_tensors()) as file:
            compared(file, seeded(1, 4, 8, 8), {"tile_x": 4, "tile_y": 4, "overlap": 1})
            copied = courier(file).patcher.courier_engine.snapshot().memory.copied_bytes
            check(f"{copied} bytes copied", copied == 0)
        file = bootstrap.model_file("vae")
        tiled = {"tile_x": 4, "tile_y": 4, "overlap": 1, "tile_t": 4, "overlap_t": 1}
        compared(file, seeded(1, 16, 2, 8, 8), tiled)
        copied = courier(file).patcher.courier_engine.snapshot().memory.copied_bytes
        check(f"{copied} bytes copied", 0 < copied <= file.stat().st_size / 2)
    finally:
        arguments.bf16_vae = False


def anon_bytes() -> int:
    gc.collect()
    host.give_back_freed()
    return host.process_memory().rss_anon_bytes


def memory() -> None:
    """Nothing is read at load but the header; sleep gives back what a run took."""
    with vae_file("kl_memory.safetensors", kl_tensors()) as file:
        size = file.stat().st_size
        budget = plans(file)["smallest"]
        courier(file, budget).decode(seeded(1, 4, 8, 8))  # what the first run of a process takes
        before = anon_bytes()
        vae = courier(file, budget)
        grown = anon_bytes() - before
        check(f"load: {grown / size:.1%} of the file", grown <= 0.05 * size)
        want = vae.decode(seeded(1, 4, 8, 8))
        name = orders.id_of(vae)
        found = {entry["id"]: entry["kind"] for entry in orders.get_orders().models()}
        check(f"known as {found[name]}", found[name] == "VAE")
        orders.get_orders().sleep_here(records.SleepOrder((name,), level=2))
        kept = anon_bytes() - before - grown
        check(f"asleep: {kept / MIB:.1f} MiB more than before the run", kept <= 20 * MIB)
        try:
            vae.decode(seeded(1, 4, 8, 8))
            said = ""
        except values.AsleepError as error:
            said = str(error)
        check(f"refused while asleep: {said[:50]}", "is asleep" in said)
        orders.get_orders().wake_here(records.WakeOrder((name,)))
        check("after it woke", torch.equal(vae.decode(seeded(1, 4, 8, 8)), want))
        del vae
        left = [name for _, name, _ in registry.get_service().engines()]
        check(f"nothing is left of it: {left}", not left)


def refused(what: str, use: Callable[[], Any], *words: str) -> None:
    before = len(registry.get_service().engines())
    text = ""
    try:
        use()
    except values.CourierError as error:
        text = str(error)
    gc.collect()
    check(f"{what}: {text}", bool(text) and all(word in text for word in words))
    check(f"{what}: nothing is left", len(registry.get_service().engines()) == before)


def bad() -> None:
    tensors = wan_tensors(torch.float32)
    sd3 = comfy.utils.load_torch_file(str(bootstrap.model_file("sd3")), safe_load=True)
    with vae_file("sd3.safetensors", sd3) as file:
        refused("a diffusion model", lambda: courier(file), file.name, "no VAE")
    some = {k: v for k, v in tensors.items() if not k.startswith("decoder.upsamples.3")}
    with vae_file("some.safetensors", some) as file:
        refused("a part lacks", lambda: courier(file), file.name, "lacks")
    with vae_file("short.safetensors", tensors) as file:
        file.write_bytes(file.read_bytes()[: 2**19])
        refused("a truncated file", lambda: courier(file), file.name, "truncated")


def half() -> None:
    """A file that decodes only: ComfyUI runs it, and so do we; the status names what lacks."""
    some = {k: v for k, v in kl_tensors().items() if not k.startswith("encoder.")}
    with vae_file("decoder.safetensors", some) as file:
        latent = seeded(1, 4, 8, 8)
        vae = courier(file)
        check("decode", torch.equal(vae.decode(latent), stock(file).decode(latent)))
        notes = vae.patcher.courier_engine.snapshot().notes
        check(f"said: {notes}", any("has no encoder" in note for note in notes))


PARTS = (memory, wan, taesd, kl, rounded, half, bad)
wanted = sys.argv[1:] or [one.__name__ for one in PARTS]
for function in PARTS:
    if function.__name__ in wanted:
        part = function.__name__
        try:
            with torch.inference_mode():  # as ComfyUI runs every node
                function()
        except Exception:
            traceback.print_exc()
            check("ended with an error, see stderr", False)
sys.exit(1 if failures else 0)
