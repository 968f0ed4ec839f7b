"""What the core asks of a model, asked of ours: patches, clones, sizes, unloading, cancelling.

Usage: patcher.py [PART ...]   (all parts when none is named)
Prints "ok PART: what" or "FAIL PART: what", one line a comparison. The part ``core`` must come
first: it looks at the core before the pack is imported.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.hooks  # noqa: E402
import comfy.lora  # noqa: E402
import comfy.model_base  # noqa: E402
import comfy.model_management as management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.patcher_extension  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sampler_helpers  # noqa: E402
import comfy.samplers  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
from comfy.cli_args import args as core_args  # noqa: E402

CORE = (
    comfy.hooks, comfy.lora, comfy.model_base, management, comfy.model_patcher, comfy.ops,
    comfy.patcher_extension, comfy.sample, comfy.sampler_helpers, comfy.samplers, comfy.sd,
    comfy.utils, folder_paths, torch, torch.nn, torch.nn.functional, torch.nn.modules.module,
)  # fmt: skip


def attributes(modules: tuple[ModuleType, ...]) -> dict[str, Any]:
    """Every function and class of these modules, and every attribute of those classes."""
    found: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, (type, FunctionType)) or callable(value):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, type):
                for inner, held in vars(value).items():
                    if isinstance(held, (FunctionType, classmethod, staticmethod, property)):
                        found[f"{module.__name__}.{name}.{inner}"] = held
    return found


BEFORE = attributes(CORE)
pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")
host = bootstrap.submodule(pack, "offload_core.host")
service = bootstrap.submodule(pack, "nodes.models.registry")
AFTER_IMPORT = attributes(CORE)

MIB = 2**20
failures: list[str] = []
part = ""


class CoreWarnings(logging.Handler):
    """What the core says when it finds a model that nobody can reach and that will not die."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.leaks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "memory leak" in text:
            self.leaks.append(text)


warnings = CoreWarnings()
logging.getLogger().addHandler(warnings)
logging.getLogger().setLevel(logging.INFO)


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(f"{part}: {what}")


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    check(what, torch.equal(got, want))


def courier(key: str = "wan", budget: Any = None, file: Path | None = None) -> Any:
    name = (file or bootstrap.model_file(key)).name
    model = loading.load_diffusion_model(name, "default", budget or values.Budget())
    # Plans are for the weights alone.
    model.attachment.measures_activations = False
    return model


def stock(key: str = "wan", file: Path | None = None) -> Any:
    return comfy.sd.load_diffusion_model(str(file or bootstrap.model_file(key)))


def budgets(key: str = "wan", file: Path | None = None) -> dict[str, Any]:
    engine = courier(key, file=file).courier_engine
    full = engine.plan(values.Budget(None, 0)).device_bytes
    try:
        engine.plan(values.Budget(0, 0))
        raise AssertionError("nothing at all was enough")
    except values.DeviceBudgetError as error:
        smallest = error.smallest_bytes
    return {
        "resident": values.Budget(full, 0),
        "mixed": values.Budget((smallest + full) // 2, 4 * full),
        "smallest": values.Budget(smallest, 0),
    }


def sample(
    model: Any, cfg: float = 1.0, batch: int = 1, steps: int = 2, **more: Any
) -> torch.Tensor:
    shape = (batch, *bootstrap.latent_shape(model)[1:])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    positive, negative = bootstrap.conditioning(model, 0), bootstrap.conditioning(model, 1)
    return comfy.sample.sample(
        model, noise, steps, cfg, "euler", "simple", positive, negative, torch.zeros(shape),
        seed=5, disable_pbar=True, **more,
    )  # fmt: skip


@contextmanager
def copy_of(key: str, name: str) -> Iterator[Path]:
    """A file of its own among the diffusion models, gone afterwards."""
    file = bootstrap.model_file(key).with_name(name)
    shutil.copyfile(bootstrap.model_file(key), file)
    try:
        yield file
    finally:
        file.unlink(missing_ok=True)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in model.model.diffusion_model.state_dict().items()}


def homes_in_file(model: Any, file: Path) -> bool:
    """Whether every parameter that the file could hold lies in its mapping now."""
    lines = [line for line in host.maps_lines() if line.path.endswith(file.name)]
    pointers = [p.data_ptr() for p in model.model.parameters() if p.numel()]
    return all(any(line.start <= pointer < line.end for line in lines) for pointer in pointers)


def anonymous_bytes() -> int:
    """RssAnon without what the C heap keeps for later, where it can be asked to let go."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return host.process_memory().rss_anon_bytes


# ---------------------------------------------------------------- parts


def core() -> None:
    check(
        "importing replaces no attribute of the core or of torch", differences(AFTER_IMPORT) == []
    )
    model = courier(budget=budgets()["mixed"])
    sample(bootstrap.add_lora(model, "wan_lora"))
    management.unload_all_models()
    found = differences(attributes(CORE))
    check(f"using it replaces none either {found[:3]}", found == [])
    check(f"there was something to compare ({len(BEFORE)})", len(BEFORE) > 1000)


def differences(now: dict[str, Any]) -> list[str]:
    return [name for name, value in BEFORE.items() if now.get(name) is not value]


def dtypes() -> None:
    """A dtype that the user forces gives the core's result, and its copies are charged."""
    for key in ("wan", "sd3"):
        for name in ("fp32_unet", "bf16_unet", "fp16_unet"):
            with forced(name):
                plain = stock(key)
                check(
                    f"{key} {name}: buffers are the core's", buffers(courier(key)) == buffers(plain)
                )
                want, patched = sample(plain), sample(bootstrap.add_lora(plain, f"{key}_lora"))
                for plan in ("resident", "smallest"):
                    model = courier(key, budgets(key)[plan])
                    same(f"{key} {name} {plan}", sample(model), want)
                    lora = bootstrap.add_lora(model, f"{key}_lora")
                    same(f"{key} {name} {plan} with a LoRA", sample(lora), patched)
                    charged(f"{key} {name} {plan}", model)


def buffers(model: Any) -> dict[str, tuple[str, bytes]]:
    """dtype and bytes of every registered buffer: nothing casts those at use."""
    return {
        name: (
            str(held.dtype),
            held.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(),
        )
        for name, held in model.model.named_buffers()
        if held.numel() and held.dim()
    }


@contextmanager
def forced(name: str) -> Iterator[None]:
    setattr(core_args, name, True)
    try:
        yield
    finally:
        setattr(core_args, name, False)


def charged(what: str, model: Any) -> None:
    """Weights outside the file's mapping are reported, to the byte."""
    lines = [line for line in host.maps_lines() if line.path.endswith(".safetensors")]
    model.detach()
    loose = sum(
        p.numel() * p.element_size()
        for p in model.model.parameters()
        if p.numel() and not any(line.start <= p.data_ptr() < line.end for line in lines)
    )
    told = model.courier_engine.snapshot().memory.copied_bytes
    check(f"{what}: {told} copied bytes told, {loose} found", told == loose)
    layers = [r for r in model.courier_engine.snapshot().layers if not r.name.startswith("(")]
    if loose > sum(r.size_bytes for r in layers) // 2:
        check(
            f"{what}: converted layers are pageable",
            {r.placement.value for r in layers} == {"pageable"},
        )


def mixed_file() -> None:
    """Some weights of the file are fp32, as in files that keep norms and embeddings wide."""
    from safetensors.torch import load_file, save_file

    with copy_of("wan", "mixed types.safetensors") as file:
        tensors = load_file(bootstrap.model_file("wan"))
        wide = {
            name: tensor.float() + 1e-4
            if "norm" in name or "modulation" in name or "embedding" in name
            else tensor
            for name, tensor in tensors.items()
        }
        save_file(wide, file)
        plain = stock(file=file)
        want, patched = sample(plain), sample(bootstrap.add_lora(plain, "wan_lora"))
        for plan, budget in budgets(file=file).items():
            model = courier(budget=budget, file=file)
            same(f"{plan}", sample(model), want)
            same(f"{plan} with a LoRA", sample(bootstrap.add_lora(model, "wan_lora")), patched)
            charged(plan, model)


def scaled_fp8() -> None:
    """fp8 codes with a scale beside each: a patch counts in real weights, not in codes."""
    from safetensors.torch import load_file, save_file

    with copy_of("wan", "scaled fp8.safetensors") as file:
        scaled: dict[str, torch.Tensor] = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
        for name, tensor in load_file(bootstrap.model_file("wan")).items():
            if name.startswith("blocks.") and name.endswith(".weight") and tensor.dim() == 2:
                scale = tensor.float().abs().max() / 448
                scaled[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
                scaled[name.removesuffix("weight") + "scale_weight"] = scale
            else:
                scaled[name] = tensor
        save_file(scaled, file)
        plain = stock(file=file)
        want, patched = sample(plain), sample(bootstrap.add_lora(plain, "wan_lora"))
        check("the LoRA changes the picture", not torch.equal(want, patched))
        for plan, budget in budgets(file=file).items():
            model = courier(budget=budget, file=file)
            same(f"{plan}", sample(model), want)
            same(f"{plan} with a LoRA", sample(bootstrap.add_lora(model, "wan_lora")), patched)


def loras() -> None:
    """Two at once, a clone before or after, and a change of LoRA that moves no weight."""
    plain = stock()
    want = sample(plain)
    one = sample(bootstrap.add_lora(plain, "wan_lora", 0.7))
    two = sample(bootstrap.add_lora(bootstrap.add_lora(plain, "wan_lora", 0.7), "wan_lora_b", -0.4))
    check("all three differ", not torch.equal(want, one) and not torch.equal(one, two))
    for plan, budget in budgets().items():
        model = courier(budget=budget)
        first = bootstrap.add_lora(model, "wan_lora", 0.7)
        second = bootstrap.add_lora(first.clone(), "wan_lora_b", -0.4)
        same(f"{plan}: two LoRAs", sample(second), two)
        same(f"{plan}: one LoRA", sample(first), one)
        same(f"{plan}: a clone of it", sample(first.clone()), one)
        same(f"{plan}: none", sample(model), want)
    model = courier(budget=budgets()["mixed"])
    before = pointers_and_shipped(model, model)
    after = pointers_and_shipped(model, bootstrap.add_lora(model, "wan_lora", 0.7))
    again = pointers_and_shipped(model, bootstrap.add_lora(model, "wan_lora_b", 0.7))
    check("there are resident weights", len(before[0]) > 0)
    check(
        "a change of LoRA leaves resident weights where they are", before[0] == after[0] == again[0]
    )
    check(
        f"and ships no more than a run does {before[1], after[1], again[1]}",
        after[1] == again[1] <= before[1],
    )


def pointers_and_shipped(model: Any, run_with: Any) -> tuple[dict[str, int], int]:
    """Where resident weights are after a run, and how many layers the run shipped."""
    engine = model.courier_engine
    shipped = engine.snapshot().traffic.layers_shipped
    sample(run_with)
    snapshot = engine.snapshot()
    names = [r.name for r in snapshot.layers if not r.name.startswith("(")]
    # What streams is the file's view again after a run.
    pointers = {
        f"{name}.{key}": parameter.data_ptr()
        for name in names
        for key, parameter in model.model.get_submodule(name).named_parameters()
        if not host.maps_lookup(parameter.data_ptr()).inode
    }
    return pointers, snapshot.traffic.layers_shipped - shipped


def arrivals() -> None:
    """Where the device holds what the core would store, every kind of patch is merged on arrival:
    its own bits, whatever stays and whatever streams, one after the other and back to none."""
    for name in ("bf16_unet", "fp16_unet"):
        with forced(name):
            plain = stock()
            kinds = lora_kinds(plain)
            want = {kind: sample(with_patches(plain, *files)) for kind, files in kinds.items()}
            check(f"{name}: all differ", len({str(w.flatten()[:64]) for w in want.values()}) > 9)
            for plan, budget in budgets().items():
                model = courier(budget=budget)
                for kind, files in kinds.items():
                    patched = with_patches(model, *files)
                    same(f"{name} {plan} {kind}", sample(patched), want[kind])
                check(f"{name} {plan}: none is left", model.attachment.arrivals == {})
                again = with_patches(model, *kinds["two"])
                same(f"{name} {plan} two again", sample(again), want["two"])
                check(f"{name} {plan}: on arrival", len(model.attachment.arrivals) > 3)
                same(f"{name} {plan}: a second run", sample(again), want["two"])


def lora_kinds(model: Any) -> dict[str, tuple[dict[str, torch.Tensor], ...]]:
    """Files of each kind over one weight in each block; "none" comes last."""
    generator = torch.Generator().manual_seed(9)

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator) * 0.1

    names = [
        f"diffusion_model.{n.removesuffix('.weight')}"
        for n, w in model.model.diffusion_model.state_dict().items()
        if n.endswith(("self_attn.q.weight", "ffn.0.weight"))
    ]
    shapes = {n: model.model.get_submodule(n).weight.shape for n in names}

    def file(make: Any) -> dict[str, torch.Tensor]:
        return {f"{n}.{k}": v for n in names for k, v in make(*shapes[n]).items()}

    def lora(rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {"lora_up.weight": numbers(rows, 4), "lora_down.weight": numbers(4, columns)}

    makers = {
        "lora": lora,
        "alpha": lambda r, c: {**lora(r, c), "alpha": torch.tensor(2.0)},
        "dora": lambda r, c: {**lora(r, c), "dora_scale": numbers(r, 1) + 1},
        "loha": lambda r, c: {
            "hada_w1_a": numbers(r, 4), "hada_w1_b": numbers(4, c),
            "hada_w2_a": numbers(r, 4), "hada_w2_b": numbers(4, c),
        },
        "lokr": lambda r, c: {"lokr_w1": numbers(4, 4), "lokr_w2": numbers(r // 4, c // 4)},
        "glora": lambda r, c: {
            "a1.weight": numbers(4, c), "a2.weight": numbers(c, 4),
            "b1.weight": numbers(4, c), "b2.weight": numbers(r, 4),
        },
        "diff": lambda r, c: {"diff": numbers(r, c), "diff_b": numbers(r)},
        "set": lambda r, c: {"set_weight": numbers(r, c)},
        "bfloat16": lambda r, c: {k: v.bfloat16() for k, v in lora(r, c).items()},
    }  # fmt: skip
    kinds = {kind: (file(maker),) for kind, maker in makers.items()}
    kinds["two"] = (*kinds["alpha"], *kinds["bfloat16"])
    kinds["mixed"] = (*kinds["loha"], *kinds["lora"])
    return {**kinds, "none": ()}


def with_patches(model: Any, *files: dict[str, torch.Tensor]) -> Any:
    for number, file in enumerate(files):
        model = comfy.sd.load_lora_for_models(model, None, file, 0.8 - number, 0)[0]
    return model


def saving() -> None:
    """The core's own save writes what it writes for its own loader, LoRA merged."""
    with tempfile.TemporaryDirectory(dir=bootstrap.base_path()) as temporary:
        saving_into(Path(temporary))


def saving_into(folder: Path) -> None:
    for key in ("wan", "sd3"):
        for lora in (None, f"{key}_lora"):
            wanted = saved(folder / "stock.safetensors", with_lora(stock(key), lora))
            for plan, budget in budgets(key).items():
                model = courier(key, budget)
                clean = sample(model)
                got = saved(folder / "courier.safetensors", with_lora(model, lora))
                differing = [
                    name for name, tensor in wanted.items()
                    if not identical(got.get(name), tensor)
                ]  # fmt: skip
                check(
                    f"{key} {plan} {lora}: the same tensors {differing[:2]}",
                    not differing and got.keys() == wanted.keys(),
                )
                same(f"{key} {plan} {lora}: and the model samples as before", sample(model), clean)
                model.detach()
                check(
                    f"{key} {plan} {lora}: all weights are the file's again",
                    homes_in_file(model, bootstrap.model_file(key)),
                )


def identical(got: torch.Tensor | None, want: torch.Tensor) -> bool:
    return got is not None and got.dtype == want.dtype and torch.equal(got, want)


def with_lora(model: Any, lora: str | None) -> Any:
    return model if lora is None else bootstrap.add_lora(model, lora, 0.6)


def saved(file: Path, model: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    comfy.sd.save_checkpoint(str(file), model)
    return load_file(file)


def merged_then_unloaded() -> None:
    """Weights that the core merged for a save stand on a resident layer that then leaves."""
    model = courier(budget=budgets()["resident"])
    clean = sample(model)
    patched = bootstrap.add_lora(model, "wan_lora")
    management.load_models_gpu([patched], force_patch_weights=True)
    before = patched.loaded_size()
    freed = patched.partially_unload(patched.offload_device, before // 2)
    check(
        f"half is freed ({freed} of {before})",
        before // 2 <= freed == before - patched.loaded_size(),
    )
    same("the model samples as before", sample(model), clean)
    management.load_models_gpu([patched], force_patch_weights=True)
    patched.partially_unload(patched.offload_device, before // 2)
    patched.detach()
    check("all weights are the file's again", homes_in_file(model, bootstrap.model_file("wan")))


def unloading() -> None:
    """However the core unloads, the next run is exact."""
    device = management.get_torch_device()
    text = torch.randn((1, 4, 4096), generator=torch.Generator().manual_seed(3))
    plain = stock()
    want, embedded = sample(plain), plain.model.diffusion_model.text_embedding(text)
    for plan, budget in budgets().items():
        model = courier(budget=budget)
        entry = model.model.diffusion_model.text_embedding
        same(f"{plan}: a sub-module before the first run", entry(text), embedded)
        same(f"{plan}: first run", sample(model), want)
        for name, unload in {
            "unload_all_models": management.unload_all_models,
            "free_memory": lambda: management.free_memory(1e30, device),
            "partially_unload": lambda m=model: m.partially_unload(m.offload_device, MIB),
            "partially_unload of more than there is": lambda m=model: m.partially_unload(
                m.offload_device, 1 << 40
            ),
            "detach": model.detach,
            "detach twice": lambda m=model: (m.detach(), m.detach()),
            "unpatch_model": lambda m=model: m.unpatch_model(m.offload_device),
        }.items():
            unload()
            same(f"{plan}: a sub-module after {name}", entry(text), embedded)
            same(f"{plan}: a run after {name}", sample(model), want)
        model.detach()
        check(f"{plan}: nothing is on the device", model.loaded_size() == 0)
        check(
            f"{plan}: all weights are the file's", homes_in_file(model, bootstrap.model_file("wan"))
        )


class Impatience(BaseException):
    """An interrupt of the newer cores' kind: no Exception."""


def interrupts() -> None:
    plain = stock()
    want = sample(plain, steps=3)
    for plan in ("mixed", "smallest"):
        model = courier(budget=budgets()[plan])
        blocks = model.model.diffusion_model.blocks
        same(f"{plan}: before", sample(model, steps=3), want)
        for k in range(len(blocks)):
            for kind in (management.InterruptProcessingException, Impatience, RuntimeError):
                cancelled(
                    f"{plan}: {kind.__name__} in block {k}", model, kind, raiser(kind), blocks[k]
                )
            cancelled(
                f"{plan}: the core's interrupt set in block {k}", model,
                management.InterruptProcessingException, management.interrupt_current_processing,
                blocks[k],
            )  # fmt: skip
        same(f"{plan}: the next run", sample(model, steps=3), want)
        cancelled(
            f"{plan}: from a callback", model, management.InterruptProcessingException, None, None
        )
        same(f"{plan}: the next run after that", sample(model, steps=3), want)
        held = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        grown = [anonymous_bytes()]
        # The heap swings by some MiB; what leaks grows in every batch of cancels.
        while len(grown) < 6 and min((b - a for a, b in pairwise(grown)), default=MIB) >= MIB:
            for _ in range(20):
                cancelled("", model, management.InterruptProcessingException,
                          raiser(management.InterruptProcessingException), blocks[3])  # fmt: skip
            grown.append(anonymous_bytes())
        check(
            f"{plan}: 20 cancels grow nothing: RssAnon after each 20 {grown}",
            min(b - a for a, b in pairwise(grown)) < MIB,
        )
        now = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        check(f"{plan}: cancels leave threads and descriptors as they were", held == now)


def raiser(kind: type[BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise kind()

    return act


def cancelled(what: str, model: Any, kind: type[BaseException], act: Any, block: Any) -> None:
    """Sample until ``act``, called when ``block`` begins (or a step ends), ends the run."""
    handle = None
    options: dict[str, Any] = {}
    if block is not None:
        handle = block.register_forward_pre_hook(lambda module, args: act())
    else:
        options["callback"] = lambda *args: raiser(kind)()
    caught: BaseException | None = None
    try:
        sample(model, steps=3, **options)
    except BaseException as error:
        caught = error
    finally:
        if handle is not None:
            handle.remove()
    snapshot = model.courier_engine.snapshot()
    busy = {r.state.value for r in snapshot.layers} - {"absent", "loading", "ready"}
    settled = type(caught) is kind and snapshot.state.value == "loaded" and not busy
    if what or not settled:
        check(f"{what} surfaces, and no slot is in use", settled)


def clones() -> None:
    plain = stock()
    want, patched = sample(plain), sample(bootstrap.add_lora(plain, "wan_lora"))
    for plan, budget in budgets().items():
        model = courier(budget=budget)
        clone, lora = model.clone(), bootstrap.add_lora(model, "wan_lora")
        same(f"{plan}: LoRA clone first", sample(lora), patched)
        same(f"{plan}: plain clone", sample(clone), want)
        same(f"{plan}: the original", sample(model), want)
        check(
            f"{plan}: one engine",
            clone.courier_engine is model.courier_engine is lora.courier_engine,
        )
        same(f"{plan}: a clone of the loaded model", sample(model.clone()), want)
        same(f"{plan}: LoRA again", sample(lora), patched)
        del lora
        same(f"{plan}: with the LoRA's clone deleted", sample(clone), want)
        del model
        same(f"{plan}: with the original deleted", sample(clone), want)


def sizes() -> None:
    for plan, budget in budgets().items():
        model = courier(budget=budget)
        moved: list[Any] = []
        model.model.to = lambda *a, moved=moved, **k: moved.append(a)  # the core's whole-model move
        planned = model.model_size()
        check(f"{plan}: unloaded is 0 bytes", model.loaded_size() == 0)
        management.load_models_gpu([model])
        memory = model.courier_engine.snapshot().memory
        check(f"{plan}: loaded_size is the snapshot's", model.loaded_size() == memory.device_bytes)
        check(f"{plan}: model_size was what came to be there", planned == memory.device_bytes)
        check(
            f"{plan}: within the budget at its peak",
            memory.device_peak_bytes <= budget.device_bytes,
        )
        for divisor in (8, 4, 2, 1):
            before = model.loaded_size()
            smallest = budgets()["smallest"].device_bytes
            asked = before // divisor
            freed = model.partially_unload(model.offload_device, asked)
            check(f"{plan}: 1/{divisor}: the number is true", freed == before - model.loaded_size())
            possible = before - asked >= smallest
            check(
                f"{plan}: 1/{divisor}: {freed} of {asked} freed, possible: {possible}",
                freed >= asked or not possible,
            )
        before = model.loaded_size()
        gained = model.partially_load(model.load_device, 1 << 40)
        check(f"{plan}: partially_load's number is true", gained == model.loaded_size() - before)
        check(f"{plan}: and back at the plan", model.loaded_size() == planned)
        held = model.courier_engine.snapshot().memory
        check(f"{plan}: get_ram_usage is what is held", model.get_ram_usage() == held.host_bytes)
        management.unload_all_models()
        check(f"{plan}: the core never moved the whole model {moved[:1]}", not moved)
        del model.model.to


def offers() -> None:
    """The core offers less than the user allows: the offer counts; too small a one is raised."""
    want = sample(stock())
    model = courier()
    full, smallest = budgets()["resident"].device_bytes, budgets()["smallest"].device_bytes
    for offer in (0.1, smallest, (full + smallest) // 2, full, 1e32):
        model.detach()
        model.partially_load(model.load_device, offer)
        held = model.loaded_size()
        check(f"offered {offer}: {held} is taken", held <= max(offer, smallest))
        model.detach()
        same(f"offered {offer}: exact", sample(model), want)


def rooms() -> None:
    """What is free on a card counts for a run whose activations are known, and not the offer."""
    gib, device = 1 << 30, torch.device("cuda", 0)
    room = bootstrap.submodule(pack, "nodes.comfyui.host").device_room_bytes
    vram_state, free = management.vram_state, management.get_free_memory
    default = management.extra_reserved_memory()
    management.get_free_memory = lambda *_, **__: 8 * gib
    try:
        check("a CPU has no such figure", room(torch.device("cpu"), 0, True) is None)
        check("a figure takes all", room(device, gib, True) == 9 * gib)
        check("automatic leaves the core's", room(device, gib, False) == 9 * gib - default)
        core_args.reserve_vram = 1.0
        reserved = management.extra_reserved_memory()
        check("asked for, it is left", room(device, gib, True) == 9 * gib - reserved)
        core_args.reserve_vram = None
        management.vram_state = management.VRAMState.NO_VRAM
        check("--novram is taken at its word", room(device, 0, True) is None)
    finally:
        core_args.reserve_vram = None
        management.vram_state, management.get_free_memory = vram_state, free
    model = courier(budget=values.Budget(12 * gib, 0))
    attachment = model.attachment
    attachment.activation_bytes = gib
    smallest = budgets()["smallest"].device_bytes + gib
    for offered, there, want in (
        (6 * gib, None, 7 * gib),
        (6 * gib, 10 * gib, 10 * gib),
        (6 * gib, 13 * gib, 12 * gib),
        (6 * gib, 0, smallest),
        (0, None, smallest),
        (None, 10 * gib, 12 * gib),
    ):
        found = attachment.budget_within(offered, there).device_bytes
        check(f"offered {offered}, there {there}: {found} is {want}", found == want)


def large_host_budgets() -> None:
    """Of a machine that has less, the share of what is free that is taken without a figure."""
    want = sample(stock())
    smallest, total = budgets()["smallest"].device_bytes, host.host_limits().total_bytes
    for asked, is_beyond in ((total, False), (total + 1, True), (1 << 44, True)):
        model = courier(budget=values.Budget(smallest, asked))
        same(f"{asked}: exact", sample(model), want)
        management.load_models_gpu([model])
        snapshot = model.courier_engine.snapshot()
        used = snapshot.budget.host_bytes
        check(f"{asked}: {used} is used", used == asked if not is_beyond else used < total * 0.61)
        record = service.get_service().status_of_engine(model.courier_engine)
        said = [note for note in record.notes if "is more than the" in note]
        check(f"{asked}: said {said}", len(said) == int(is_beyond))
        check(f"{asked}: what was asked stays", record.asked.budget.host_bytes == asked)
        planned = model.attachment.preview(values.Budget(smallest, 1 << 44), None)
        check(f"{asked}: a preview plans with less", planned.lock_bytes < total)
        management.unload_all_models()


def leaks() -> None:
    """Dropping all outputs frees everything at once; the collector has nothing to do."""
    gc.collect()
    gc.disable()
    try:
        for plan, budget in budgets().items():
            threads = threading.active_count()
            model = courier(budget=budget)
            lora = bootstrap.add_lora(model, "wan_lora")
            sample(lora)
            sample(model, cfg=3.0)
            inner, engine = weakref.ref(model.model), weakref.ref(model.courier_engine)
            entries = len(service.get_service().status().models)
            del model, lora
            check(f"{plan}: the inner model is gone", inner() is None)
            check(f"{plan}: the engine is gone", engine() is None)
            check(f"{plan}: its thread is gone", threading.active_count() <= threads)
            check(
                f"{plan}: so is its status",
                len(service.get_service().status().models) == entries - 1,
            )
            management.cleanup_models_gc()
    finally:
        gc.enable()
    maps = [
        line for line in host.maps_lines() if line.path.endswith(bootstrap.model_file("wan").name)
    ]
    management.cleanup_models()
    check(f"no mapping of the file is left ({len(maps)})", not maps)


def rounds() -> None:
    """Twenty times: load A, run, load B, run, a new LoRA each time."""
    grown: list[int] = []
    alive: list[Any] = []
    # Plans first: they load models of their own.
    plan_of = {key: budgets(key)["mixed"] for key in ("wan", "sd3")}
    for number in range(20):
        for key in ("wan", "sd3"):
            model = courier(key, plan_of[key])
            sample(bootstrap.add_lora(model, f"{key}_lora", 0.1 + number / 20), steps=1)
            alive.append(weakref.ref(model.model))
            del model
        grown.append(anonymous_bytes())
    # A model kept in each round would show 17 times.
    growth = max(grown[3:]) - grown[2]
    check(f"RssAnon is flat after round 3: {[g // MIB for g in grown]} MiB", growth < 8 * MIB)
    check("no model is alive", all(ref() is None for ref in alive))
    check("no status is left", service.get_service().status().models == ())
    names = [t.name for t in threading.enumerate() if "courier" in t.name.lower()]
    check(f"no thread is left {names}", not names)


def two_models() -> None:
    """Two models in turns, each exact, under every plan; and two of one file."""
    want = {key: sample(stock(key)) for key in ("wan", "sd3")}
    for plan in ("resident", "mixed", "smallest"):
        models = {key: courier(key, budgets(key)[plan]) for key in want}
        for turn in range(3):
            for key, model in models.items():
                same(f"{plan}: {key}, turn {turn}", sample(model), want[key])
    twin, other = courier(budget=budgets()["mixed"]), courier(budget=budgets()["smallest"])
    patched = bootstrap.add_lora(twin, "wan_lora")
    for turn in range(2):
        lora = sample(patched)
        same(f"the other model of one file, turn {turn}", sample(other), want["wan"])
    check("the LoRA stays with its own", not torch.equal(lora, want["wan"]))


def guidance() -> None:
    """cfg above 1, a batch of two, and both; also with a LoRA."""
    plain = stock()
    for options in ({"cfg": 4.0}, {"batch": 2}, {"cfg": 4.0, "batch": 2}):
        want = sample(plain, **options)
        patched = sample(bootstrap.add_lora(plain, "wan_lora"), **options)
        for plan, budget in budgets().items():
            model = courier(budget=budget)
            same(f"{plan} {options}", sample(model, **options), want)
            same(
                f"{plan} {options} with a LoRA",
                sample(bootstrap.add_lora(model, "wan_lora"), **options),
                patched,
            )


def model_nodes() -> None:
    """What other nodes do to a model: sampling patches, object patches, compute dtype, wrappers."""
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    from devtools.small_models import write_wan

    def shifted(model: Any) -> Any:
        return ModelSamplingSD3().patch(model, 5.0)[0]

    def halved(model: Any) -> Any:
        clone = model.clone()
        clone.add_object_patch(
            "diffusion_model.head", Halved(clone.get_model_object("diffusion_model.head"))
        )
        return clone

    def computed_in(dtype: torch.dtype) -> Callable[[Any], Any]:
        def change(model: Any) -> Any:
            clone = model.clone()
            clone.set_model_compute_dtype(dtype)
            return clone

        return change

    def wrapped(model: Any) -> Any:
        clone = bootstrap.add_lora(model, "wan_lora")
        for name in ("blocks.1.ffn.0", "head.head"):
            clone.add_weight_wrapper(f"diffusion_model.{name}.weight", twice)
            clone.add_weight_wrapper(f"diffusion_model.{name}.bias", twice)
        return clone

    changes = {
        "ModelSamplingSD3": shifted,
        "add_object_patch": halved,
        "compute dtype float32": computed_in(torch.float32),
        "compute dtype bfloat16": computed_in(torch.bfloat16),
        "compute dtype float16": computed_in(torch.float16),
        "weight wrappers over a LoRA": wrapped,
    }
    for name, change in changes.items():
        compared_after(name, change, None)
    with copy_of("wan", "wide.safetensors") as file:
        # Computed as stored: only here do the operations cast nothing by themselves.
        write_wan(file, dtype=torch.float32, seed=1)
        for name in ("compute dtype bfloat16", "add_object_patch"):
            compared_after(f"{name} of a float32 file", changes[name], file)


def compared_after(name: str, change: Callable[[Any], Any], file: Path | None) -> None:
    plain = stock(file=file)
    clean, want = sample(plain), sample(change(plain))
    for plan, budget in budgets(file=file).items():
        model = courier(budget=budget, file=file)
        same(f"{name}, {plan}", sample(change(model)), want)
        same(f"{name}, {plan}: without it again", sample(model), clean)


def merging() -> None:
    """Nodes that merge models take weights that stay valid when the layers leave."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    def merged(first: Any, second: Any) -> Any:
        return ModelMergeSimple().merge(first, bootstrap.add_lora(second, "wan_lora"), 0.3)[0]

    want = sample(merged(stock(), stock("wan_fp8")))
    check("merging shows", not torch.equal(want, sample(stock())))
    for plan, budget in budgets().items():
        first, second = courier(budget=budget), courier("wan_fp8", budgets("wan_fp8")[plan])
        clean = sample(second)
        both = merged(first, second)
        same(f"{plan}: merged while loaded", sample(both), want)
        second.detach()
        same(f"{plan}: after the other left the device", sample(both), want)
        same(f"{plan}: the other is as before", sample(second), clean)
        file = bootstrap.model_file("wan_fp8")
        given = [patches[0][0] for patches in second.get_key_patches("diffusion_model.").values()]
        lines = [line for line in host.maps_lines() if line.path.endswith(file.name)]
        mapped = [any(line.start <= w.data_ptr() < line.end for line in lines) for w in given]
        check(f"{plan}: what merging is given is the file's ({len(given)})", all(mapped))


class Halved(torch.nn.Module):
    """The model's head, half as loud."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        # In a list: the core's own head stays where it is in the tree.
        self.heads = [head]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.heads[0](*args, **kwargs) * 0.5


def twice(weight: torch.Tensor) -> torch.Tensor:
    return weight * 2


def changed_files() -> None:
    """A file that changes between the loader and the sampler is refused, and nobody dies."""
    other = bootstrap.model_file("wan").with_name("other one.safetensors")
    from devtools.small_models import write_wan

    write_wan(other, seed=9)

    def replace(file: Path) -> None:
        os.replace(shutil.copyfile(other, file.with_suffix(".new")), file)

    def rewrite(file: Path) -> None:
        with file.open("r+b") as target:
            target.write(other.read_bytes())
        os.utime(file, ns=(1, 1))

    ways = {
        "was replaced by another file": replace,
        "was rewritten in place": rewrite,
        "was truncated to": lambda file: os.truncate(file, file.stat().st_size // 2),
        "was deleted, moved or renamed": lambda file: file.unlink(),
    }
    try:
        for said, change in ways.items():
            for loaded in (False, True):
                refused_after(said, change, loaded)
    finally:
        other.unlink()


def refused_after(said: str, change: Callable[[Path], None], loaded: bool) -> None:
    with copy_of("wan", "changing.safetensors") as file:
        model = courier(budget=budgets(file=file)["smallest"], file=file)
        if loaded:
            sample(model)
        change(file)
        what = f"{said}, {'after a run' if loaded else 'before any run'}"
        for attempt in (1, 2):
            text = refusal(bootstrap.add_lora(model, "wan_lora"))
            told = file.name in text and said in text and "load the model again" in text
            check(f"{what}, attempt {attempt}: refused, named and said", told)
        check(f"{what}: and can be let go", model.detach() is not None)


def refusal(model: Any) -> str:
    """The sentence with which a run is refused; "" if it is not."""
    try:
        sample(model)
    except values.CheckpointChangedError as error:
        return str(error)
    return ""


def while_running() -> None:
    """Replaced or deleted in a run: it goes on with the file it opened; the next one refuses."""
    want = sample(stock(), steps=4)
    for name, change in {
        "deleted": lambda file: file.unlink(),
        "replaced": lambda file: os.replace(shutil.copyfile(file, file.with_suffix(".new")), file),
    }.items():
        with copy_of("wan", "running.safetensors") as file:
            model = courier(budget=budgets(file=file)["smallest"], file=file)
            steps: list[int] = []

            def at_step(
                step: int,
                *args: Any,
                change: Any = change,
                file: Path = file,
                steps: list[int] = steps,
            ) -> None:
                steps.append(step)
                if step == 1:
                    change(file)

            same(f"{name}: the run ends exact", sample(model, steps=4, callback=at_step), want)
            check(f"{name}: it was during the run", len(steps) == 4)
            check(f"{name}: the next run is refused", refusal(model) != "")


def headless() -> None:
    """Our nodes with no server, no client and no hidden inputs."""
    import server

    check("there is no server", getattr(server.PromptServer, "instance", None) is None)
    nodes = {
        n.GET_SCHEMA().node_id: n
        for n in asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    }
    check(
        f"nodes {sorted(nodes)}",
        {"CourierBudget", "CourierLoadDiffusionModel", "CourierStatus"} <= nodes.keys(),
    )
    smallest = budgets()["smallest"].device_bytes
    budget = nodes["CourierBudget"].execute("custom", smallest / 2**30, 0.0).result[0]
    name = bootstrap.model_file("wan").name
    loader = nodes["CourierLoadDiffusionModel"]
    check("the name is valid", loader.validate_inputs(unet_name=name) is True)
    check(
        "a linked name is not judged yet",
        loader.validate_inputs() is True and loader.fingerprint_inputs() == "",
    )
    check(
        "one fingerprint a file",
        loader.fingerprint_inputs(unet_name=name) == loader.fingerprint_inputs(name, "default"),
    )
    model = loader.execute(name, "default", budget).result[0]
    same("exact", sample(model), sample(stock()))
    text = nodes["CourierStatus"].execute(anything=model).result[1]
    check("the status knows it", bootstrap.model_file("wan").stem in text)


PARTS = (
    core, dtypes, mixed_file, scaled_fp8, loras, arrivals, saving, merged_then_unloaded, unloading,
    interrupts, clones, sizes, offers, rooms, large_host_budgets, leaks, rounds, two_models,
    guidance, model_nodes, merging, changed_files, while_running, headless,
)  # fmt: skip


def main(names: list[str]) -> int:
    global part
    by_name = {function.__name__: function for function in PARTS}
    for name in names or list(by_name):
        part = name
        try:
            # As ComfyUI executes every node.
            with torch.inference_mode():
                by_name[name]()
        except BaseException:  # one part must not hide the others
            traceback.print_exc()
            check("raised, see stderr", False)
        check(f"the core warned of no leak {warnings.leaks}", not warnings.leaks)
        warnings.leaks.clear()
        management.unload_all_models()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
