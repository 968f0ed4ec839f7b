"""Models that sleep inside a ComfyUI: ours and the core's, exact, refused while asleep, flat.

python sleep.py [part ...]
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import bootstrap
import torch

bootstrap.load_comfyui()

import comfy.cldm.cldm  # noqa: E402
import comfy.controlnet  # noqa: E402
import comfy.model_management as management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
orders = bootstrap.submodule(pack, "nodes.comfyui.orders")
control = bootstrap.submodule(pack, "nodes.requests.records")
sleeping = bootstrap.submodule(pack, "nodes.comfyui.sleeping")
values = bootstrap.submodule(pack, "offload_core.values")
host = bootstrap.submodule(pack, "offload_core.host")

MIB = 2**20
NAME = bootstrap.model_file("wan").stem
failures: list[str] = []
part = ""


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(f"{part}: {what}")


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    check(what, torch.equal(got, want))


def courier(key: str = "wan", budget: Any = None) -> Any:
    name = bootstrap.model_file(key).name
    return loading.load_diffusion_model(name, "default", budget or values.Budget())


def stock(key: str = "wan") -> Any:
    return comfy.sd.load_diffusion_model(str(bootstrap.model_file(key)))


def sleep(*models: Any, **more: Any) -> dict[str, Any]:
    ids = tuple(orders.id_of(model) for model in models) or None
    return orders.get_orders().sleep_here(control.SleepOrder(ids, **more))


def wake(*models: Any) -> dict[str, Any]:
    ids = tuple(orders.id_of(model) for model in models) or None
    return orders.get_orders().wake_here(control.WakeOrder(ids))


def state(model: Any) -> str:
    found = {entry["id"]: entry["state"] for entry in orders.get_orders().models()}
    return found[orders.id_of(model)]


def refused(what: str, use: Callable[[], Any], name: str, same_list: bool = True) -> None:
    before = [(type(one).__name__, id(one.model)) for one in management.current_loaded_models]
    said = ""
    try:
        use()
    except values.AsleepError as error:
        said = str(error)
    check(
        f"{what}: refused: {said[:60]!r}",
        said.startswith(f"{name} (") and "is asleep. Wake" in said,
    )
    after = [(type(one).__name__, id(one.model)) for one in management.current_loaded_models]
    if same_list:
        check(f"{what}: the core's list is as before", sorted(before) == sorted(after))


def plans() -> dict[str, Any]:
    engine = courier().courier_engine
    full = engine.plan(values.Budget(None, 0)).device_bytes
    try:
        engine.plan(values.Budget(0, 0))
        raise AssertionError("nothing at all was enough")
    except values.DeviceBudgetError as error:
        smallest = error.smallest_bytes
    return {
        "resident": values.Budget(full, 0),
        "pinned": values.Budget((smallest + full) // 2, 4 * full),
        "mapped": values.Budget(smallest, 0),
    }


def ours() -> None:
    """Every hosting and both levels, with a LoRA and without."""
    want = {lora: bootstrap.sample(with_lora(stock(), lora)) for lora in (False, True)}
    for name, budget in plans().items():
        model = courier(budget=budget)
        for lora, level in itertools.product((False, True), (1, 2)):
            what = f"{name}, level {level}{', LoRA' if lora else ''}"
            user = with_lora(model, lora)
            same(f"{what}: before", bootstrap.sample(user), want[lora])
            receipt = sleep(user, level=level)
            engine = model.courier_engine
            check(f"{what}: told asleep", receipt["models"][0]["state"] == "asleep")
            check(f"{what}: nothing on the device", engine.device_bytes == 0)
            locked = engine.snapshot().memory.locked_bytes
            check(f"{what}: {locked} locked", (locked > 0) == (level == 1 and name == "pinned"))
            check(f"{what}: the core counts 0", user.loaded_size() == 0)
            refused(what, lambda user=user: bootstrap.sample(user), NAME)
            refused(
                f"{what}, loaded by another",
                lambda user=user: management.load_models_gpu([user]),
                NAME,
                same_list=False,
            )
            management.unload_all_models()
            check(f"{what}: /free leaves it asleep", state(user) == "asleep")
            wake()
            check(f"{what}: told awake", state(user) == "awake")
            listed = [one for one in management.current_loaded_models if user.is_clone(one.model)]
            check(f"{what}: the core knows it once", len(listed) == 1)
            same(f"{what}: after", bootstrap.sample(user), want[lora])
            sleep(user, level=level, on_use=control.OnUse.WAKE)
            same(f"{what}: woken by its use", bootstrap.sample(user), want[lora])
            check(f"{what}: awake then", state(user) == "awake")
        added = with_lora(model, False)
        sleep(model)
        added = with_lora(model, True)
        wake()
        same(f"{name}: a LoRA that was added meanwhile", bootstrap.sample(added), want[True])
        same(f"{name}: and the clean one", bootstrap.sample(model), want[False])


def with_lora(model: Any, lora: bool) -> Any:
    return bootstrap.add_lora(model, "wan_lora", 0.7) if lora else model.clone()


def classic() -> None:
    """A model of the core's, with its clones; a text encoder; a VAE."""
    model = stock()
    patched = bootstrap.add_lora(model, "wan_lora", 0.7)
    want = bootstrap.sample(model), bootstrap.sample(patched)
    for level in (1, 2):
        what = f"level {level}"
        receipt = sleep(patched, level=level)
        check(f"{what}: {receipt['message']}", receipt["models"][0]["state"] == "asleep")
        check(f"{what}: says what stays", "stay in RAM" in receipt["models"][0]["kept"][0])
        refused(f"{what}: it", lambda: bootstrap.sample(patched), "WAN21")
        refused(f"{what}: its clone", lambda: bootstrap.sample(model), "WAN21")
        management.unload_all_models()
        check(f"{what}: /free leaves it asleep", state(model) == "asleep")
        other = stock("sd3")
        bootstrap.sample(other)
        check(f"{what}: another model runs beside it", state(model) == "asleep")
        wake()
        check(f"{what}: awake", state(model) == "awake")
        same(f"{what}: clone exact", bootstrap.sample(model), want[0])
        same(f"{what}: exact", bootstrap.sample(patched), want[1])
        sleep(model, level=level, on_use=control.OnUse.WAKE)
        same(f"{what}: woken by a clone's use", bootstrap.sample(patched), want[1])
        check(f"{what}: awake then", state(model) == "awake")
        names = [id(one.model) for one in management.current_loaded_models]
        check(f"{what}: the core has each patcher once", len(names) == len(set(names)))
    clip = comfy.sd.load_clip(
        [str(bootstrap.model_file("clip_l"))], clip_type=comfy.sd.CLIPType.SD3
    )
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(bootstrap.model_file("vae"))))

    def encode() -> torch.Tensor:
        return clip.encode_from_tokens(clip.tokenize("a courier"), return_pooled=True)[0]

    latent = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    parts = {"text encoder": (clip, encode), "VAE": (vae, lambda: vae.decode(latent.clone()))}
    for kind, (value, use) in parts.items():
        wanted = use()
        receipt = sleep(value)
        told = receipt["models"][0]
        check(f"{kind}: told so: {told['kind']}", told["kind"] == kind)
        refused(kind, use, told["name"])
        wake(value)
        same(f"{kind}: exact", use(), wanted)
        sleep(value, on_use=control.OnUse.WAKE)
        same(f"{kind}: woken by its use", use(), wanted)


def control_net(model: Any) -> Any:
    """A ControlNet of the core's for ``model``: random weights, seeded, none of them zero."""
    config = {**model.model.model_config.unet_config, "hint_channels": 3, "dtype": torch.float32}
    for name in ("out_channels", "transformer_depth_output", "disable_unet_model_creation"):
        config.pop(name, None)
    with torch.inference_mode(False), torch.no_grad():
        inner = comfy.cldm.cldm.ControlNet(**config)
        generator = torch.Generator().manual_seed(3)
        for weight in inner.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    net = comfy.controlnet.ControlNet(
        inner.requires_grad_(False), load_device=management.get_torch_device()
    )
    hint = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(4))
    return net.copy().set_cond_hint(hint, 0.8)


def sample_with(net: Any, model: Any) -> torch.Tensor:
    """As ``bootstrap.sample``, with the ControlNet on the positive conditioning."""
    plain = bootstrap.conditioning
    ((tokens, options),) = plain(model, 0)
    positive = [[tokens, {**options, "control": net, "control_apply_to_uncond": False}]]
    shape = bootstrap.latent_shape(model)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return comfy.sample.sample(
        model, noise, 2, 1.0, "euler", "simple", positive, plain(model, 1), torch.zeros(shape),
        seed=0, disable_pbar=True,
    )  # fmt: skip


def control_nets() -> None:
    """A ControlNet of the core's beside a model of ours, and beside one of the core's."""
    for owner, model in (("ours", courier("sd15")), ("the core's", stock("sd15"))):
        net = control_net(model)
        without, want = bootstrap.sample(model), sample_with(net, model)
        check(f"{owner}: it does something", not torch.equal(without, want))
        for level in (1, 2):
            what = f"{owner}, level {level}"
            told = {one["kind"]: one["state"] for one in sleep(level=level)["models"]}
            both = {"diffusion model": "asleep", "ControlNet": "asleep"}
            check(f"{what}: both sleep: {told}", both.items() <= told.items())
            wake(model)
            refused(f"{what}: the net", partial(sample_with, net, model), "ControlNet", False)
            same(f"{what}: without it, exact", bootstrap.sample(model), without)
            wake()
            same(f"{what}: exact", sample_with(net, model), want)
            sleep(level=level, on_use=control.OnUse.WAKE)
            same(f"{what}: woken by use", sample_with(net, model), want)
        net.cleanup()


def together() -> None:
    """All of them at once; what is gone is no longer listed."""
    mine, core = courier(), stock("sd3")
    want = bootstrap.sample(mine), bootstrap.sample(core)
    for level in (1, 2):
        receipt = sleep(level=level)
        told = {model["id"]: model["state"] for model in receipt["models"]}
        both = {orders.id_of(mine), orders.id_of(core)}
        check(f"level {level}: both sleep", both <= told.keys() and {*told.values()} == {"asleep"})
        receipt = wake()
        check(f"level {level}: {receipt['message']}", receipt["ok"])
        same(f"level {level}: ours", bootstrap.sample(mine), want[0])
        same(f"level {level}: the core's", bootstrap.sample(core), want[1])
    sleep()
    ids = {orders.id_of(mine), orders.id_of(core)}
    del mine, core
    gc.collect()
    listed = {model["id"] for model in orders.get_orders().models()}
    check("what was dropped asleep is gone", not ids & listed)
    left = [one for one in management.current_loaded_models if isinstance(one, sleeping.CoreEntry)]
    check("and has left the core's list", not left)
    check("an order for it is refused", unknown(next(iter(ids))))


def unknown(model_id: str) -> bool:
    try:
        orders.get_orders().sleep_here(control.SleepOrder((model_id,)))
    except control.UnknownModelError:
        return True
    return False


def cancelled() -> None:
    """A cancel between two models of an order undoes the first, and is the core's own."""
    one, two = courier(), stock("sd3")
    want = bootstrap.sample(one), bootstrap.sample(two)
    seen = []

    def progress(done: int, total: int, name: str) -> None:
        seen.append((done, total))
        management.interrupt_current_processing(done == 1)
        orders.show_progress(done, total, name)

    for give in (orders.get_orders().sleep_here, orders.get_orders().wake_here):
        order = control.SleepOrder() if not seen else control.WakeOrder()
        before = state(one), state(two)
        try:
            give(order, progress)
            check("cancelled", False)
        except management.InterruptProcessingException:
            check("cancelled", True)
        check(f"as before: {before}", (state(one), state(two)) == before)
        same("ours exact", bootstrap.sample(one), want[0]) if before[0] == "awake" else sleep()
        sleep()
    wake()
    same("exact", bootstrap.sample(one), want[0])
    same("the core's exact", bootstrap.sample(two), want[1])


def shared() -> None:
    """Two models of one budget: the one that wakes has the other make room."""
    budget = plans()["resident"]
    both = values.Budget(budget.device_bytes, 0, shared=True)
    one, two = courier(budget=both), courier(budget=both)
    want = bootstrap.sample(one)
    sleep(one)
    bootstrap.sample(two)
    receipt = wake(one)
    check(f"woken: {receipt['message']}", receipt["ok"])
    held = one.courier_engine.device_bytes, two.courier_engine.device_bytes
    check(f"{held} within {budget.device_bytes}", sum(held) <= budget.device_bytes)
    same("exact", bootstrap.sample(one), want)


def cycles() -> None:
    """Nothing grows over a hundred cycles, of ours and of the core's."""
    mine, core = courier(budget=plans()["pinned"]), stock("sd3")
    want = bootstrap.sample(mine), bootstrap.sample(core)

    def counts() -> tuple[int, ...]:
        gc.collect()
        memory = host.process_memory()
        modules = [m for model in (mine, core) for m in model.model.modules()]
        hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules)
        return memory.threads, memory.descriptors, hooks, len(management.current_loaded_models)

    for _ in range(10):
        sleep()
        wake()
    before, anonymous = counts(), host.process_memory().rss_anon_bytes
    for number in range(100):
        sleep(level=1 + number % 2)
        wake()
    grown = (host.process_memory().rss_anon_bytes - anonymous) / MIB
    check(f"threads, descriptors, hooks, entries {counts()} as before", counts() == before)
    check(f"RssAnon grew by {grown:.1f} MiB", grown < 8)
    same("ours exact", bootstrap.sample(mine), want[0])
    same("the core's exact", bootstrap.sample(core), want[1])


def threads() -> None:
    """Orders from another thread during a run: refused by the engine, and the picture is exact."""
    model = courier(budget=plans()["pinned"])
    want = bootstrap.sample(model, steps=20)
    answers = []

    def answer() -> str:
        try:
            sleep(model)
        except control.OrderFailedError as error:
            return str(error)
        wake(model)
        return "slept"

    def interfere() -> None:
        answers.extend(answer() for _ in range(50))

    thread = threading.Thread(target=interfere)
    engine = model.courier_engine
    with torch.inference_mode(), engine.run():
        thread.start()
        thread.join(60)
    check("every order during a run was refused", all("after the run" in a for a in answers))
    check(f"{len(answers)} answers", len(answers) == 50)
    same("exact", bootstrap.sample(model, steps=20), want)


PARTS = (ours, classic, control_nets, together, cancelled, shared, cycles, threads)


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
        orders.get_orders().wake_here(control.WakeOrder())
        management.unload_all_models()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
