"""A file that the system will not map is read into memory, within the host budget, and said so."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

SCRIPT = """
import bootstrap, torch

pack = bootstrap.load_pack()
loading = bootstrap.submodule(pack, "nodes.comfyui.loading")
building = bootstrap.submodule(pack, "nodes.comfyui.build.diffusion")
values = bootstrap.submodule(pack, "offload_core.values")
want = bootstrap.sample(bootstrap.load_stock("wan"))
file = bootstrap.model_file("wan")

def refuse(header):
    raise values.MappingError("the system said no")

building.open_mapping = refuse
model = loading.load_diffusion_model(file.name, "default", values.Budget(None, 2**30))
assert torch.equal(bootstrap.sample(model), want)
snapshot = model.courier_engine.snapshot()
assert snapshot.memory.copied_bytes > 0.9 * file.stat().st_size, snapshot.memory
assert any("could not be mapped and was read into memory" in note for note in snapshot.notes)
try:
    loading.load_diffusion_model(file.name, "default", values.Budget(None, 2**20))
except values.MappingError as error:
    assert "would exceed the host budget of 1.00 MiB" in str(error), error
else:
    raise AssertionError("a file larger than the budget was read")
print("all checked")
"""


def test_a_file_that_cannot_be_mapped_is_read_within_the_host_budget(
    run_in_comfyui: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    assert "all checked" in run_in_comfyui(SCRIPT).stdout
