"""Text encoders through ComfyUI's own loaders and through ours, compared bit for bit.

Usage: encoders.py [PART ...]   (all parts when none is named)
Prints "ok PART: what" or "FAIL PART: what", one line a comparison.
"""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.hooks  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
import safetensors.torch  # noqa: E402

from devtools.small_models import write_clip_lora, write_t5_base  # noqa: E402

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
orders = bootstrap.submodule(pack, "nodes.comfyui.orders")
records = bootstrap.submodule(pack, "nodes.requests.records")
registry = bootstrap.submodule(pack, "nodes.models.registry")
values = bootstrap.submodule(pack, "offload_core.values")
host = bootstrap.submodule(pack, "offload_core.host")

MIB = 2**20
TEXTS = ("a (red:1.3) cat under a table", "fog")
failures: list[str] = []
part = ""


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(f"{part}: {what}")


def courier(*files: Path, kind: str = "stable_diffusion", budget: Any = None) -> Any:
    names = [file.name for file in files]
    return loading.load_text_encoder(names, kind, "default", budget or values.Budget())


def stock(*files: Path, kind: str = "stable_diffusion") -> Any:
    return comfy.sd.load_clip(
        [str(file) for file in files],
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=getattr(comfy.sd.CLIPType, kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
    )


def encoded(clip: Any, text: str = TEXTS[0]) -> list[torch.Tensor]:
    found = clip.encode_from_tokens(clip.tokenize(text), return_pooled=True, return_dict=True)
    return [found[name] for name in ("cond", "pooled_output") if found[name] is not None]


def same(what: str, got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    check(what, len(got) == len(want) and all(map(torch.equal, got, want)))


def plans(*files: Path, kind: str = "stable_diffusion") -> dict[str, Any]:
    """Budgets that hold the whole encoder, half of it, and as little of it as works."""
    engine = courier(*files, kind=kind).patcher.courier_engine
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


def anon_bytes() -> int:
    gc.collect()
    host.give_back_freed()
    return host.process_memory().rss_anon_bytes


@contextmanager
def encoder_file(name: str, write: Callable[[Path], Any]) -> Iterator[Path]:
    folder = bootstrap.base_path() / "models" / "text_encoders"
    file = folder / name
    write(file)
    forget_names()
    try:
        yield file
    finally:
        file.unlink()
        forget_names()


def forget_names() -> None:
    folder_paths.filename_list_cache.clear()


def compared(*files: Path, kind: str) -> None:
    """Two texts under every plan, each the same and each streamed as far as it has to be."""
    theirs = stock(*files, kind=kind)
    want = {text: encoded(theirs, text) for text in TEXTS}
    del theirs
    check("the core's own is finite", all(bool(t.isfinite().all()) for t in want[TEXTS[0]]))
    for name, budget in plans(*files, kind=kind).items():
        clip = courier(*files, kind=kind, budget=budget)
        for text in TEXTS:
            same(f"{name}: {text!r}", encoded(clip, text), want[text])
        memory = clip.patcher.courier_engine.snapshot()
        shipped = memory.traffic.shipped_bytes
        check(f"{name}: {shipped} bytes streamed", (shipped > 0) == (name != "whole"))
        check(
            f"{name}: within its budget",
            memory.memory.device_peak_bytes <= budget.device_bytes,
        )


def clip() -> None:
    file = bootstrap.model_file("clip_l")
    compared(file, kind="stable_diffusion")
    compared(file, kind="sd3")


def t5() -> None:
    """A bfloat16 file of an encoder that ComfyUI keeps as float16: rounded as it arrives."""
    with encoder_file("t5_base.safetensors", write_t5_base) as file:
        compared(file, kind="stable_audio")
        found = courier(file, kind="stable_audio").patcher
        memory = found.courier_engine.snapshot().memory
        check(f"{memory.copied_bytes} bytes copied", memory.copied_bytes < MIB)
        check(
            "it would be float16", set(found.attachment.stored_dtypes.values()) >= {torch.float16}
        )


def wider() -> None:
    """A float32 file of one that ComfyUI keeps as float16 is copied, as ComfyUI does, and said."""
    tensors = comfy.utils.load_torch_file(str(bootstrap.model_file("clip_l")), safe_load=True)

    def write(file: Path) -> None:
        wide = {key: value.float() for key, value in tensors.items()}
        safetensors.torch.save_file(wide, file)

    with encoder_file("clip_l_fp32.safetensors", write) as file:
        want = encoded(stock(file))
        got = courier(file, budget=values.Budget(None, 2**30))
        same("all of it resident", encoded(got), want)
        copied = got.patcher.courier_engine.snapshot().memory.copied_bytes
        check(f"{copied} bytes copied", copied > 200 * MIB)
        try:
            courier(file, budget=values.Budget(None, MIB))
        except values.HostBudgetError as error:
            text = str(error)
        check(f"refused under a small RAM budget: {text}", text.startswith(f"{file.name} would"))


def pickled() -> None:
    tensors = comfy.utils.load_torch_file(str(bootstrap.model_file("clip_l")), safe_load=True)
    with encoder_file("clip_l.pt", lambda file: torch.save(dict(tensors), file)) as file:
        got = courier(file)
        same("as ComfyUI reads it", encoded(got), encoded(stock(file)))
        notes = got.patcher.courier_engine.snapshot().notes
        check(f"the status says so: {notes}", any("is not a safetensors file" in n for n in notes))


def lora_weights() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = write_clip_lora(Path(folder) / "lora.safetensors")
        return comfy.utils.load_torch_file(str(file), safe_load=True)


def with_lora(clip: Any, weights: Any, strength: float) -> Any:
    return comfy.sd.load_lora_for_models(None, clip, weights, 0, strength)[1]


def lora() -> None:
    file, weights = bootstrap.model_file("clip_l"), lora_weights()
    theirs = stock(file)
    want = {s: encoded(with_lora(theirs, weights, s)) for s in (0, 0.5, -1)}
    clean = encoded(theirs)
    check("the LoRA changes the conditioning", not torch.equal(want[0.5][0], clean[0]))
    del theirs
    for name, budget in plans(file).items():
        ours = courier(file, budget=budget)
        for strength, wanted in want.items():
            same(f"{name}: at {strength}", encoded(with_lora(ours, weights, strength)), wanted)
        same(f"{name}: without it again", encoded(ours), clean)


def hooked(clip: Any, weights: Any) -> list[torch.Tensor]:
    group = comfy.hooks.create_hook_lora(lora=weights, strength_model=0, strength_clip=0.7)
    found = clip.clone()
    found.patcher.forced_hooks = group
    found.patcher.register_all_hook_patches(
        group, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Clip)
    )
    found.use_clip_schedule = True
    scheduled = found.encode_from_tokens_scheduled(found.tokenize(TEXTS[0]), show_pbar=False)
    return [one[0] for one in scheduled]


def hooks() -> None:
    file, weights = bootstrap.model_file("clip_l"), lora_weights()
    theirs = stock(file)
    clean, want = encoded(theirs), hooked(theirs, weights)
    check("the hook changes the conditioning", not torch.equal(want[0], clean[0]))
    del theirs
    for name, budget in plans(file).items():
        ours = courier(file, budget=budget)
        same(f"{name}: hooked", hooked(ours, weights), want)
        same(f"{name}: without it again", encoded(ours), clean)
        check(f"{name}: no private weight is left", len(ours.patcher.attachment.private) == 0)


def memory() -> None:
    """Nothing is read at load but the header; sleep gives back what a run took."""
    file = bootstrap.model_file("clip_l")
    size = file.stat().st_size
    budget = plans(file)["smallest"]
    first = courier(file, budget=budget)
    encoded(first)  # what the first run of a process takes
    before = anon_bytes()
    tokenizer = type(first.tokenizer)()
    words = anon_bytes() - before
    del first
    before = anon_bytes()
    ours = courier(file, budget=budget)
    grown = anon_bytes() - before
    check(
        f"load: {grown / MIB:.1f} MiB, of which a tokenizer is {words / MIB:.1f}",
        grown - words <= 0.05 * size,
    )
    del tokenizer
    encoded(ours)
    orders.get_orders().sleep_here(records.SleepOrder((orders.id_of(ours),), level=2))
    kept = anon_bytes() - before - grown
    check(f"asleep: {kept / MIB:.1f} MiB more than before the run", kept <= 20 * MIB)
    check("asleep: nothing on the device", ours.patcher.courier_engine.device_bytes == 0)
    del ours
    gc.collect()
    left = [name for _, name, _ in registry.get_service().engines()]
    check(f"nothing is left of it: {left}", not left)


def asleep() -> None:
    file = bootstrap.model_file("clip_l")
    ours = courier(file, budget=plans(file)["half"])
    want = encoded(ours)
    found = {entry["id"]: entry["kind"] for entry in orders.get_orders().models()}
    name = orders.id_of(ours)
    check(f"known as {found.get(name)}", found.get(name) == "text encoder")
    for level in (1, 2):
        orders.get_orders().sleep_here(records.SleepOrder((name,), level=level))
        try:
            encoded(ours)
            said = ""
        except values.AsleepError as error:
            said = str(error)
        check(f"level {level}: refused while asleep: {said[:50]}", "is asleep" in said)
        orders.get_orders().wake_here(records.WakeOrder((name,)))
        same(f"level {level}: after it woke", encoded(ours), want)


def clones() -> None:
    file = bootstrap.model_file("clip_l")
    theirs, ours = stock(file), courier(file)
    for clip in (theirs, ours):
        clip.first = encoded(clip)
    other = [clip.clone() for clip in (theirs, ours)]
    for clip in other:
        clip.clip_layer(-2)
    same("clip skip on a clone", *map(encoded, reversed(other)))
    same("and not on the first", encoded(ours), theirs.first)


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
    good = bootstrap.model_file("clip_l")
    wan = bootstrap.model_file("wan")
    with encoder_file("wan.safetensors", lambda file: shutil.copyfile(wan, file)) as file:
        refused("a diffusion model", lambda: courier(file), file.name, "no text encoder")
        refused("one of two", lambda: courier(good, file, kind="sd3"), file.name)
    data = good.read_bytes()[: 2**20]
    with encoder_file("short.safetensors", lambda file: file.write_bytes(data)) as file:
        refused("a truncated file", lambda: courier(file), file.name, "truncated")
    tensors = comfy.utils.load_torch_file(str(good), safe_load=True)
    some = {key: value for key, value in tensors.items() if ".layers.7." not in key}
    with encoder_file("some.safetensors", lambda f: safetensors.torch.save_file(some, f)) as file:
        refused("a layer lacks", lambda: courier(file), file.name, "lacks 16 weights")
    refused("two of one kind", lambda: courier(good, good, kind="flux"), good.name)


PARTS = (memory, clip, t5, wider, pickled, lora, hooks, asleep, clones, bad)
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
