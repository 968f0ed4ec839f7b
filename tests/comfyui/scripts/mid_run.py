"""ComfyUI asks things of a model in the middle of its run: each part prints what it compared.

python mid_run.py [PART ...]
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import bootstrap
import torch

pack = bootstrap.load_pack()

import comfy.controlnet  # noqa: E402
import comfy.hooks  # noqa: E402
import comfy.latent_formats  # noqa: E402
import comfy.model_management as management  # noqa: E402
import comfy.model_patcher  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402

loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")
CPU = torch.device("cpu")
failures: list[str] = []
part = ""


def check(what: str, passed: bool) -> None:
    print(f"{'ok  ' if passed else 'FAIL'} {part}: {what}", flush=True)
    if not passed:
        failures.append(what)


def stock(key: str) -> Any:
    return comfy.sd.load_diffusion_model(str(bootstrap.model_file(key)))


def courier(key: str, budget: Any) -> Any:
    model = loading.load_diffusion_model(bootstrap.model_file(key).name, "default", budget)
    model.attachment.measures_activations = False
    return model


def budgets(key: str) -> dict[str, Any]:
    engine = courier(key, values.Budget()).courier_engine
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


def vae() -> Any:
    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(bootstrap.model_file("vae"))))


def sample(model: Any, control: Any = None, steps: int = 2) -> torch.Tensor:
    shape = bootstrap.latent_shape(model)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    conds = [bootstrap.conditioning(model, 0), bootstrap.conditioning(model, 1)]
    if control is not None:
        for cond in conds:
            cond[0][1]["control"] = control
            cond[0][1]["control_apply_to_uncond"] = False
    return comfy.sample.sample(
        model, noise, steps, 2.0, "euler", "simple", *conds, torch.zeros(shape), seed=5,
        disable_pbar=True,
    )  # fmt: skip


def all_again(encoder: Any) -> None:
    """What a ControlNet with a VAE does in its first step."""
    models = management.loaded_models(only_currently_used=True)
    encoder.encode(torch.zeros(1, 32, 32, 3))
    management.load_models_gpu(models)


def once(act: Callable[[], None]) -> Callable[[], None]:
    done: list[int] = []

    def call() -> None:
        if not done:
            done.append(1)
            act()

    return call


def between_passes(model: Any, act: Callable[[], None]) -> Any:
    found, first = model.clone(), once(act)

    def wrapper(apply_model: Any, options: dict[str, Any]) -> Any:
        first()
        return apply_model(options["input"], options["timestep"], **options["c"])

    found.set_model_unet_function_wrapper(wrapper)
    return found


def in_a_block(model: Any, act: Callable[[], None]) -> Any:
    found, first = model.clone(), once(act)

    def block(options: dict[str, Any], extra: dict[str, Any]) -> Any:
        first()
        return extra["original_block"](options)

    found.set_model_patch_replace(block, "dit", "double_block", 2)
    return found


def in_a_layer(model: Any, act: Callable[[], None]) -> Any:
    found, first = model.clone(), once(act)
    attention = found.model.diffusion_model.blocks[2].self_attn

    def hook(*_: Any) -> None:
        handle.remove()
        first()

    handle = attention.register_forward_pre_hook(hook)
    return found


PLACES = {"between passes": between_passes, "in a block": in_a_block, "in a layer": in_a_layer}


def is_let_go(model: Any) -> bool:
    management.unload_all_models()
    engine = model.courier_engine
    return engine.device_bytes == 0 and engine.state.value == "unloaded"


class Hint(torch.nn.Module):
    """A control model that adds nothing, and is called."""

    dtype = torch.float32
    calls = 0

    def forward(self, **_: Any) -> dict[str, list[Any]]:
        Hint.calls += 1
        return {"input": [], "middle": [], "output": [None]}


def controlnet() -> None:
    encoder = vae()

    def control() -> Any:
        found = comfy.controlnet.ControlNet(
            Hint(),
            compression_ratio=8,
            latent_format=comfy.latent_formats.Wan21(),
            load_device=CPU,
        )
        return found.set_cond_hint(torch.zeros(1, 3, 32, 32), vae=encoder)

    want = sample(stock("wan"), control())
    for plan, budget in budgets("wan").items():
        model, before = courier("wan", budget), Hint.calls
        check(f"{plan}: equal", torch.equal(sample(model, control()), want))
        check(f"{plan}: the hint was used", Hint.calls > before)
        check(f"{plan}: ComfyUI can free it", is_let_go(model))


def loads() -> None:
    encoder = vae()
    for key in ("wan", "sd15"):
        places = PLACES if key == "wan" else {"between passes": between_passes}
        for place, put in places.items():
            want = sample(put(stock(key), lambda: all_again(encoder)))
            for plan, budget in budgets(key).items():
                model = courier(key, budget)
                run = put(model, lambda: all_again(encoder))
                check(f"{key} {place} {plan}: equal", torch.equal(sample(run), want))
                check(f"{key} {place} {plan}: a second run", torch.equal(sample(run), want))
                check(f"{key} {place} {plan}: ComfyUI can free it", is_let_go(model))


def evictions() -> None:
    """Everything is dropped in the middle of a run, or a part of it."""
    want = sample(stock("wan"))
    whole = 1 << 40
    acts = {
        "all models": management.unload_all_models,
        "room for another": lambda: management.free_memory(whole, CPU),
    }
    for place, put in PLACES.items():
        for plan, budget in budgets("wan").items():
            for name, act in acts.items():
                model = courier("wan", budget)
                found = sample(put(model, act))
                check(f"{name}, {place} {plan}: equal", torch.equal(found, want))
                engine = model.courier_engine
                check(f"{name}, {place} {plan}: dropped after it", engine.device_bytes == 0)
                check(f"{name}, {place} {plan}: and again", torch.equal(sample(model), want))
                check(f"{name}, {place} {plan}: ComfyUI can free it", is_let_go(model))


def lending() -> None:
    """A part is asked for: between passes it is lent until the run ends."""
    want = sample(stock("wan"))
    budget = budgets("wan")["mixed"]
    for place, put in PLACES.items():
        model, freed = courier("wan", budget), []

        def ask(model: Any = model, freed: list[int] = freed) -> None:
            before = model.loaded_size()
            told = model.partially_unload(CPU, 100_000)
            freed.append(before - model.loaded_size())
            check("what it says is what was freed", told == freed[0])

        check(f"{place}: equal", torch.equal(sample(put(model, ask)), want))
        check(f"{place}: {freed} bytes", (freed[0] >= 100_000) is (place != "in a layer"))
        before = model.loaded_size()
        check(f"{place}: and again", torch.equal(sample(model), want))
        check(f"{place}: it has them again", model.loaded_size() >= before + max(0, freed[0]))


def other_patches() -> None:
    """A clone with a LoRA is loaded between two passes of the plain model, and that one again."""
    plain = stock("wan")
    want, patched = sample(plain), sample(bootstrap.add_lora(plain, "wan_lora"))
    for plan, budget in budgets("wan").items():
        model = courier("wan", budget)
        lora = bootstrap.add_lora(model, "wan_lora")
        runs: list[Any] = []

        def switch(there: bool, lora: Any = lora, runs: list[Any] = runs) -> None:
            management.load_models_gpu([lora])
            if not there:
                management.load_models_gpu(runs)

        runs.append(between_passes(model, lambda: switch(False)))
        check(f"{plan}: there and back", torch.equal(sample(runs[0]), want))
        check(f"{plan}: with it", torch.equal(sample(lora), patched))
        found = sample(between_passes(model, lambda: switch(True)))
        check(f"{plan}: there, and it runs on with it", torch.equal(found, patched))
        check(f"{plan}: none again", torch.equal(sample(model), want))


SETS = ("add_", "set_", "remove_", "disable_", "_")
"""Methods that change what a node built, and none that loading calls."""
ENDS_A_RUN_ITSELF = {"cleanup", "deepclone_multigpu"}
"""What ComfyUI's own patcher does not survive, or refuses, in a run."""


def arguments_of(name: str, model: Any) -> list[tuple[Any, ...]] | None:
    """Calls to try; None for a method that nothing here knows."""
    key = next(iter(model.model_state_dict()))
    known: dict[str, list[tuple[Any, ...]]] = {
        "apply_hooks": [(None,)],
        "calculate_weight": [([], torch.zeros(2), key)],
        "clone_has_same_weights": [(model.clone(),)],
        "detach": [(), (False,)],
        "get_additional_models_with_key": [("x",)],
        "get_all_callbacks": [("x",)],
        "get_all_wrappers": [("x",)],
        "get_attachment": [("x",)],
        "get_callbacks": [("x", "y")],
        "get_clone_model_override": [()],
        "get_combined_hook_patches": [(comfy.hooks.HookGroup(),)],
        "get_free_memory": [(CPU,)],
        "get_injections": [("x",)],
        "get_model_object": [("model_sampling",)],
        "get_wrappers": [("x", "y")],
        "is_clone": [(model,)],
        "load": [(), (CPU, 1000), (CPU, 0, False, True)],
        "memory_required": [((1, 16, 1, 8, 8),)],
        "model_patches_call_function": [],
        "model_patches_to": [(CPU,)],
        "partially_load": [(CPU,), (CPU, 1e6)],
        "partially_unload": [(CPU,), (CPU, 1e6), (CPU, 1e12)],
        "partially_unload_ram": [(1e6,)],
        "patch_cached_hook_weights": [],
        "patch_hook_weight_to_device": [],
        "patch_hooks": [(None,)],
        "patch_model": [(), (CPU, 1000)],
        "patch_weight_to_device": [],
        "pin_weight_to_device": [(key,)],
        "prepare_hook_patches_current_keyframe": [],
        "prepare_state": [(torch.zeros(1),), (torch.zeros(1), {})],
        "register_all_hook_patches": [],
        "unpatch_model": [(), (CPU,), (None, False)],
        "unpin_weight": [(key,)],
    }
    if name in known:
        return known[name]
    parameters = list(inspect.signature(getattr(model, name)).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    return None if needed else [()]


def every_method() -> None:
    want = sample(stock("wan"))
    budget = budgets("wan")["mixed"]
    model = courier("wan", budget)
    names = [name for name in dir(model) if not name.startswith("__")]
    methods = [
        name
        for name in names
        if inspect.isroutine(inspect.getattr_static(type(model), name, None))
        and not name.startswith(SETS)
        and name not in ENDS_A_RUN_ITSELF
    ]
    check(f"there are methods ({len(methods)})", len(methods) > 25)
    for name in methods:
        calls = arguments_of(name, model)
        if calls is None:
            check(f"{name} is known here", False)
            continue
        fitting = [call for call in calls if fits(getattr(model, name), call)]
        check(f"{name}: one of its calls fits this ComfyUI", bool(fitting) or not calls)
        for call in fitting:
            for place, put in PLACES.items():
                one_call(model, name, call, place, put, want)
    check("ComfyUI can free it", is_let_go(model))


def fits(method: Any, call: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(method).bind(*call)
    except TypeError:
        return False
    return True


def one_call(
    model: Any, name: str, call: tuple[Any, ...], place: str, put: Callable[..., Any], want: Any
) -> None:
    errors: list[BaseException] = []
    runs: list[Any] = []

    def act() -> None:
        try:
            found = getattr(runs[0], name)(*call)
            if hasattr(found, "__enter__"):
                with found:
                    pass
            elif isinstance(found, Iterator):
                list(found)
        except BaseException as error:
            errors.append(error)

    runs.append(put(model, act))
    found = sample(runs[0])
    where = f"{name}{tuple(map(str, call))} {place}"
    check(f"{where}: no error {errors}", errors == [])
    check(f"{where}: equal", torch.equal(found, want))


def two_threads() -> None:
    """A second thread waits for the first: both are exact."""
    want = sample(stock("wan"))
    model = courier("wan", budgets("wan")["mixed"])
    reached, results = threading.Event(), {}

    def second() -> None:
        with torch.inference_mode():
            reached.wait(60)
            results["second"] = sample(model)

    thread = threading.Thread(target=second)
    thread.start()

    def act() -> None:
        reached.set()
        # The other one is at the model's door, or on its way there; either way it has to wait.
        thread.join(0.5)
        check("the second waits", thread.is_alive())

    results["first"] = sample(between_passes(model, act))
    thread.join(120)
    for name, found in sorted(results.items()):
        check(f"{name}: equal", torch.equal(found, want))
    check("ComfyUI can free it", is_let_go(model))


PARTS = (
    controlnet, loads, evictions, lending, other_patches, every_method, two_threads,
)  # fmt: skip


def main(names: list[str]) -> int:
    global part
    by_name = {function.__name__: function for function in PARTS}
    for name in names or list(by_name):
        part = name
        try:
            with torch.inference_mode():
                by_name[name]()
        except BaseException:
            import traceback

            traceback.print_exc()
            check("raised, see stderr", False)
        management.unload_all_models()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
