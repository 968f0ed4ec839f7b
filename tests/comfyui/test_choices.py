"""What a user may choose is compared with the lists by us: the core leaves that to such nodes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

SCRIPT = """
import bootstrap
import torch

pack = bootstrap.load_pack()
budgets = bootstrap.submodule(pack, "nodes.graph.budget")
loaders = bootstrap.submodule(pack, "nodes.graph.loaders")
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
values = bootstrap.submodule(pack, "offload_core.values")

def refusal(call, *args):
    try:
        call(*args)
    except values.CourierError as error:
        return str(error)
    raise AssertionError("not refused")

node = budgets.CourierBudgetNode
assert node.validate_inputs("12 GiB card / 32 GiB RAM") is True
assert "choose one of auto, 6 GiB card / 16 GiB RAM" in node.validate_inputs("10 GiB")
assert "choose one of auto" in refusal(budgets.budget_from, "10 GiB", 0.0, -1.0)
assert "must be -1 (automatic), 0 or more" in refusal(budgets.budget_from, "custom", 0.0, -0.5)
assert "must be a number of GiB" in refusal(budgets.budget_from, "custom", "2GB", -1.0)
assert "choose 'each model'" in node.validate_inputs("auto", "some")
assert "choose 'each model'" in refusal(budgets.budget_from, "custom", 1.0, 0.0, "some")
assert not node.execute("custom", 1.0, 0.0).result[0].budget.shared
assert node.execute("custom", 1e-10, 0.0).result[0].budget.device_bytes == 1
together = node.execute("custom", 1.0, 0.0, "all models together").result[0].budget
assert (together.device_bytes, together.host_bytes, together.shared) == (2**30, 0, True)
assert not node.execute("auto", 1.0, 0.0, "all models together").result[0].budget.shared
file = bootstrap.model_file("wan").name
loader = loaders.CourierLoadDiffusionModel
assert loader.validate_inputs(file, "default") is True
assert "choose one of default, fp8_e4m3fn" in loader.validate_inputs(file, "int4")

# A conversion that the host budget does not allow is refused before anything is copied.
small = values.Budget(None, 2**20)
text = refusal(loading.load_diffusion_model, file, "fp8_e4m3fn", small)
assert "converted to another dtype, and 1.00 MiB is allowed" in text, text
model = loading.load_diffusion_model(file, "fp8_e4m3fn", values.Budget(None, 2**30))
assert model.courier_engine.snapshot().memory.copied_bytes > 2**20

# Two models under one budget: what they hold together stays under it, and both are exact.
import comfy.model_management

want = bootstrap.sample(bootstrap.load_stock("wan"))
comfy.model_management.unload_all_models()
del model
engine = loading.load_diffusion_model(file, "default", values.Budget()).courier_engine
whole = engine.plan(values.Budget()).device_bytes
shared = values.Budget(whole * 3 // 2, 2**24, shared=True)
models = [loading.load_diffusion_model(file, "default", shared) for _ in range(2)]
for _ in range(2):
    for model in models:
        assert torch.equal(bootstrap.sample(model), want)
        held = [m.courier_engine.device_bytes for m in models]
        assert sum(held) <= whole * 3 // 2, held
        assert model.courier_engine.device_bytes == whole
        locked = [m.courier_engine.snapshot().memory.host_bytes for m in models]
        assert sum(locked) <= 2**24, locked
print("all checked")
"""


def test_unknown_choices_and_conversions_beyond_the_budget_are_refused(
    run_in_comfyui: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert "all checked" in run_in_comfyui(SCRIPT).stdout
