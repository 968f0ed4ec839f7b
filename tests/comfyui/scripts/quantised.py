"""Quantised files against the core's own loader: patches, budgets, merges, saves, sizes.

Usage: quantised.py [PART ...]   (all parts when none is named)
Prints "ok PART: what" or "FAIL PART: what", one line a comparison; each format that this ComfyUI
reads is a part. First of all it prints "ok known: NAME" for each, and "ok version: VERSION".
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.model_management as management  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import comfyui_version  # noqa: E402
from quantised_files import (  # noqa: E402
    FORMATS,
    PATCHES,
    Format,
    as_bytes,
    known_formats,
    patches,
    write_quantised,
)
from safetensors.torch import load_file, save_file  # noqa: E402

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")
dry_run = bootstrap.submodule(pack, "nodes.headless.plan.dry_run")

failures: list[str] = []
part = ""


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(f"{part}: {what}")


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    check(what, torch.equal(got, want))


@contextmanager
def quantised(how: Format, rest: torch.dtype = torch.bfloat16) -> Iterator[Path]:
    """The small Wan in that format, in the folder that the loader looks into."""
    plain = bootstrap.model_file("wan")
    file = plain.with_name(f"quantised {how.name}.safetensors")
    try:
        yield write_quantised(file, plain, how, rest)
    finally:
        file.unlink(missing_ok=True)


def courier(file: Path, budget: Any) -> Any:
    model = loading.load_diffusion_model(file.name, "default", budget)
    model.attachment.measures_activations = False  # plans are for the weights alone
    return model


def smallest_of(engine: Any) -> int:
    try:
        engine.plan(values.Budget(0, 0))
    except values.DeviceBudgetError as error:
        return int(error.smallest_bytes)
    raise AssertionError("nothing at all was enough")


def patched(model: Any, kind: str) -> Any:
    if kind == "plain":
        return model
    lora = patches(kind, bootstrap.model_file("wan"))
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0)[0]


def budgets_of(file: Path) -> dict[str, Any]:
    engine = courier(file, values.Budget()).courier_engine
    full = engine.plan(values.Budget(None, 0)).device_bytes
    smallest = smallest_of(engine)
    return {
        "whole": values.Budget(full, 0),
        "half": values.Budget((smallest + full) // 2, 4 * full),
        "smallest": values.Budget(smallest, 0),
    }


def one_format(how: Format) -> None:
    """Every kind of patch at every budget gives the latent of the core's own loader."""
    with quantised(how) as file:
        stock = comfy.sd.load_diffusion_model(str(file))
        kinds = ("plain", *PATCHES)
        wanted = {kind: bootstrap.sample(patched(stock, kind)) for kind in kinds}
        for kind in PATCHES:
            differs = not torch.equal(wanted[kind], wanted["plain"])
            check(f"{kind} changes the latent", differs and bool(wanted[kind].isfinite().all()))
        for plan, budget in budgets_of(file).items():
            model = courier(file, budget)
            for kind in kinds:
                before = model.courier_engine.snapshot().traffic.shipped_bytes
                got = bootstrap.sample(patched(model, kind))
                shipped = model.courier_engine.snapshot().traffic.shipped_bytes - before
                same(f"{plan}, {kind}: equal", got, wanted[kind])
                streams = plan != "whole"
                check(f"{plan}, {kind}: {shipped} bytes streamed", (shipped > 0) == streams)
            model.courier_engine.sleep()
            model.courier_engine.wake()
            same(
                f"{plan}: clean once more, after a sleep", bootstrap.sample(model), wanted["plain"]
            )


def sizes(how: Format) -> None:
    """What is said of a file is what it holds, and what ``courier.py plan`` says of it."""
    # The rest in the dtype that it is computed in on a CPU: ComfyUI copies what it has to convert.
    with quantised(how, rest=torch.float32) as file:
        in_file = sum(
            tensor.nbytes
            for name, tensor in load_file(file).items()
            if not name.endswith((".comfy_quant", "scaled_fp8"))
        )
        model = courier(file, values.Budget())
        engine = model.courier_engine
        snapshot = engine.snapshot()
        held = sum(layer.size_bytes for layer in snapshot.layers)
        near(f"held {held}, in the file {in_file}", held, in_file, 0.005)
        buffers = sum(buffer.nbytes for buffer in model.model.buffers())
        core = management.module_size(model.model)
        near(f"held {held}, by ComfyUI {core}", held + buffers, core, 0.005)
        copied = snapshot.memory.copied_bytes
        check(f"{copied} bytes are copies", copied <= in_file * 0.005)
        planned = dry_run.dry_run(dry_run.DryRun(str(file), vram_gib=1.0, activation_gib=0.0))
        at_least, promised = smallest_of(engine), planned["smallest"]["device_bytes"]
        near(f"smallest {at_least}, planned {promised}", at_least, promised, 0.01)
        engine.load(values.Budget(at_least, 0))
        reason = engine.snapshot().layers[-1].reason
        check(f"the reason has {len(reason)} characters", len(reason) <= 300)
        engine.unload()


def saving() -> None:
    """A save has the tensors that a save of the core's own model has, merged or not."""
    plain = bootstrap.model_file("wan")
    reads_marks = hasattr(comfy.utils, "convert_old_quants")
    with tempfile.TemporaryDirectory(dir=bootstrap.base_path()) as temporary:
        out = Path(temporary)
        saves_equal(plain, "wan", out)
        for how in FORMATS:
            # Before it read marks, ComfyUI could not save what its header says is quantised.
            is_saved = how.name in SAVED and (reads_marks or how.place != "header")
            if how.name in known_formats() and is_saved:
                with quantised(how) as file:
                    saves_equal(file, how.name, out)


def saves_equal(file: Path, name: str, out: Path) -> None:
    for kind in ("plain", "lora"):
        stock = patched(comfy.sd.load_diffusion_model(str(file)), kind)
        wanted = saved(out / "stock.safetensors", stock)
        for plan, budget in budgets_of(file).items():
            model = courier(file, budget)
            got = saved(out / "courier.safetensors", patched(model, kind))
            differing = [
                key
                for key, tensor in wanted.items()
                if key not in got or not identical(got[key], tensor)
            ]
            alike = not differing and got.keys() == wanted.keys()
            check(f"{name}, {plan}, {kind}: the same {len(wanted)} tensors {differing[:3]}", alike)


def identical(got: torch.Tensor, want: torch.Tensor) -> bool:
    alike = got.dtype == want.dtype and got.shape == want.shape
    return alike and torch.equal(got.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))


def saved(file: Path, model: Any) -> dict[str, torch.Tensor]:
    comfy.sd.save_checkpoint(str(file), model)
    return dict(load_file(file))


def merging() -> None:
    """A merge of two models, either of them quantised, is the core's."""
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    def outcome(first: Any, second: Any) -> Any:
        try:
            merged = ModelMergeSimple().merge(first, patched(second, "lora"), 0.3)[0]
        except Exception as error:  # what the core cannot merge, ours cannot either
            return type(error).__name__
        return bootstrap.sample(merged)

    plain = bootstrap.model_file("wan")
    for how in FORMATS:
        if how.name not in known_formats() or how.name not in SAVED:
            continue
        with quantised(how) as file:
            for one, other in ((file, plain), (plain, file)):
                stock = [comfy.sd.load_diffusion_model(str(path)) for path in (one, other)]
                want = outcome(*stock)
                for plan in ("whole", "smallest"):
                    ours = [courier(path, budgets_of(path)[plan]) for path in (one, other)]
                    got = outcome(*ours)
                    is_text = isinstance(want, str)
                    alike = got == want if is_text else torch.equal(got, want)
                    what = want if is_text else "equal"
                    order = "first" if one == file else "second"
                    check(f"{how.name} as the {order} of two, {plan}: {what}", alike)


def compute_dtype() -> None:
    """Patches are computed in what this ComfyUI computes them in: on a card maybe in float16."""
    device = management.get_torch_device()
    known = getattr(management, "LORA_COMPUTE_DTYPES", None)
    lora = bootstrap.submodule(pack, "nodes.comfyui.lora")
    check("as this ComfyUI says", lora.compute_dtype(device) is torch.float32)
    if known is None:
        return  # before it had a choice, it was float32 everywhere
    formats = [how for how in FORMATS if how.name in ("fp8_header", "int8_convrot")]
    with quantised(formats[0]) as scaled, quantised(formats[1]) as rotated:
        for file in (bootstrap.model_file("wan"), bootstrap.model_file("wan_fp8"), scaled, rotated):
            known.clear()
            wide = bootstrap.sample(patched(comfy.sd.load_diffusion_model(str(file)), "lora"))
            known[device] = torch.float16
            half = bootstrap.sample(patched(comfy.sd.load_diffusion_model(str(file)), "lora"))
            check(f"{file.name}: it shows", not torch.equal(wide, half))
            for plan, budget in budgets_of(file).items():
                got = bootstrap.sample(patched(courier(file, budget), "lora"))
                same(f"{file.name}, {plan}: equal in float16", got, half)
    known.clear()


def askew() -> None:
    """A header of an odd length: what has to lie on a boundary is copied, and only that."""
    for how in FORMATS:
        if how.name not in known_formats() or how.name not in ("fp8_header", "int8_channel"):
            continue
        with quantised(how, rest=torch.float32) as file:
            want = bootstrap.sample(comfy.sd.load_diffusion_model(str(file)))
            text = file.read_bytes()
            length = int.from_bytes(text[:8], "little")
            longer = (length + 1).to_bytes(8, "little") + text[8 : 8 + length] + b" "
            file.write_bytes(longer + text[8 + length :])
            wide = sum(one.nbytes for one in load_file(file).values() if one.dtype.itemsize > 1)
            for plan, budget in budgets_of(file).items():
                model = courier(file, values.Budget(budget.device_bytes, 1 << 30))
                same(f"{how.name}, {plan}: equal", bootstrap.sample(model), want)
            copied = model.courier_engine.snapshot().memory.copied_bytes
            check(f"{how.name}: {copied} bytes are copies, of {wide} wide ones", copied == wide)
            asked = dry_run.DryRun(str(file), vram_gib=1.0, host_gib=1.0, activation_gib=0.0)
            planned = dry_run.dry_run(asked)
            check(f"{how.name}: plan says so", planned["planned"]["host_copied_bytes"] == wide)
            at_least = smallest_of(model.courier_engine)
            promised = planned["smallest"]["device_bytes"]
            near(f"{how.name}: smallest {at_least}, planned {promised}", at_least, promised, 0.01)


def native_fp8() -> None:
    """Where a device multiplies fp8 itself, a patched layer does too, as the core's merged one."""
    how = next(how for how in FORMATS if how.name == "fp8")
    if how.name not in known_formats():
        return
    before = management.supports_fp8_compute
    management.supports_fp8_compute = lambda device=None: True
    try:
        with quantised(how) as file:
            stock = comfy.sd.load_diffusion_model(str(file))
            layer = stock.model.get_submodule("diffusion_model.blocks.0.self_attn.q")
            check("the core would multiply in fp8", not layer._full_precision_mm)
            want = {kind: bootstrap.sample(patched(stock, kind)) for kind in ("plain", "lora")}
            for plan, budget in budgets_of(file).items():
                for kind in want:
                    got = bootstrap.sample(patched(courier(file, budget), kind))
                    same(f"{plan}, {kind}: equal", got, want[kind])
    finally:
        management.supports_fp8_compute = before


class Stopped(BaseException):
    """As Ctrl-C: no exception that a hook after a forward hears of."""


def interrupted() -> None:
    """A run that ends inside a patched layer leaves nothing of the patch behind."""

    def stop(module: Any, args: Any, output: Any) -> None:
        raise Stopped

    with quantised(next(how for how in FORMATS if how.name == "fp8_header")) as file:
        for plan, budget in budgets_of(file).items():
            model = courier(file, budget)
            clean, lora = bootstrap.sample(model), bootstrap.sample(patched(model, "lora"))
            layer = model.model.get_submodule("diffusion_model.blocks.1.self_attn.q")
            for after, want in (("plain", clean), ("lora", lora)):
                handle = layer.register_forward_hook(stop)
                try:
                    bootstrap.sample(patched(model, "lora"))
                    check(f"{plan}: it was stopped", False)
                except Stopped:
                    handle.remove()
                same(f"{plan}, {after}: equal", bootstrap.sample(patched(model, after)), want)
                check(f"{plan}, {after}: nothing is left", "weight" not in layer.__dict__)


def near(what: str, one: int, other: int, share: float) -> None:
    check(what, abs(one - other) <= share * other)


def unknown_formats() -> None:
    """What this ComfyUI would take for something else is refused; the rest is not."""
    from comfy.quant_ops import QUANT_ALGOS

    plain = bootstrap.model_file("wan")
    known = {how.format for how in FORMATS if how.name in known_formats() and how.place == "beside"}
    names = {how.format for how in FORMATS if how.place == "beside"} | {"not_invented_yet"}
    for name in sorted(names - known):
        file = plain.with_name("unknown format.safetensors")
        mark = {"blocks.0.self_attn.q.comfy_quant": as_bytes({"format": name})}
        save_file({**load_file(plain), **mark}, file)
        message = refusal(file)
        here = f"this ComfyUI ({comfyui_version.__version__})"
        reader = "a newer ComfyUI" if name == "not_invented_yet" else "or newer reads it"
        for word in (file.name, name, here, reader):
            check(f"{name}: the sentence has {word!r}: {message}", word in message)
        layers = json.dumps({"layers": {"blocks.0.self_attn.q": {"format": name}}})
        save_file(load_file(plain), file, metadata={"_quantization_metadata": layers})
        is_refused = "does not read" in refusal(file)
        should_be = name not in QUANT_ALGOS
        check(f"{name} in the header: refused ({should_be})", is_refused == should_be)
        file.unlink()


def refusal(file: Path) -> str:
    try:
        courier(file, values.Budget())
    except values.CheckpointFormatError as error:
        return str(error)
    except Exception:
        traceback.print_exc()
    return ""


PARTS = {
    "unknown_formats": unknown_formats,
    "saving": saving,
    "merging": merging,
    "compute_dtype": compute_dtype,
    "askew": askew,
    "interrupted": interrupted,
    "native_fp8": native_fp8,
}
SAVED = ("fp8_old", "fp8_header", "int8_convrot", "nvfp4", "convrot_w4a4", "asym_w4a8")


def run(name: str) -> None:
    global part
    part = name
    try:
        with torch.inference_mode():  # as ComfyUI runs its nodes
            if name in PARTS:
                PARTS[name]()
            else:
                how = next(how for how in FORMATS if how.name == name)
                one_format(how)
                # Before it read marks, ComfyUI gave all matrices of such a file that dtype.
                if how.place != "old" or hasattr(comfy.utils, "convert_old_quants"):
                    part = f"{name} sizes"
                    sizes(how)
    except Exception:
        traceback.print_exc()
        check("ran to its end (see stderr)", False)


def main() -> int:
    known = known_formats()
    print(f"ok version: {comfyui_version.__version__}")
    for name in sorted(known):
        print(f"ok known: {name}")
    for name in sys.argv[1:] or [*PARTS, *(how.name for how in FORMATS if how.name in known)]:
        run(name)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
